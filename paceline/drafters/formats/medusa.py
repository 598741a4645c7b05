"""Medusa's heads in the two layouts that people have, read in November 2026.

FasterDecoding's own (`medusa_lm_head.pt` or `.safetensors`): head i has residual layers
`{i}.{j}.linear.{weight,bias}` and its output `{i}.{n}.weight` behind the last of them; where no head has an output,
all use the target's.

vLLM's: `blocks.{i}.layers.{j}.weight`, with or without `.bias`, and `lm_heads.{i}.weight`, or one output for all
heads with `original_lm_head`. `token_map` [k] lists the ids that outputs have logits for, if `truncated_vocab_size`
says that they are fewer than the target's; outputs may be stored whole all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.formats.draft_files import read_config_if_any, read_tensors
from paceline.drafters.formats.head_files import (
    Shapes,
    counted,
    each_of,
    fill,
    frozen,
    refuse_typical_acceptance,
    require_exactly,
    require_hidden_size,
    require_vocabulary,
    serve,
)
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.lookahead import LookaheadEngine
from paceline.drafters.heads.medusa import MedusaHeads
from paceline.protocol.errors import require
from paceline.runtime.config import EngineSettings

KIND = "medusa"
_PREFIX = re.compile(r"^medusa_heads?\.")
"""Some files name the module that the heads were part of."""
_OWN_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_OWN_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_VLLM_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
_MAP = "token_map"


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
    refuse_typical_acceptance(config, folder.name)
    tensors = {_PREFIX.sub("", name): tensor for name, tensor in read_tensors(folder).items()}
    vllm = any(_VLLM_LAYER.fullmatch(name) for name in tensors)
    read = _VllmHeads if vllm else _OwnHeads
    return serve(read(folder.name, config, tensors, target).heads(), folder.name, KIND, target, settings)


@dataclass(frozen=True, eq=False)
class _HeadFiles:
    """A layout's tensors, which have been read and not been checked."""

    name: str
    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]
    target: TargetWeights

    def _numbers(self, pattern: re.Pattern[str]) -> list[tuple[int, int]]:
        found = map(pattern.fullmatch, self.tensors)
        return [(int(match[1]), int(match[2])) for match in found if match]

    def _counts(self, pattern: re.Pattern[str]) -> tuple[int, int]:
        """Heads, and residual layers of each; the hidden size is checked first, since all shapes follow from it."""
        numbers = self._numbers(pattern)
        first = next(tensor for name, tensor in self.tensors.items() if pattern.fullmatch(name))
        require_hidden_size(self.name, int(first.shape[-1]), self.target)
        heads = counted(self.name, "heads", (head for head, _ in numbers))
        return heads, counted(self.name, "layers", (layer for _, layer in numbers))


class _OwnHeads(_HeadFiles):
    """FasterDecoding's layout."""

    def heads(self) -> MedusaHeads:
        heads, layers = self._counts(_OWN_LAYER)
        hidden = self.target.config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for head, layer in each_of(heads, layers):
            shapes |= {f"{head}.{layer}.linear.weight": (hidden, hidden), f"{head}.{layer}.linear.bias": (hidden,)}
        own = [f"{head}.{layers}.weight" for head in range(heads)]
        outputs = own if self._numbers(_OWN_OUTPUT) else []
        for name in outputs:
            require_vocabulary(self.name, _rows(self.tensors, name, self.target), self.target)
        require_exactly(self.name, self.tensors, {**shapes, **_output_shapes(outputs, self.target)})
        last = [frozen(self.tensors[name]) for name in outputs] or [frozen(self.target.head())] * heads
        made = MedusaHeads(hidden, layers, last)
        fill(made, {f"blocks.{name}": self.tensors[name] for name in shapes})
        return made


class _VllmHeads(_HeadFiles):
    """vLLM's layout."""

    def heads(self) -> MedusaHeads:
        heads, layers = self._counts(_VLLM_LAYER)
        hidden, bias = self.target.config.hidden_size, "blocks.0.layers.0.bias" in self.tensors
        parts = {"weight": (hidden, hidden)} | ({"bias": (hidden,)} if bias else {})
        renamed: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for head, layer in each_of(heads, layers):
            for part, shape in parts.items():
                name = f"blocks.{head}.layers.{layer}.{part}"
                renamed[f"blocks.{head}.{layer}.linear.{part}"] = name
                shapes[name] = shape
        ids = self._ids()
        outputs = self._outputs(heads)
        width = self.target.config.vocab_size
        for name in outputs:
            rows = _rows(self.tensors, name, self.target)
            if ids is None or rows != len(ids):
                require_vocabulary(self.name, rows, self.target)
            shapes[name] = (rows, hidden)
        maps: Shapes = {_MAP: tuple(self.tensors[_MAP].shape)} if _MAP in self.tensors else {}
        require_exactly(self.name, self.tensors, {**shapes, **maps})
        last = [frozen(self._picked(self.tensors[name], ids)) for name in outputs]
        shared = last or [frozen(self._picked(self.target.head(), ids))]
        each = shared if len(shared) == heads else shared * heads
        scale = float(self.config.get("logit_scale", 1.0))
        made = MedusaHeads(hidden, layers, each, bias=bias, ids=ids, vocab_size=width, logit_scale=scale)
        fill(made, {own: self.tensors[name] for own, name in renamed.items()})
        return made

    def _outputs(self, heads: int) -> list[str]:
        """Names of the outputs: one for each head, one for all, or none, where all use the target's."""
        if not self.config.get("original_lm_head"):
            return [f"lm_heads.{head}.weight" for head in range(heads)]
        shared: tuple[str, ...] = ("lm_heads.0.weight", "lm_head.weight")
        return [name for name in shared if name in self.tensors][:1]

    def _ids(self) -> torch.Tensor | None:
        """The ids that outputs have logits for; None: all."""
        width: int = self.target.config.vocab_size
        kept = int(self.config.get("truncated_vocab_size") or width)
        if kept == width:
            return None
        require(_MAP in self.tensors, f"draft {self.name} tensors", sorted(self.tensors)[:3], f"{_MAP} among them")
        ids = self.tensors[_MAP].long()
        require(
            ids.shape == (kept,), f"draft {self.name} {_MAP}", tuple(ids.shape), f"[{kept}], truncated_vocab_size"
        )
        inside = bool(((ids >= 0) & (ids < width)).all())
        require(inside, f"draft {self.name} {_MAP}", int(ids.max()), f"ids in [0, {width}), {self.target.name}'s")
        return ids

    def _picked(self, output: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """The rows of an output that is stored whole, or all of one that isn't."""
        return output if ids is None or len(output) == len(ids) else output[ids]


def _output_shapes(outputs: Iterable[str], target: TargetWeights) -> Shapes:
    return dict.fromkeys(outputs, (target.config.vocab_size, target.config.hidden_size))


def _rows(tensors: Mapping[str, torch.Tensor], name: str, target: TargetWeights) -> int:
    """Rows of an output; those that it must have, if it is missing: that is told with all that is."""
    width: int = target.config.vocab_size
    return int(tensors[name].shape[0]) if name in tensors else width
