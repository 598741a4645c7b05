"""From a transformers decoder to an engine that is known to be exact.

What the packed path can't serve exactly is refused by name, from what the
configuration says and from what each layer passes to attention. What is left
must prove itself: a ragged schedule of chunks, a tree, a rollback and a
compaction must give the logits of the model's own plain forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.engine.attention import AttentionFacts
from paceline.engine.checks import (
    CHECKED_WINDOW,
    PlainReference,
    plain_reference,
    refuse_config,
    refuse_rope,
    refuse_row_counting,
    refuse_states,
    self_check,
)
from paceline.engine.cpu.fused import fuse_layers
from paceline.engine.cpu.linear import can_pack, frozen_linear, outside_reads, pack_linears
from paceline.engine.cpu.row_decoder import RowDecoder, can_decode
from paceline.engine.cpu.row_products import PanelLinear, has_wide_vectors, in_int8
from paceline.engine.cpu.thread_pool import ThreadPool
from paceline.engine.cuda.buckets import PAGE_ROWS, common_shapes
from paceline.engine.cuda.device import choose_kernels, empty_caches
from paceline.engine.cuda.graphs import runner_for
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.fingerprint import RAGGED, STATIC, numeric_fingerprint
from paceline.engine.hidden_states import feature_offer
from paceline.engine.index import choosing_few
from paceline.engine.interface import Engine, EngineInfo
from paceline.engine.memory import MemoryPlan, plan_memory
from paceline.engine.probe import probe_attention
from paceline.engine.reproducible.engine import ReproducibleEngine
from paceline.engine.reproducible.experts import tile_experts
from paceline.engine.reproducible.isolation import isolation_check
from paceline.engine.reproducible.shapes import BUCKET_ROWS, describe_shapes
from paceline.engine.states import serve_mixers
from paceline.engine.transformer import DecoderEngine, ServedDecoder, TransformerEngine
from paceline.engine.weights import load_decoder, select_device, select_dtype, set_threads
from paceline.models.resolve import ModelSource
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.errors import InvalidInput, Unsupported, require
from paceline.protocol.features import EMBEDDING, FINAL, NO_FEATURES, FeatureNeed, FeatureOffer
from paceline.protocol.handshake import Fingerprint
from paceline.runtime.config import FAST_DTYPE, NOT_QUANTIZED, EngineSettings

logger = logging.getLogger(__name__)


def quantized_name(name: str, settings: EngineSettings) -> str:
    """A model's name, which tells how its weights are stored: a coordinator takes targets of one name alone."""
    return name if settings.quantization == NOT_QUANTIZED else f"{name}#{settings.quantization}"


def refuse_quantization(
    settings: EngineSettings, device: torch.device, dtypes: Collection[torch.dtype | str], ranks: int = 1
) -> None:
    """Refuse by name what weights of eight bits are not implemented for.

    Args:
        settings: which may ask for them.
        device: where the model will run.
        dtypes: of its weights.
        ranks: how many will share it.

    Raises:
        Unsupported: naming the setting that stands against it.
    """
    if settings.quantization == NOT_QUANTIZED:
        return
    reasons = (
        (device.type != "cpu", f"on {device.type}: CPUs only"),
        (ranks > 1, f"with tensor_parallel_size = {ranks}: one process only"),
        (settings.reproducible, "with reproducible = true: its tiles are of float32"),
        (set(dtypes) != {torch.float32}, f"with weights of {', '.join(map(str, dtypes))}: torch.float32 only"),
        (not has_wide_vectors(), "on this CPU: it has no vectors of 512 bits"),
    )
    for applies, reason in reasons:
        if applies:
            raise Unsupported(f"quantization = {settings.quantization} {reason}")


@torch.inference_mode()
def round_linears(model: torch.nn.Module) -> None:
    """Give every linear layer the weights that its integers and scales stand for; a tied embedding keeps its own."""
    pack_linears(model, _round_linear)


def _round_linear(linear: torch.nn.Linear) -> torch.nn.Linear:
    integers, scales = in_int8(linear.weight.detach())
    return frozen_linear(integers.to(scales.dtype).mul_(scales), linear.bias)


def load_decoder_engine(source: ModelSource, model: str, settings: EngineSettings) -> Engine:
    """Load a transformers decoder as an engine; `paceline.engine.loading.load_engine` says what it raises."""
    set_threads(settings.threads)
    device = select_device(settings.device)
    refuse_quantization(settings, device, {select_dtype(settings.dtype, device)})  # before weights are read
    decoder = load_decoder(source, settings)
    tokenizer = load_tokenizer(model, trust_remote_code=settings.trust_remote_code)
    return build_engine(decoder, tokenizer, settings, source.name)


