"""GGUF files as plain float32 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.models.progress import ProgressCallback, PullProgress
from paceline.models.whole import load_whole, quiet_loading
from paceline.protocol.errors import InternalError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_CHECK_PROMPT = "The quick brown fox jumps over the lazy dog. 0123456789\n\tdef f(x): return x"


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide a model's numbers."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def convert_gguf(gguf: Path, folder: Path, report: ProgressCallback | None = None) -> None:
    """Write a GGUF model as a plain float32 safetensors folder with tokenizer and chat template.

    Raises:
        InvalidInput: the GGUF lacks tensors.
        InternalError: the folder, loaded again, doesn't give the GGUF's logits bit for bit.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = report or (lambda _: None)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with quiet_loading():
        report(PullProgress("load", 0.65))
        tokenizer = AutoTokenizer.from_pretrained(**source)
        ids = tokenizer.encode(_CHECK_PROMPT)
        loaded = load_whole(gguf.name, **source, dtype="float32")
        logits = _logits(loaded, ids)
        report(PullProgress("convert", 0.85))
        _plain_copy(loaded).save_pretrained(folder)
        del loaded  # a model of some size has no room beside itself
        tokenizer.save_pretrained(folder)
        report(PullProgress("check", 0.9))
        _check_tokenizer(tokenizer, AutoTokenizer.from_pretrained(folder), ids)
        _check_logits(logits, _logits(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), ids))


def _plain_copy(loaded: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that doesn't know of GGUF, which can be saved and loads plainly."""
    import torch

    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain


def _logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits
    return logits


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, saved: PreTrainedTokenizerBase, ids: list[int]) -> None:
    if saved.encode(_CHECK_PROMPT) != ids or saved.get_vocab() != tokenizer.get_vocab():
        raise InternalError("the saved tokenizer differs from the GGUF's")


def _check_logits(before: torch.Tensor, after: torch.Tensor) -> None:
    if not bool((before == after).all()):
        worst = float((before - after).abs().max())
        raise InternalError(f"the converted model's logits differ from the GGUF's by up to {worst:g}")
