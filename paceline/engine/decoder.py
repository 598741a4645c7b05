"""From a transformers decoder to an engine that is known to be exact.

What the packed path can't serve exactly is refused by name, from what the
configuration says and from what each layer passes to attention. What is left
must prove itself: a ragged schedule of chunks, a tree, a rollback and a
compaction must give the logits of the model's own plain forward pass.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from paceline.config import FAST_DTYPE, EngineSettings
from paceline.engine.crew import Crew
from paceline.engine.device.buckets import PAGE_ROWS
from paceline.engine.device.graphs import GraphRunner, runner_for
from paceline.engine.device.static_engine import StaticEngine
from paceline.engine.fused import fuse_layers
from paceline.engine.interface import Engine, EngineInfo, Logits, StepItem, StepPlan
from paceline.engine.isolation import isolation_check
from paceline.engine.kv import KVShape
from paceline.engine.linear import can_pack, cpu_has_bfloat16, pack_linears
from paceline.engine.memory import MemoryPlan, available_ram, plan_memory, refuse_weights_beyond
from paceline.engine.reproducible import ReproducibleEngine
from paceline.engine.row_decoder import RowDecoder, can_decode
from paceline.engine.row_products import PanelLinear, has_wide_vectors
from paceline.engine.shapes import BUCKET_ROWS, describe_shapes
from paceline.engine.transformer import ATTENTION_NAME, TransformerEngine, packed_forward
from paceline.errors import InvalidInput, Unsupported
from paceline.models import ResolvedModel, library_versions, load_whole, quiet_loading, refusing_files
from paceline.tokenizer import Tokenizer, load_tokenizer
from paceline.types import Fingerprint, require

logger = logging.getLogger(__name__)

SELF_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.int8: 0.1}
"""Largest difference from the plain forward pass, as a share of the largest logit."""
RAGGED = "ragged"
"""In a numeric fingerprint: steps have whatever shape they have."""
STATIC = "static, fused"
"""Steps are padded to one of few shapes, and layers fused."""
LOADABLE = "a decoder that transformers loads"
_FULL_ATTENTION = ("full_attention", "sliding_attention")
_MOVING_ROPE = ("dynamic", "longrope")
_SAMPLED_WEIGHTS = 64


def load_decoder_engine(
    resolved: ResolvedModel, model: str, settings: EngineSettings, layers: tuple[int, ...] | None
) -> Engine:
    """Load a transformers decoder as an engine; `paceline.engine.loading.load_engine` says what it raises."""
    set_threads(settings.threads)
    decoder = load_decoder(resolved, settings, layers)
    tokenizer = load_tokenizer(model, trust_remote_code=settings.trust_remote_code)
    return build_engine(decoder, tokenizer, settings, resolved.name)


def set_threads(threads: int) -> int:
    """Set the calling thread's compute threads; 0 takes every core that torch sees. Returns the number."""
    if threads > 0:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


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
    `static`: whether steps have few shapes (`paceline.engine.device`); unset: on GPUs, unless reproducible.
    """
    if static is None:
        static = model.device.type == "cuda" and not settings.reproducible
    facts = examine(model, tokenizer, settings, name, reduced_head=reduced_head, static=static)
    memory = plan_memory(model, settings, facts.kv_shape, facts.max_length, packs=can_pack(model), static=static)
    logger.info("%s", memory)
    info = facts.info(_kv_rows(memory, settings, static=static))
    reference = plain_reference(model, info)
    if can_pack(model) or static:
        fuse_layers(model)
    panels = None if static else panel_dtype(model, settings)
    if panels is not None:
        decoding = in_panels(model, panels, facts.max_length)
        engine = TransformerEngine(model, info, facts.kv_shape, settings, facts.threads, decoding)
        reference = replace(reference, dtype=panels)
        self_check(engine, reference)
        if engine.row_decoder is None:
            _check_many_rows(engine, reference)
        return engine
    if can_pack(model):
        pack_linears(model)
    if static:
        return _checked_static(model, info, facts, settings, reference)
    kind = ReproducibleEngine if settings.reproducible else TransformerEngine
    engine = kind(model, info, facts.kv_shape, settings, facts.threads)
    self_check(engine, reference)
    if settings.reproducible:
        isolation_check(engine, settings.reproducible_rows)
    elif engine.few_keys:
        _check_many_rows(engine, reference)
    return engine


def panel_dtype(model: PreTrainedModel, settings: EngineSettings) -> torch.dtype | None:
    """What a model's weights are kept in if they are laid out for compiled products; None: they aren't."""
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters()}
    if settings.reproducible or kinds != {("cpu", torch.float32)} or not has_wide_vectors():
        return None
    return torch.int8 if settings.dtype == FAST_DTYPE else torch.float32


def in_panels(model: PreTrainedModel, stored: torch.dtype, max_length: int) -> RowDecoder | None:
    """Lay a fused model's weights out in panels, and compile its steps if its shape is known."""
    crew = Crew(torch.get_num_threads())
    pack_linears(model, lambda linear: PanelLinear(linear, crew, stored))
    return RowDecoder(model, crew, max_length) if can_decode(model) else None


