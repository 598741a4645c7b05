"""What packed steps can serve exactly: refusals by name, and a self-check against the plain forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from paceline.engine.forward import ATTENTION_NAME, AttentionCall, packed_forward
from paceline.engine.interface import Engine, EngineInfo, StepItem, StepPlan
from paceline.engine.kv import KVShape
from paceline.protocol.errors import InvalidInput, Unsupported

SELF_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference from the plain forward pass, as a share of the largest logit; chosen, not tuned."""
_FULL_ATTENTION = ("full_attention", "sliding_attention")
_MOVING_ROPE = ("dynamic", "longrope")


def refuse_config(config: PreTrainedConfig) -> None:
    """Refuse by name what the configuration says can't be packed.

    Raises:
        Unsupported: encoder-decoder, or layers that are not attention over all positions.
    """
    text: Any = config.get_text_config()
    if config.is_encoder_decoder:
        raise Unsupported(f"model type {config.model_type}: an encoder-decoder; decoders only")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _FULL_ATTENTION:
            raise Unsupported(f"model type {config.model_type}: layers of type {kind}; full attention only")


def refuse_rope(config: Any, max_length: int) -> None:
    """Refuse rotary frequencies that move with the longest position in a step, once that can happen."""
    rope = getattr(config, "rope_parameters", None) or {}
    own: int = getattr(config, "max_position_embeddings", max_length)
    trained: int = rope.get("original_max_position_embeddings") or own
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") in _MOVING_ROPE and max_length > trained:
            raise Unsupported(
                f"rope type {each['rope_type']} past {trained} tokens: its frequencies depend on the batch; "
                f"set max_model_len to at most {trained}"
            )


@dataclass
class _AttentionProbe:
    """Attends a row to itself alone, noting what each layer passes to attention."""

    max_length: int
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self._refuse_extras(call)
        name = type(call.module).__name__
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int):
            raise Unsupported(f"{name}: attention without a layer_idx")
        heads, kv_heads, head_dim = call.query.shape[1], call.key.shape[1], call.key.shape[3]
        if call.key.shape != call.value.shape or call.query.shape[3] != head_dim or heads % kv_heads:
            raise Unsupported(f"{name}: queries, keys and values of different widths")
        if layer in self.shapes:
            raise Unsupported(f"{name}: attends twice in layer {layer}")
        self.shapes[layer] = (kv_heads, head_dim, heads // kv_heads)
        return call.value.repeat_interleave(heads // kv_heads, dim=1).transpose(1, 2)

    def _refuse_extras(self, call: AttentionCall) -> None:
        name = type(call.module).__name__
        window = call.extras.get("sliding_window")
        if window is not None and window < self.max_length:
            raise Unsupported(
                f"{name}: a sliding window of {window} tokens, shorter than max_model_len = {self.max_length}"
            )
        for extra in ("softcap", "s_aux", "position_bias"):
            if call.extras.get(extra) is not None:
                raise Unsupported(f"{name}: attention with {extra}")
        if not getattr(call.module, "is_causal", True):
            raise Unsupported(f"{name}: attention that is not causal")


@torch.inference_mode()
def probe_kv_shape(model: PreTrainedModel, max_length: int) -> KVShape:
    """Run one row to learn what a KV row holds; refuses what packed attention can't serve.

    Raises:
        Unsupported: naming the module and what it asks of attention.
    """
    if not model.is_backend_compatible():
        raise Unsupported(f"{type(model).__name__}: does not use transformers' attention interface")
    probe = _AttentionProbe(max_length)
    packed_forward(model, probe, [0], [0], [0])
    layers: int = model.config.get_text_config().num_hidden_layers
    if sorted(probe.shapes) != list(range(layers)):
        raise Unsupported(f"{type(model).__name__}: {len(probe.shapes)} of {layers} layers are attention")
    if len(set(probe.shapes.values())) != 1:
        raise Unsupported(f"{type(model).__name__}: layers with KV rows of different shapes")
    kv_heads, head_dim, groups = probe.shapes[0]
    return KVShape(layers, kv_heads, head_dim, groups, model.dtype, model.device)


@dataclass(frozen=True)
class PlainReference:
    """Random texts and the logits that the model's own code gives for them."""

    model: str
    dtype: torch.dtype
    texts: tuple[tuple[int, ...], tuple[int, ...]]
    logits: tuple[torch.Tensor, ...]  # each [length, V]


def plain_reference(model: PreTrainedModel, info: EngineInfo) -> PlainReference:
    """Run the model as transformers made it, before anything of ours replaces a part."""
    length = min(24, info.max_length, info.max_kv_rows // 4)
    if length < 8:
        raise InvalidInput.of("max_model_len and kv_bytes", length, "room for at least 8 tokens, and 32 KV rows")
    vocab_size = info.fingerprint.vocab_size
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(vocab_size, (2, length), generator=generator).tolist()
    texts = (tuple(first), tuple(second))
    logits = tuple(_plain_logits(model, text, vocab_size) for text in texts)
    return PlainReference(type(model).__name__, model.dtype, texts, logits)


def self_check(engine: Engine, reference: PlainReference) -> None:
    """Compare packed steps (ragged chunks, a tree, rollback, compaction) with the plain forward pass.

    Raises:
        Unsupported: they differ by more than `SELF_CHECK_TOLERANCE`.
    """
    tolerance = SELF_CHECK_TOLERANCE.get(reference.dtype, 5e-2)
    for mine, theirs in zip(_run_schedule(engine, reference.texts), reference.logits, strict=True):
        share = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
        if not share <= tolerance:
            raise Unsupported(
                f"{reference.model}: packed logits differ from its own by {share:.2g} of the largest, "
                f"tolerance {tolerance:g}"
            )


def _run_schedule(engine: Engine, texts: tuple[tuple[int, ...], tuple[int, ...]]) -> list[torch.Tensor]:
    """Logits [length, V] of two texts, the first by chunks and a rolled-back tree, the second by ragged chunks."""
    first, second = texts
    end = len(first)
    wrong = [(token + 1) % engine.info.fingerprint.vocab_size for token in first]
    tree = (wrong[5], first[5], wrong[6], first[6])
    steps = (
        (StepItem(0, 0, first[:3], logit_rows=(0, 1, 2)), StepItem(1, 0, second[:1], logit_rows=(0,))),
        (StepItem(0, 3, (first[3], first[4], wrong[5]), logit_rows=(0, 1)), _chunk(1, second, 1, 6)),
        (StepItem(0, 5, tree, (-1, -1, 1, 1), logit_rows=(1, 3)), _chunk(1, second, 6, 7)),
        (
            StepItem(0, 7, first[7:], kept_rows=(6, 8), logit_rows=tuple(range(end - 7))),
            _chunk(1, second, 7, end),
        ),
    )
    rows: list[list[torch.Tensor]] = [[], []]
    sessions = (0, 1)
    try:
        for session in sessions:
            engine.open(session, end + 4)
        for items in steps:
            for session, logits in enumerate(engine.step(StepPlan(items))):
                rows[session].append(torch.from_numpy(logits.copy()))
    finally:
        for session in sessions:
            engine.close(session)
    return [torch.cat(each) for each in rows]


def _chunk(session: int, text: tuple[int, ...], start: int, end: int) -> StepItem:
    return StepItem(session, start, text[start:end], logit_rows=tuple(range(end - start)))


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, text: tuple[int, ...], vocab_size: int) -> torch.Tensor:
    """The model's own logits [len(text), V], through attention code that is not ours."""
    plain = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    model.set_attn_implementation(plain)
    try:
        logits: torch.Tensor = model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits[0, :, :vocab_size].float().cpu()
