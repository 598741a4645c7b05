"""Medusa's heads in the two layouts that people have, read in November 2026.

FasterDecoding's own (`medusa_lm_head.pt` or `.safetensors`): head i has residual layers
`{i}.{j}.linear.{weight,bias}` and its output `{i}.{n}.weight` behind the last of them; where no head has an output,
all use the target's.

vLLM's: `blocks.{i}.layers.{j}.weight`, with or without `.bias`, and `lm_heads.{i}.weight`, or one output for all
heads with `original_lm_head`. `token_map` [k] lists the ids that outputs have logits for, if `truncated_vocab_size`
says that they are fewer than the target's; outputs may be stored whole all the same.

The number of heads is that of the tensors: uploaded configurations state 2 heads where the files hold 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.drafters.formats.draft_files import read_config_if_any, read_tensors
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.lookahead import LookaheadEngine, MedusaHeads
from paceline.engine.cpu.linear import frozen_linear
from paceline.engine.interface import EngineInfo
from paceline.engine.weights import select_device, select_dtype, set_threads
from paceline.models.whole import refuse_incomplete
from paceline.protocol.errors import Unsupported, require
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.proposal import MAX_PROPOSAL_NODES
from paceline.runtime.config import EngineSettings

KIND = "medusa"
_PREFIX = re.compile(r"^medusa_heads?\.")
"""Some files name the module that the heads were part of."""
_OWN_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_OWN_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_VLLM_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
_MAP = "token_map"
_LONGEST = 1 << 20
"""Tokens of a session, where the target states no context: heads themselves have no limit."""
_TREE_ROWS = 4 * MAX_PROPOSAL_NODES
"""Rows beyond a session's tokens: more than its tree takes. Rows of such heads take no memory."""
_LOSSY = (
    *("posterior_threshold", "posterior_alpha"),
    *("typical_acceptance_sampler_posterior_threshold", "typical_acceptance_sampler_posterior_alpha"),
    *("typical_acceptance", "use_typical_acceptance"),
)
"""Settings of typical acceptance, as Medusa's own code and vLLM's call them."""
_METHODS = ("acceptance_method", "spec_decoding_acceptance_method", "sampling")
_TYPICAL = "typical"
"""A part of such a method's name."""


def is_medusa(names: Iterable[str]) -> bool:
    """Whether a folder's tensors are Medusa's, in either layout."""
    plain = [_PREFIX.sub("", name) for name in names]
    return any(layer.fullmatch(name) for layer in (_OWN_LAYER, _VLLM_LAYER) for name in plain)


def load_medusa(folder: Path, target: TargetWeights, settings: EngineSettings) -> LookaheadEngine:
    """Read such a folder onto its target.

    Raises:
        InvalidInput: tensors that are missing, or of another hidden size or vocabulary than the target's.
        DamagedFile: naming the file.
        Unsupported: typical acceptance, or tensors that the heads don't have.
    """
    config = read_config_if_any(folder)
    _refuse_typical_acceptance(config, folder.name)
    tensors = {_PREFIX.sub("", name): tensor for name, tensor in read_tensors(folder).items()}
    return _serve(_HeadFiles(folder.name, config, tensors, target).heads(), folder.name, target, settings)


def _refuse_typical_acceptance(config: Mapping[str, Any], name: str) -> None:
    """Refuse a draft whose configuration asks for typical acceptance, which changes the distribution."""
    lossy_settings = [key for key in _LOSSY if config.get(key)]
    lossy_settings += [key for key in _METHODS if _TYPICAL in str(config.get(key, ""))]
    if lossy_settings:
        key = lossy_settings[0]
        raise Unsupported(
            f"draft {name}: {key} = {config[key]}: typical acceptance changes the target's distribution; "
            "take the setting out of its config.json, and the heads are served with exact acceptance"
        )