def _check_many_rows(engine: TransformerEngine, reference: PlainReference) -> None:
    """The same steps attended to as steps of many rows are."""
    few_keys, engine.few_keys = engine.few_keys, 0
    self_check(engine, reference)
    engine.few_keys = few_keys


def _checked_static(
    model: PreTrainedModel,
    info: EngineInfo,
    facts: DecoderFacts,
    settings: EngineSettings,
    reference: PlainReference,
) -> Engine:
    """A static engine whose steps are right as they are, while they are captured, and replayed."""
    runner = runner_for(facts.kv_shape.device, graphs=settings.cuda_graphs)
    engine = StaticEngine(model, info, facts.kv_shape, settings, facts.threads, runner)
    self_check(engine, reference)
    if isinstance(runner, GraphRunner):
        try:
            self_check(engine, reference)
        except RuntimeError as error:
            raise Unsupported(
                f"{reference.model}: its forward pass can't be captured as a CUDA graph ({error}); "
                "set cuda_graphs = false"
            ) from error
        self_check(engine, reference)
    return engine


@dataclass(frozen=True)
class DecoderFacts:
    """What a decoder that can be served exactly is, before anything of ours replaces a part of it."""

    fingerprint: Fingerprint
    max_length: int
    kv_shape: KVShape
    threads: int

    def info(self, max_kv_rows: int) -> EngineInfo:
        """What an engine of it is, given room for so many KV rows."""
        return EngineInfo(self.fingerprint, self.max_length, max_kv_rows)


def examine(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    settings: EngineSettings,
    name: str,
    *,
    reduced_head: bool = False,
    ranks: int = 1,
    device: torch.device | None = None,
    static: bool = False,
) -> DecoderFacts:
    """Check a whole decoder and have it call our attention; arguments as for `build_engine`.

    `ranks`: how many will share the model, on devices like `device`; threads are those of one rank.
    """
    config = model.config.get_text_config()
    model.train(False)
    refuse_config(model.config)
    max_length = _max_length(config, settings)
    refuse_rope(config, max_length)
    vocab_size = tokenizer.vocab_size if reduced_head else _vocab_size(model, tokenizer)
    model.set_attn_implementation(ATTENTION_NAME)
    shape = probe_kv_shape(model, max_length)
    threads = set_threads(settings.threads)
    row_shapes = describe_shapes(settings.reproducible_rows) if settings.reproducible else RAGGED
    row_shapes = STATIC if static else row_shapes
    panels = None if static or ranks > 1 else panel_dtype(model, settings)
    numeric = numeric_fingerprint(model, max_length, row_shapes, ranks=ranks, device=device, panels=panels)
    return DecoderFacts(Fingerprint(name, tokenizer.fingerprint, vocab_size, numeric), max_length, shape, threads)


def _kv_rows(memory: MemoryPlan, settings: EngineSettings, *, static: bool) -> int:
    """Rows of the KV budget, whole pages if static.

    In reproducible mode whole buckets, with room for the two sessions of the self-check.
    """
    rows = memory.kv // memory.row_bytes
    if static:
        rows = rows // PAGE_ROWS * PAGE_ROWS
        require(rows >= 2 * PAGE_ROWS, "KV rows of kv_bytes", rows, f"at least {2 * PAGE_ROWS}, two pages")
    if not settings.reproducible:
        return rows
    rows = rows // BUCKET_ROWS * BUCKET_ROWS
    require(rows >= 2 * BUCKET_ROWS, "KV rows of kv_bytes", rows, f"at least {2 * BUCKET_ROWS} if reproducible")
    return rows


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


