"""GGUF files as models of transformers, and as plain float32 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.models.gguf_config import model_config
from paceline.models.gguf_header import read_header
from paceline.models.gguf_tensors import model_tensors
from paceline.models.gguf_tokenizer import file_tokenizer
from paceline.models.pullable import ProgressCallback, PullProgress
from paceline.models.whole import load_whole, quiet_loading
from paceline.protocol.errors import InternalError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


_CHECK_PROMPT = "The quick brown fox jumps over the lazy dog. 0123456789\n\tdef f(x): return x"


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide a model's numbers."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def gguf_sources(file: Path) -> dict[str, Any]:
    """The arguments of `load_whole` for a GGUF file: its configuration and tensors, in the place of a folder.

    Raises:
        InvalidInput: the file is damaged, or says what can't be honoured; names it.
    """
    header = read_header(file)
    config = model_config(header)
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": model_tensors(header, config)}


def convert_gguf(gguf: Path, folder: Path, report: ProgressCallback | None = None) -> None:
    """Write a GGUF model as a plain float32 safetensors folder with tokenizer and chat template.

    Raises:
        InvalidInput: as `gguf_sources`.
        InternalError: the folder, loaded again, doesn't give the logits that the model gave before it was saved.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = report or (lambda _: None)
    with quiet_loading():
        report(PullProgress("load", 0.65))
        tokenizer = file_tokenizer(read_header(gguf))
        ids = tokenizer.encode(_CHECK_PROMPT)
        model = load_whole(gguf.name, **gguf_sources(gguf), dtype="float32")
        logits = _logits(model, ids)
        report(PullProgress("convert", 0.85))
        model.save_pretrained(folder)
        del model  # a model of some size has no room beside itself
        tokenizer.save_pretrained(folder)
        report(PullProgress("check", 0.9))
        new_tokenizer = AutoTokenizer.from_pretrained(folder)
        if new_tokenizer.encode(_CHECK_PROMPT) != ids or new_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise InternalError("the saved tokenizer differs from the GGUF's")
        again = _logits(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), ids)
        if not bool((again == logits).all()):
            worst = float((again - logits).abs().max())
            raise InternalError(f"the saved model's logits differ from those before it was saved by up to {worst:g}")


def _logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits
    return logits
