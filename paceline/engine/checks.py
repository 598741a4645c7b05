"""Checks that packed steps are exact: refusals by name, and a self-check against the plain forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from paceline.engine.attention import AttentionFacts
from paceline.engine.index import INDICES, choosing_few
from paceline.engine.interface import Engine, EngineInfo
from paceline.engine.own_attention import ALIBI, attention_of
from paceline.engine.probe import ROWWISE, probe_attention
from paceline.engine.schedule import run_schedule, schedule_length
from paceline.protocol.errors import Unsupported
from paceline.protocol.features import NO_FEATURES, FeatureNeed

SELF_CHECK_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference from the plain forward pass, as a share of the largest logit. In float32 rounding alone
reaches 9e-4: Qwen2.5-Coder 0.5B on 32 random texts, whose median row differs by 4e-6. In bfloat16 it reaches .18 with
Qwen2.5-Coder 1.5B, so types of 16 bits have `ROUNDING_SHARES` of the model's own rounding where that is more."""
ROUNDING_SHARES = 2.0
"""Differences that two correct passes may have, over that between the model's own two ways to attend."""
INDEX_LAYER = "indexed_attention"
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", INDEX_LAYER)
_STATES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Types of layers that have a state, those that attend beside it included."""
RAGGED_TERMS = MappingProxyType({ALIBI: "ALiBi", INDICES: "an index of keys"})
"""Terms of attention that only steps of any shape, in one process, have; in words."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Settings of the length of windows and of chunks in transformers' configurations."""
CHECKED_WINDOW = 5
"""Positions of a window, or keys that an index chooses, during the self-check, so that its tree begins where rows no
longer see the first ones."""
_MOVING_ROPE = ("dynamic", "longrope")


def refuse_config(config: PreTrainedConfig) -> None:
    """Refuse by name a configuration that can't be packed.

    Raises:
        Unsupported: encoder-decoder, or layers that are not attention over earlier positions.
    """
    text: Any = config.get_text_config()
    if config.is_encoder_decoder:
        raise Unsupported(f"model type {config.model_type}: an encoder-decoder; decoders only")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in (*_ATTENTION, *_STATES, *ROWWISE):
            raise Unsupported(f"model type {config.model_type}: layers of type {kind}; attention and states only")


def refuse_states(model: PreTrainedModel, attention: AttentionFacts, *, reproducible: bool, static: bool) -> None:
    """Refuse by name what states, indices and ALiBi are not implemented for, and a model that lacks layers of a type.

    Raises:
        Unsupported: naming the mode, or the type of layers that a configuration has and the model hasn't.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    kinds &= {*(() if attention.mixers else _STATES), *(() if INDICES in attention.terms else (INDEX_LAYER,))}
    if kinds:  # it would be served as another model
        raise Unsupported(f"model type {model.config.model_type}: layers of type {min(kinds)}, of which it has none")
    lacks = ["recurrent layers"] if attention.mixers else []
    lacks += [words for term, words in RAGGED_TERMS.items() if term in attention.terms]
    for applies, mode in ((reproducible, "in reproducible mode"), (static, "in steps of few shapes")):
        if applies and lacks:
            raise Unsupported(f"{type(model).__name__} {mode}: {lacks[0]}")


def refuse_rope(config: Any, max_length: int) -> None:
    """Refuse rotary frequencies that move with the longest position in a step, once that can happen."""
    rope = getattr(config, "rope_parameters", None) or {}
    own: int = getattr(config, "max_position_embeddings", max_length)
    trained_length: int = rope.get("original_max_position_embeddings") or own
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") in _MOVING_ROPE and max_length > trained_length:
            raise Unsupported(
                f"rope type {each['rope_type']} past {trained_length} tokens: its frequencies depend on the batch; "
                f"set max_model_len to at most {trained_length}"
            )


@dataclass(frozen=True, eq=False)
class PlainReference:
    """Random texts and the logits of the model's own code for them, with windows shorter than the texts."""

    model: str
    dtype: torch.dtype
    attention: AttentionFacts
    texts: tuple[tuple[int, ...], tuple[int, ...]]
    logits: tuple[torch.Tensor, ...]  # each [length, V]
    rounding: float = 0.0
    """How far the model's own two ways to attend differ, as a share of the largest logit; 0 in float32."""

    @property
    def tolerance(self) -> float:
        """The largest difference that an engine's logits may have, as a share of the largest."""
        return max(SELF_CHECK_TOLERANCE.get(self.dtype, 5e-2), ROUNDING_SHARES * self.rounding)

    def shares(self, logits: Sequence[Any]) -> Iterator[float]:
        """By text, how far logits are from these, as a share of the largest."""
        for mine, theirs in zip(logits, self.logits, strict=True):
            yield float((torch.as_tensor(mine) - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))