def keep_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Drop every decoder layer but `layers`, and renumber those.

    Raises:
        InvalidInput: a layer that the model doesn't have.
        Unsupported: the model's layers can't be told.
    """
    config: Any = model.config.get_text_config()
    count: int = config.num_hidden_layers
    if not layers or min(layers) < 0 or max(layers) >= count:
        raise InvalidInput.of("layers", layers, f"in [0, {count - 1}]")
    stacks = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]
    if len(stacks) != 1:
        raise Unsupported(f"model type {config.model_type}: {len(stacks)} stacks of {count} layers, expected 1")
    parent, name = stacks[0]
    stack = getattr(parent, name)
    kept = torch.nn.ModuleList([stack[layer] for layer in layers])
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", index)  # noqa: B010  # nn.Module's own annotation forbids the plain form
    setattr(parent, name, kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)


@dataclass
class _Probe:
    """Attends a row to itself alone, noting what each layer passes to attention."""

    max_length: int
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        extras: dict[str, Any],
    ) -> torch.Tensor:
        self._refuse_extras(module, extras)
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise Unsupported(f"{type(module).__name__}: attention without a layer_idx")
        heads, kv_heads, head_dim = query.shape[1], key.shape[1], key.shape[3]
        if key.shape != value.shape or query.shape[3] != head_dim or heads % kv_heads:
            raise Unsupported(f"{type(module).__name__}: queries, keys and values of different widths")
        if layer in self.shapes:
            raise Unsupported(f"{type(module).__name__}: attends twice in layer {layer}")
        self.shapes[layer] = (kv_heads, head_dim, heads // kv_heads)
        return value.repeat_interleave(heads // kv_heads, dim=1).transpose(1, 2)

    def _refuse_extras(self, module: torch.nn.Module, extras: dict[str, Any]) -> None:
        name = type(module).__name__
        window = extras.get("sliding_window")
        if window is not None and window < self.max_length:
            raise Unsupported(
                f"{name}: a sliding window of {window} tokens, shorter than max_model_len = {self.max_length}"
            )
        for extra in ("softcap", "s_aux", "position_bias"):
            if extras.get(extra) is not None:
                raise Unsupported(f"{name}: attention with {extra}")
        if not getattr(module, "is_causal", True):
            raise Unsupported(f"{name}: attention that is not causal")


@torch.inference_mode()
def probe_kv_shape(model: PreTrainedModel, max_length: int) -> KVShape:
    """Run one row to learn what a KV row holds; refuses what packed attention can't serve.

    Raises:
        Unsupported: naming the module and what it asks of attention.
    """
    if not model.is_backend_compatible():
        raise Unsupported(f"{type(model).__name__}: does not use transformers' attention interface")
    probe = _Probe(max_length)
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
                rows[session].append(_copied(logits))
    finally:
        for session in sessions:
            engine.close(session)
    return [torch.cat(each) for each in rows]


def _chunk(session: int, text: tuple[int, ...], start: int, end: int) -> StepItem:
    return StepItem(session, start, text[start:end], logit_rows=tuple(range(end - start)))


def _copied(logits: Logits) -> torch.Tensor:
    return torch.from_numpy(logits.copy())


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


def numeric_fingerprint(
    model: PreTrainedModel,
    max_length: int,
    row_shapes: str = RAGGED,
    *,
    ranks: int = 1,
    device: torch.device | None = None,
    panels: torch.dtype | None = None,
) -> str:
    """What decides the bits of logits: equal fingerprints may promise equal bits, others only equal laws.

    `device`: where the model will run, if it isn't there yet; `panels`: as `panel_dtype` says.
    """
    device = device or model.device
    packed = "packed" if panels is None else f"in panels of {panels}"
    volatile = ("_name_or_path", "transformers_version", "quantization_config", "architectures")
    config = {key: value for key, value in model.config.to_dict().items() if key not in volatile}
    facts = {
        "config": config,
        "dtype": str(model.dtype),
        "device": device.type,
        "capability": _capability(device),
        "threads": torch.get_num_threads(),
        "tensor_parallel": ranks,
        "row_shapes": row_shapes,
        "layers": f"fused, {packed} and compiled" if device.type == "cpu" and can_pack(model) else "plain",
        "max_length": max_length,
        "libraries": library_versions(),
        "weights": weights_digest(model),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _capability(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


@torch.inference_mode()
def weights_digest(model: PreTrainedModel) -> str:
    """Digest of every weight's name, shape and some evenly spaced values: cheap, and enough to tell models apart."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.reshape(-1)
        picked = torch.linspace(0, flat.numel() - 1, _SAMPLED_WEIGHTS, dtype=torch.float64).long()
        values = flat[picked.to(flat.device)].double().cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + values)
    return digest.hexdigest()


