"""Facts of a decoder's attention layers, learnt by running one row; layers that can't be served exactly are refused.

transformers says by a mask which keys a row sees. Here its masks are functions of two positions, asked once for every
position, so a window is what the model's own code makes of it, whatever its configuration calls it.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from paceline.engine.attention import SINKS, SOFTCAP, AttentionFacts, Horizon, LayerKind
from paceline.engine.forward import PLACE, AttentionCall, SelfAttention, attend, packed_forward
from paceline.engine.index import INDICES, index_width, open_indexers
from paceline.engine.kv import KVShape, LayerShape
from paceline.engine.mixers import Mixer, noting_mixers
from paceline.engine.own_attention import ALIBI, OWN_ATTENTION, attention_of, open_own_attention
from paceline.protocol.errors import Unsupported

PROBE_NAME = "paceline_probe"
"""Name of a probe's attention function and masks."""
_TERMS = (SOFTCAP, SINKS, ALIBI, INDICES)
_HARMLESS = re.compile(r"sliding_window|position_ids|is_causal|use_cache|output_\w+")
"""Extras that repeat what masks and positions say, or ask for more outputs."""
_COMPARED_ROWS = 32
"""Rows of a mask that are compared key by key, chosen, not tuned; others are where they begin and end."""
_ALL_COMPARED = 1 << 15
"""Longest context all positions of which are compared, chosen: 20 ms."""

ROWWISE = ("mlp", "moe", "dummy")
"""Types of layers that treat every row alone."""

Rule = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, position of the row, position of the key) → whether the row sees the key."""


class _MaskTensor(torch.Tensor):
    """A mask that knows its rule; what is computed from it is a plain tensor."""

    rule: Rule
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter has it


def _mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Rule, device: torch.device, **_: Any
) -> torch.Tensor:
    """As transformers calls it."""
    mask = torch.zeros((batch_size, 1, q_length, kv_length), device=device).as_subclass(_MaskTensor)
    mask.rule = mask_function
    return mask


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it."""
    return attend(AttentionCall(module, query, key, value, scaling, {**extras, "mask": attention_mask})), None


AttentionInterface.register(PROBE_NAME, _attention)
AttentionMaskInterface.register(PROBE_NAME, _mask)


@dataclass
class _AttentionProbe:
    """Attends a row to itself alone, noting what each layer passes to attention."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    rules: dict[int, Rule] = field(default_factory=dict)
    terms: set[str] = field(default_factory=set)
    modules: dict[int, torch.nn.Module] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        name = type(call.module).__name__
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int):
            raise Unsupported(f"{name}: attention without a layer_idx")
        if layer in self.shapes:
            raise Unsupported(f"{name}: attends twice in layer {layer}")
        self.modules[layer] = call.module
        self.terms |= _terms(name, call)
        self.rules[layer] = _rule(name, call)
        shape = self.shapes[layer] = _shape(name, call)
        return call.value.repeat_interleave(shape.groups, dim=1).transpose(1, 2)


def _terms(name: str, call: AttentionCall) -> set[str]:
    """The extras that change the layer's scores; unknown ones are refused."""
    extras = {key: value for key, value in call.extras.items() if key != "mask" and value is not None}
    for key in extras:
        if key not in _TERMS and not _HARMLESS.fullmatch(key):
            raise Unsupported(f"{name}: attention with {key}")
    if extras.get("is_causal") is False or not getattr(call.module, "is_causal", True):
        raise Unsupported(f"{name}: attention that is not causal")
    sinks = extras.get(SINKS)
    if sinks is not None and sinks.numel() != call.query.shape[1]:
        raise Unsupported(f"{name}: {sinks.numel()} attention sinks for {call.query.shape[1]} heads")
    return {key for key in _TERMS if key in extras}


def _rule(name: str, call: AttentionCall) -> Rule:
    if name in OWN_ATTENTION:
        return _causal
    mask = call.extras["mask"]
    if not isinstance(mask, _MaskTensor):
        raise Unsupported(f"{name}: attention with a mask of its own, or none")
    return mask.rule