def build_engine(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    settings: EngineSettings,
    name: str,
    *,
    reduced_head: bool = False,
    static: bool | None = None,
) -> Engine:
    """Make an engine of a loaded decoder, after checking that it can be served exactly.

    `reduced_head`: the model reads the tokenizer's ids but has logits for fewer, which the caller maps.
    `static`: whether steps have few shapes (`paceline.engine.cuda`); unset: on GPUs where they can, unless
    reproducible.
    """
    facts = examine(model, tokenizer, settings, name, reduced_head=reduced_head, static=static)
    static = facts.static
    packs, features = can_pack(model), facts.features
    memory = plan_memory(
        model, settings, facts.attention, facts.max_length, packs=packs, static=static, features=features
    )
    logger.info("%s", memory)
    info = facts.info(whole_kv_rows(memory, settings, static=static))
    panel_type, row_decoder = None if static else panel_dtype(model, settings), None
    if panel_type == torch.int8:
        round_linears(model)
    reference = plain_reference(model, info, facts.attention)
    if can_pack(model) or static:
        fuse_layers(model)
        empty_caches(model.device)
    if panel_type is not None:
        row_decoder = in_panels(model, panel_type, facts)
    elif can_pack(model):
        pack_linears(model, exclude=facts.read_outside)
    decoder = ServedDecoder(model, info, facts.attention, settings)
    if static:
        return _build_static(decoder, reference)
    if settings.reproducible:
        tile_experts(model)
        reproducible = ReproducibleEngine(decoder)
        with _attending(reproducible, reference.attention):
            self_check(reproducible, reference)
            isolation_check(reproducible, settings.reproducible_rows)
        return reproducible
    serve_mixers(facts.attention.mixers)
    engine = TransformerEngine(decoder, row_decoder)
    with _attending(engine, reference.attention), choosing_few(model, CHECKED_WINDOW):
        self_check(engine, reference)
        if engine.few_keys and row_decoder is None:
            _check_many_rows(engine, reference)
    return engine


@contextmanager
def _attending(engine: DecoderEngine[Any], attention: AttentionFacts) -> Iterator[None]:
    """Give an engine the small windows with which the plain reference was computed."""
    own, engine.attention = engine.attention, attention
    try:
        yield
    finally:
        engine.attention = own


def panel_dtype(model: PreTrainedModel, settings: EngineSettings) -> torch.dtype | None:
    """The dtype of a model's weights in panels for compiled products; None: they are not laid out in panels."""
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters()}
    if settings.reproducible or kinds != {("cpu", torch.float32)} or not has_wide_vectors():
        return None
    eight_bits = settings.dtype == FAST_DTYPE or settings.quantization != NOT_QUANTIZED
    return torch.int8 if eight_bits else torch.float32


def in_panels(model: PreTrainedModel, dtype: torch.dtype, facts: DecoderFacts) -> RowDecoder | None:
    """Lay a fused model's weights out in panels, and compile its steps if its shape is known."""
    pool = ThreadPool(torch.get_num_threads())
    pack_linears(model, lambda linear: PanelLinear(linear, pool, dtype), facts.read_outside)
    one_kind = len(facts.attention.kinds) == 1 and facts.attention.compilable
    return RowDecoder(model, pool, facts.max_length) if one_kind and can_decode(model) else None


def _check_many_rows(engine: TransformerEngine, reference: PlainReference) -> None:
    """Repeat the self-check with the attention of steps of many rows."""
    few_keys, engine.few_keys = engine.few_keys, 0
    self_check(engine, reference)
    engine.few_keys = few_keys


def _build_static(decoder: ServedDecoder, reference: PlainReference) -> Engine:
    """A static engine whose steps have been checked as they are, while they are captured, and replayed."""
    engine = StaticEngine(decoder, runner_for(decoder.kv_shape.device, graphs=decoder.settings.cuda_graphs))
    with _attending(engine, reference.attention):
        with _compiling(reference.model):
            self_check(engine, reference)
        if capture_common(engine, decoder.settings, reference.model):
            _check_captured(engine, reference)
    return engine


def capture_common(engine: StaticEngine, settings: EngineSettings, name: str, *, with_race: bool = True) -> bool:
    """Capture common shapes, where steps are captured at all; returns whether they are.

    `with_race`: as for `common_shapes`.

    Raises:
        Unsupported: a step can't be captured.
    """
    info, kinds = engine.info, len(engine.attention.kinds)
    if engine.has_graphs:
        lengths = (settings.max_num_seqs, info.longest_session, info.fingerprint.vocab_size)
        with _capturing(name):
            engine.warm_up(common_shapes(*lengths, kinds, with_race=with_race))
    return engine.has_graphs


