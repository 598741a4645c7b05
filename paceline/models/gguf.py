"""GGUF files as plain float32 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.models.progress import ProgressCallback, PullProgress
from paceline.models.whole import load_whole, quiet_loading
from paceline.protocol.errors import InternalError

if TYPE_CHECKING:
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
        loaded = load_whole(gguf.name, **source, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(**source)
        report(PullProgress("convert", 0.85))
        _plain_copy(loaded).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        report(PullProgress("check", 0.9))
        converted = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        _check_conversion(loaded, converted, tokenizer, AutoTokenizer.from_pretrained(folder))


def _plain_copy(loaded: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that doesn't know of GGUF, which can be saved and loads plainly."""
    import torch

    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    fresh = type(loaded)(config)
    torch.nn.Module.to(fresh, torch.float32)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    return fresh


def _check_conversion(
    loaded: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    saved_tokenizer: PreTrainedTokenizerBase,
) -> None:
    import torch

    ids = tokenizer.encode(_CHECK_PROMPT)
    if saved_tokenizer.encode(_CHECK_PROMPT) != ids or saved_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InternalError("the saved tokenizer differs from the GGUF's")
    with torch.inference_mode():
        prompt = torch.tensor([ids])
        before, after = (model(input_ids=prompt).logits for model in (loaded, converted))
    if not torch.equal(before, after):
        worst = float((before - after).abs().max())
        raise InternalError(f"the converted model's logits differ from the GGUF's by up to {worst:g}")