def load_decoder(
    resolved: ResolvedModel, settings: EngineSettings, layers: tuple[int, ...] | None = None, *, on_host: bool = False
) -> PreTrainedModel:
    """Load a decoder's weights as transformers makes it, with every layer unless some are named.

    `on_host`: leave the weights in host memory, though the dtype is the device's.

    Raises:
        InvalidInput: nothing that transformers loads, or not whole.
        Unsupported: not a decoder that can be packed.
    """
    device = chosen_device(settings.device)
    load_decoder_config(resolved, settings)  # refuses what it can before weights are read
    common = {**resolved.arguments, "trust_remote_code": settings.trust_remote_code}
    if device.type == "cpu":
        refuse_weights_beyond(resolved.location, available_ram())
    dtype: Any = chosen_dtype(settings.dtype, device)
    with quiet_loading(), refusing_files(resolved, resolved.name, LOADABLE):
        model: Any = load_whole(
            resolved.name,
            pretrained_model_name_or_path=resolved.location,
            dtype=dtype,
            attn_implementation="eager",
            **common,
        )
    kept = layers if layers is not None else resolved.layers
    if kept is not None:
        keep_layers(model, kept)
    return model if on_host else model.to(device)  # type: ignore[no-any-return]


def load_decoder_config(resolved: ResolvedModel, settings: EngineSettings) -> PreTrainedConfig:
    """A decoder's configuration, without its weights.

    Raises:
        InvalidInput: nothing that transformers loads as a decoder.
        Unsupported: not a decoder that can be packed.
    """
    common = {**resolved.arguments, "trust_remote_code": settings.trust_remote_code}
    with refusing_files(resolved, resolved.name, LOADABLE):
        config = AutoConfig.from_pretrained(resolved.location, **common)
    assert isinstance(config, PreTrainedConfig)
    refuse_config(config)
    brings_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not brings_code:
        raise InvalidInput.of("model", resolved.name, f"{LOADABLE} (model type {config.model_type} is none)")
    return config


def chosen_device(name: str) -> torch.device:
    """`auto`: a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InvalidInput.of("device", name, f"auto or a torch device ({error})") from error


def chosen_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """`auto`: the checkpoint's own dtype on an accelerator, float32 on a CPU; `fast` trades precision there too."""
    if name == FAST_DTYPE and device.type == "cpu":
        # Weights in panels are rounded as they are laid out.
        return torch.bfloat16 if cpu_has_bfloat16() and not has_wide_vectors() else torch.float32
    if name in ("auto", FAST_DTYPE):
        return "auto" if device.type == "cuda" else torch.float32
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _max_length(config: Any, settings: EngineSettings) -> int:
    own: int | None = getattr(config, "max_position_embeddings", None)
    if own is None and not settings.max_model_len:
        raise InvalidInput.of("max_model_len", 0, "given: the model does not state its context length")
    if own is not None and settings.max_model_len > own:
        raise InvalidInput.of("max_model_len", settings.max_model_len, f"at most {own}, the model's context")
    return settings.max_model_len or own or 0


def _vocab_size(model: PreTrainedModel, tokenizer: Tokenizer) -> int:
    """The tokenizer's ids, which the logits must cover; what is wider is padding."""
    width = model.get_output_embeddings().weight.shape[0]
    if tokenizer.vocab_size > width:
        raise Unsupported(f"a tokenizer of {tokenizer.vocab_size} ids over logits of width {width}")
    return tokenizer.vocab_size