def _check_captured(engine: StaticEngine, reference: PlainReference) -> None:
    """Repeat the self-check while steps are captured and replayed; all three with states."""
    watching = FeatureNeed((EMBEDDING, FINAL)) if engine.info.features is not None else NO_FEATURES
    with _capturing(reference.model):
        for need in (NO_FEATURES, NO_FEATURES, watching, watching, watching):
            self_check(engine, reference, need)


@contextmanager
def _compiling(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("triton"):
            raise
        raise Unsupported(f"{name}: our kernels don't compile for it ({error}); set kernels = torch") from error


@contextmanager
def _capturing(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Unsupported(
            f"{name}: its forward pass can't be captured as a CUDA graph ({error}); set cuda_graphs = false"
        ) from error


@dataclass(frozen=True)
class DecoderFacts:
    """Facts of a decoder that can be served exactly, taken before anything of ours replaces a part of it."""

    fingerprint: Fingerprint
    max_length: int
    attention: AttentionFacts
    static: bool
    features: FeatureOffer | None
    read_outside: frozenset[str]
    """Linear layers whose weights other code of the model reads, so that they must not be replaced."""

    def info(self, max_kv_rows: int) -> EngineInfo:
        """The info of an engine with room for `max_kv_rows` KV rows."""
        return EngineInfo(self.fingerprint, self.max_length, max_kv_rows, self.features, self.attention.session_rows)


def examine(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    settings: EngineSettings,
    name: str,
    *,
    reduced_head: bool = False,
    ranks: int = 1,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    static: bool | None = False,
) -> DecoderFacts:
    """Check a whole decoder and have it call our attention; arguments as for `build_engine`.

    `ranks`: how many will share the model, on devices like `device` in `dtype`; threads are those of one rank.
    """
    config = model.config.get_text_config()
    model.train(False)
    refuse_config(model.config)
    refuse_quantization(settings, device or model.device, {weight.dtype for weight in model.parameters()}, ranks)
    max_length = _max_length(config, settings)
    refuse_rope(config, max_length)
    refuse_row_counting(config, max_length, settings.max_step_rows + settings.prefill_chunk)
    vocab_size = tokenizer.vocab_size if reduced_head else _vocab_size(model, tokenizer)
    with outside_reads(model) as read_outside:
        attention = probe_attention(model, max_length)
    if settings.reproducible and not attention.compilable:
        raise Unsupported(f"{type(model).__name__} in reproducible mode: {attention.uncompilable}")
    if static is None:
        is_uniform = attention.shape.uniform_layer is not None
        static = (
            (device or model.device).type == "cuda"
            and not settings.reproducible
            and is_uniform
            and not attention.mixers
        )
    refuse_states(model, attention, reproducible=settings.reproducible, static=static)
    set_threads(settings.threads)
    choose_kernels(device or model.device, shapes_grow=not (static or settings.reproducible))
    row_shapes = describe_shapes(settings.reproducible_rows) if settings.reproducible else RAGGED
    row_shapes = STATIC if static else row_shapes
    panels = None if static or ranks > 1 else panel_dtype(model, settings)
    numeric = numeric_fingerprint(
        model, max_length, row_shapes, ranks=ranks, device=device, dtype=dtype, panels=panels
    )
    fingerprint = Fingerprint(quantized_name(name, settings), tokenizer.fingerprint, vocab_size, numeric)
    return DecoderFacts(fingerprint, max_length, attention, static, feature_offer(model), frozenset(read_outside))


def whole_kv_rows(memory: MemoryPlan, settings: EngineSettings, *, static: bool) -> int:
    """Rows of the KV budget, whole pages if static.

    In reproducible mode whole buckets, with room for the two sessions of the self-check.
    """
    rows = memory.kv // memory.row_bytes
    wholes = ((PAGE_ROWS, static, ", two pages"), (BUCKET_ROWS, settings.reproducible, " if reproducible"))
    for whole, applies, reason in wholes:
        if applies:
            rows = rows // whole * whole
            require(rows >= 2 * whole, "KV rows of kv_bytes", rows, f"at least {2 * whole}{reason}")
    return rows


def _max_length(config: Any, settings: EngineSettings) -> int:
    context: int | None = getattr(config, "max_position_embeddings", None)
    if context is None and not settings.max_model_len:
        raise InvalidInput.of("max_model_len", 0, "given: the model does not state its context length")
    if context is not None and settings.max_model_len > context:
        raise InvalidInput.of("max_model_len", settings.max_model_len, f"at most {context}, the model's context")
    return settings.max_model_len or context or 0


def _vocab_size(model: PreTrainedModel, tokenizer: Tokenizer) -> int:
    """The tokenizer's ids, which the logits must cover; what is wider is padding."""
    width = model.get_output_embeddings().weight.shape[0]
    if tokenizer.vocab_size > width:
        raise Unsupported(f"a tokenizer of {tokenizer.vocab_size} ids over logits of width {width}")
    return tokenizer.vocab_size