def _causal(batch: Any, head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The rule of attention that is code of its own."""
    return key <= row


def _shape(name: str, call: AttentionCall) -> LayerShape:
    heads, kv_heads, key_width = call.query.shape[1], call.key.shape[1], call.key.shape[3]
    if call.value.shape[1] != kv_heads or call.query.shape[3] != key_width or heads % kv_heads:
        raise Unsupported(f"{name}: queries, keys and values that don't fit each other")
    return LayerShape(kv_heads, key_width, call.value.shape[3], heads // kv_heads, index_width(call.module))


@torch.inference_mode()
def probe_attention(model: PreTrainedModel, max_length: int) -> AttentionFacts:
    """Run one row to learn what each layer asks of attention; the model then calls ours.

    Raises:
        Unsupported: naming the module and what it asks of attention.
    """
    probe, config = _AttentionProbe(), model.config.get_text_config()
    _number_attention(model)
    open_own_attention(model)
    open_indexers(model)
    with attention_of(model, PROBE_NAME) as is_set:
        if not is_set:
            raise Unsupported(f"{type(model).__name__}: does not use transformers' attention interface")
        packed_forward(model, probe, [0], [0], [0])
    mixers = _mixers(model, probe)
    for place, layer in enumerate(sorted(probe.modules)):
        setattr(probe.modules[layer], PLACE, place)
        if index_width(probe.modules[layer]):
            setattr(probe.modules[layer].indexer, PLACE, place)
    layers: int = config.num_hidden_layers
    known_layers = {*probe.shapes, *(mixer.layer for mixer in mixers), *_rowwise_layers(config)}
    if known_layers != set(range(layers)):
        raise Unsupported(
            f"{type(model).__name__}: {len(known_layers)} of {layers} layers are attention or keep a state"
        )
    return _facts(model, probe, mixers, max_length)


def _number_attention(model: PreTrainedModel) -> None:
    """Number attention modules by their layer where they have no number, since several layers share the weights."""
    decoder: Any = model.get_decoder()
    for layer, decoder_layer in enumerate(getattr(decoder, "layers", ())):
        for module in decoder_layer.modules():
            if getattr(module, "layer_idx", 0) in (None, -1):
                module.layer_idx = layer


def _rowwise_layers(config: Any) -> list[int]:
    return [layer for layer, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind in ROWWISE]


def _mixers(model: PreTrainedModel, probe: _AttentionProbe) -> tuple[Mixer, ...]:
    """The recurrent layers, noted in a second pass: those of the first were computed without a cache."""
    attending = {id(part) for module in probe.modules.values() for part in (module, getattr(module, "indexer", None))}
    with noting_mixers(model, lambda module: id(module) in attending) as mixers:
        packed_forward(model, SelfAttention(), [0], [0], [0])
    return tuple(mixers)


def _facts(
    model: PreTrainedModel, probe: _AttentionProbe, mixers: tuple[Mixer, ...], max_length: int
) -> AttentionFacts:
    """Layers that are alike in how far back they see, and in how many heads share keys, are of one kind."""
    name, device = type(model).__name__, model.device
    shapes = tuple(probe.shapes[layer] for layer in sorted(probe.shapes))
    by_rule: dict[int, Horizon | None] = {}
    kinds: dict[tuple[Horizon | None, int], LayerKind] = {}
    kind_of_layer = []
    for layer, shape in zip(sorted(probe.shapes), shapes, strict=True):
        rule = probe.rules[layer]
        if id(rule) not in by_rule:
            by_rule[id(rule)] = _horizon(name, rule, max_length, device)
        horizon = by_rule[id(rule)]
        key = (horizon, shape.groups)
        kinds.setdefault(key, LayerKind(horizon, shape.groups))
        kind_of_layer.append(list(kinds).index(key))
    kv_shape = KVShape(shapes, model.dtype, device)
    return AttentionFacts(kv_shape, tuple(kinds.values()), tuple(kind_of_layer), frozenset(probe.terms), mixers)


def _horizon(name: str, rule: Rule, max_length: int, device: torch.device) -> Horizon | None:
    """The horizon of a rule for masks; None: rows see everything before them.

    Bisection finds the first row that doesn't see position 0, which tells the size. Then all positions are compared
    with that horizon; of a long context some thousands, so that the start takes no longer.

    Raises:
        Unsupported: rows see something else.
    """

    def sees(row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        row, key = torch.broadcast_tensors(row, key)
        return rule(torch.zeros_like(row), torch.zeros_like(row), row, key).bool()

    def tensor(*positions: int) -> torch.Tensor:
        return torch.tensor(positions, device=device)

    blind = bisect.bisect_left(range(max_length), True, key=lambda row: not bool(sees(tensor(row), tensor(0))))
    horizon = Horizon(blind, is_chunked=not bool(sees(tensor(blind), tensor(1)))) if 0 < blind < max_length else None
    rows = _compared_positions(max_length, blind)
    firsts = torch.zeros_like(rows) if horizon is None else torch.from_numpy(horizon[rows.numpy()])
    rows, firsts = rows.to(device), firsts.to(device)
    at_edges = (
        sees(rows, rows) & sees(rows, firsts) & ~sees(rows, rows + 1) & ~(sees(rows, firsts - 1) & (firsts > 0))
    )
    some = torch.arange(0, len(rows), max(1, len(rows) // _COMPARED_ROWS))
    visible = (rows >= firsts[some][:, None]) & (rows <= rows[some][:, None])
    if not (bool(at_edges.all()) and torch.equal(sees(rows[some][:, None], rows[None]), visible)):
        raise Unsupported(f"{name}: rows that see something other than the positions from one on up to their own")
    return horizon


def _compared_positions(max_length: int, size: int) -> torch.Tensor:
    """Positions where a horizon of a size is compared with the model's own masks, ascending."""
    if max_length <= _ALL_COMPARED:
        return torch.arange(max_length)
    few = _ALL_COMPARED // 8
    offsets = torch.arange(-few // 16, few // 16)
    wholes = torch.arange(1, 8)[:, None] * max(size, 1) + offsets
    samples = torch.linspace(0, max_length - 1, few, dtype=torch.float64).long()
    positions = torch.cat((torch.arange(few), wholes.flatten(), samples, torch.arange(max_length - few, max_length)))
    distinct: torch.Tensor = torch.unique(positions[(positions >= 0) & (positions < max_length)])
    return distinct