def plain_reference(model: PreTrainedModel, info: EngineInfo, attention: AttentionFacts) -> PlainReference:
    """Run the model as transformers made it, before anything of ours replaces a part.

    `attention`: what its layers ask for.

    Raises:
        InvalidInput: no room for the texts.
        Unsupported: windows that its configuration doesn't set.
    """
    length = schedule_length(info)
    vocab_size = info.fingerprint.vocab_size
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(vocab_size, (2, length), generator=generator).tolist()
    texts = (tuple(first), tuple(second))
    windows = _small_windows(model.config) if attention.has_windows else nullcontext()
    with windows, choosing_few(model, CHECKED_WINDOW):
        facts = probe_attention(model, info.max_length) if attention.has_windows else attention
        plain = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        logits = tuple(_plain_logits(model, text, vocab_size, plain) for text in texts)
        rounds = model.dtype != torch.float32 and plain != "eager"
        others = [_plain_logits(model, text, vocab_size, "eager") for text in texts] if rounds else logits
    name = type(model).__name__
    for kind, small in zip(attention.kinds, facts.kinds, strict=False):
        if kind.horizon is not None and (small.horizon is None or not small.horizon[length - 1]):
            raise Unsupported(f"{name}: windows that its configuration does not set can't be checked")
    if facts.kind_of_layer != attention.kind_of_layer:
        raise Unsupported(f"{name}: windows of different kinds that one setting changes can't be checked")
    reference = PlainReference(name, model.dtype, facts, texts, logits)
    return replace(reference, rounding=max(reference.shares(others)))


@contextmanager
def _small_windows(config: PreTrainedConfig) -> Iterator[None]:
    """Make windows shorter than the check's texts, so that the check covers how engines apply them.

    The probe has compared their real length with the model's own masks, position by position.
    """
    text: Any = config.get_text_config()
    settings = {name: getattr(text, name, None) for name in _WINDOWS}
    sizes = {name: size for name, size in settings.items() if isinstance(size, int)}
    for name, size in sizes.items():
        setattr(text, name, min(size, CHECKED_WINDOW))
    try:
        yield
    finally:
        for name, size in sizes.items():
            setattr(text, name, size)


def refuse_row_counting(config: Any, max_length: int, step_rows: int) -> None:
    """Refuse queries that are scaled by their place in a step once that changes anything (Llama 4).

    Raises:
        Unsupported: naming the limit.
    """
    flat: int | None = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", 0) else None
    if flat is not None and max(max_length, step_rows) >= flat:
        raise Unsupported(
            f"model type {config.model_type}: queries scaled by their place in the step from {flat} on; set "
            f"max_model_len, and max_step_rows + prefill_chunk, to less than {flat}"
        )


def self_check(engine: Engine, reference: PlainReference, need: FeatureNeed = NO_FEATURES) -> None:
    """Compare packed steps (ragged chunks, a tree, rollback, compaction) with the plain forward pass.

    `need`: hidden states that are kept meanwhile, which must change nothing.

    Raises:
        Unsupported: they differ by more than the reference's `tolerance`.
    """
    for share in reference.shares(run_schedule(engine, reference.texts, need)):
        if not share <= reference.tolerance:
            raise Unsupported(
                f"{reference.model}: packed logits differ from its own by {share:.2g} of the largest, "
                f"tolerance {reference.tolerance:.2g}"
            )


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, text: tuple[int, ...], vocab_size: int, attention: str) -> torch.Tensor:
    """The model's own logits [len(text), V], through attention code that is not ours."""
    with attention_of(model, attention):
        logits: torch.Tensor = model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits
    return logits[0, :, :vocab_size].float().cpu()