@dataclass(frozen=True, eq=False)
class _HeadFiles:
    """Tensors of either layout, before they are checked."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    target: TargetWeights

    def heads(self) -> MedusaHeads:
        """The heads, after a check of every tensor."""
        heads, layers = self._counts(_VLLM_LAYER if self._is_vllm else _OWN_LAYER)
        hidden, ids = self.target.config.hidden_size, self._ids()
        pattern = "blocks.{}.layers.{}.{}" if self._is_vllm else "{}.{}.linear.{}"
        bias = not self._is_vllm or pattern.format(0, 0, "bias") in self.tensors
        parts = {"weight": (hidden, hidden)} | ({"bias": (hidden,)} if bias else {})
        names: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for head, layer, part in product(range(heads), range(layers), parts):
            name = names[f"blocks.{head}.{layer}.linear.{part}"] = pattern.format(head, layer, part)
            shapes[name] = parts[part]
        outputs = self._outputs(heads, layers)
        shapes |= {name: (self._rows(name, ids), hidden) for name in outputs}
        if self._is_vllm and _MAP in self.tensors:
            shapes[_MAP] = tuple(self.tensors[_MAP].shape)
        self._require_exactly(shapes)
        last = [_output_layer(self.tensors[name], ids) for name in outputs] or [
            _output_layer(self.target.head(), ids)
        ]
        scale = float(self.config.get("logit_scale", 1.0)) if self._is_vllm else 1.0
        each = last if len(last) == heads else last * heads
        width = self.target.config.vocab_size
        network = MedusaHeads(hidden, layers, each, bias=bias, ids=ids, vocab_size=width, logit_scale=scale)
        network.load_state_dict({own: self.tensors[name] for own, name in names.items()}, strict=False, assign=True)
        return network

    @property
    def _is_vllm(self) -> bool:
        return any(map(_VLLM_LAYER.fullmatch, self.tensors))

    def _counts(self, pattern: re.Pattern[str]) -> tuple[int, int]:
        """Heads, and residual layers of each; the hidden size is checked first, since all shapes follow from it."""
        matches = {name: match for name in self.tensors if (match := pattern.fullmatch(name))}
        width, hidden = int(self.tensors[next(iter(matches))].shape[-1]), self.target.config.hidden_size
        require(width == hidden, f"draft {self.name} hidden size", width, f"{hidden}, {self.target.name}'s")
        heads, layers = ({int(match[part]) for match in matches.values()} for part in (1, 2))
        return max(heads) + 1, max(layers) + 1

    def _outputs(self, heads: int, layers: int) -> list[str]:
        """Names of the outputs: one for each head, one for all, or none, where all use the target's."""
        if not self._is_vllm:
            has_own = any(map(_OWN_OUTPUT.fullmatch, self.tensors))
            return [f"{head}.{layers}.weight" for head in range(heads)] if has_own else []
        if not self.config.get("original_lm_head"):
            return [f"lm_heads.{head}.weight" for head in range(heads)]
        shared: tuple[str, ...] = ("lm_heads.0.weight", "lm_head.weight")
        return [name for name in shared if name in self.tensors][:1]

    def _rows(self, output: str, ids: torch.Tensor | None) -> int:
        """Rows of an output; of a missing one, those that it must have: all missing tensors are refused together."""
        width: int = self.target.config.vocab_size
        rows = int(self.tensors[output].shape[0]) if output in self.tensors else width
        fits = rows == width or (ids is not None and rows == len(ids))
        require(fits, f"draft {self.name} vocabulary", rows, f"{width}, {self.target.name}'s")
        return rows

    def _ids(self) -> torch.Tensor | None:
        """The ids that outputs have logits for; None: all."""
        width: int = self.target.config.vocab_size
        size = int(self.config.get("truncated_vocab_size") or width) if self._is_vllm else width
        if size == width:
            return None
        require(_MAP in self.tensors, f"draft {self.name} tensors", sorted(self.tensors)[:3], f"{_MAP} among them")
        ids = self.tensors[_MAP].long()
        require(
            ids.shape == (size,), f"draft {self.name} {_MAP}", tuple(ids.shape), f"[{size}], truncated_vocab_size"
        )
        inside = bool(((ids >= 0) & (ids < width)).all())
        require(inside, f"draft {self.name} {_MAP}", int(ids.max()), f"ids in [0, {width}), {self.target.name}'s")
        return ids

    def _require_exactly(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Require every tensor of these shapes, and no other."""
        file_shapes = {each: tuple(tensor.shape) for each, tensor in self.tensors.items()}
        pairs = {each: (file_shapes.get(each, shape), shape) for each, shape in shapes.items()}
        misshapen = {each: pair for each, pair in pairs.items() if pair[0] != pair[1]}
        refuse_incomplete("draft", self.name, shapes.keys() - file_shapes.keys(), misshapen)
        unknown = sorted(file_shapes.keys() - shapes.keys())
        if unknown:
            more = f"which such heads don't have ({len(unknown)} in all)"
            raise Unsupported(f"draft {self.name}: tensor {unknown[0]}, {more}")


def _output_layer(weight: torch.Tensor, ids: torch.Tensor | None) -> nn.Linear:
    """An output of these weights, which shares their memory unless it is cut to the rows of some ids."""
    rows = weight if ids is None or len(weight) == len(ids) else weight[ids]
    return frozen_linear(rows, None)


def _serve(heads: MedusaHeads, name: str, target: TargetWeights, settings: EngineSettings) -> LookaheadEngine:
    """The engine of loaded heads, in the dtype and on the device of the settings."""
    set_threads(settings.threads)
    device = select_device(settings.device)
    dtype = select_dtype(settings.dtype, device)
    heads.to(device, dtype if isinstance(dtype, torch.dtype) else None).requires_grad_(False).train(False)
    length = settings.max_model_len or getattr(target.config, "max_position_embeddings", None) or _LONGEST
    tokenizer = target.tokenizer
    numeric = f"{KIND} {name} {heads.empty_feature.dtype} {device.type}"
    fingerprint = Fingerprint(name, tokenizer.fingerprint, tokenizer.vocab_size, numeric)
    rows = settings.max_num_seqs * (length + _TREE_ROWS)
    return LookaheadEngine(heads, EngineInfo(fingerprint, length, rows), settings)
