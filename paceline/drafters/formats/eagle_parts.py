"""Parts that both layouts of EAGLE-3 share: layer ids, vocabularies, and networks filled with tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.drafters.formats.draft_files import FLOAT_DTYPES
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.eagle import Eagle3Form, Eagle3Network, InputNorm
from paceline.drafters.heads.eagle_rows import EagleDraft
from paceline.engine.weights import select_device, select_dtype
from paceline.models.whole import refuse_incomplete
from paceline.protocol.errors import InvalidInput, Unsupported, require
from paceline.protocol.features import FeatureNeed
from paceline.runtime.config import EngineSettings

Network = TypeVar("Network", bound=nn.Module)
EMBEDDING_TENSOR = "embed_tokens.weight"
HEAD_TENSOR = "lm_head.weight"
MAP_TENSORS = ("d2t", "t2d")


def default_inputs(layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 joins by default (arXiv:2503.01840's code): 2, L/2, L - 3."""
    return tuple(sorted({2, layers // 2, layers - 3}))


def need_of_inputs(inputs: Sequence[int], target: TargetWeights) -> FeatureNeed:
    """The features of layers that are listed by their inputs, by the outputs of the layers before.

    Raises:
        InvalidInput: layers that the target lacks, or one twice.
    """
    layers: int = target.config.num_hidden_layers
    fits = len(set(inputs)) == len(inputs) and all(0 <= each <= layers for each in inputs)
    require(fits, "feature layers by input", tuple(inputs), f"different ones of [0, {layers}], {target.name}'s")
    return FeatureNeed(tuple(each - 1 for each in inputs))


def check_target(draft: str, hidden: int, vocab_size: int, target: TargetWeights) -> None:
    """Refuse a draft of another target, by its features and ids.

    Raises:
        InvalidInput: naming what differs.
    """
    width, size = target.config.hidden_size, target.config.vocab_size
    require(hidden == width, f"draft {draft}: width of a feature", hidden, f"{width}, that of {target.name}")
    require(vocab_size == size, f"draft {draft}: vocab_size", vocab_size, f"{size}, that of {target.name}")


def draft_size(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], vocab_size: int) -> int:
    """The number of ids that a head has logits for: as configured, else the size of the map, else all."""
    map_size = len(tensors["d2t"]) if "d2t" in tensors else vocab_size
    return int(config.get("draft_vocab_size") or map_size)


def target_ids(
    tensors: Mapping[str, torch.Tensor], draft_size: int, vocab_size: int, draft: str
) -> NDArray[np.int32] | None:
    """Target id of each draft id, which `d2t` gives as an offset: t = d + d2t[d]. None: they are the same.

    Raises:
        InvalidInput: no map, one of another size, or maps that contradict each other.
    """
    if draft_size == vocab_size:
        return None  # maps, if there are any, change nothing
    require(
        "d2t" in tensors, f"draft {draft}", sorted(tensors)[:4], "with a tensor d2t, as its vocabulary is smaller"
    )
    offsets = tensors["d2t"].numpy().astype(np.int64)
    require(offsets.shape == (draft_size,), f"draft {draft}: d2t", offsets.shape, f"[{draft_size}], draft_vocab_size")
    ids = np.arange(draft_size) + offsets
    ascending = bool((np.diff(ids) > 0).all()) and ids[0] >= 0 and ids[-1] < vocab_size
    require(ascending, f"draft {draft}: d + d2t[d]", ids[:8].tolist(), f"ascending ids in [0, {vocab_size})")
    if "t2d" in tensors:
        mapped_ids = np.flatnonzero(tensors["t2d"].numpy())
        require(np.array_equal(mapped_ids, ids), f"draft {draft}: t2d", len(mapped_ids), "true at d + d2t[d] alone")
    return ids.astype(np.int32)


def fill(
    network: Network,
    tensors: Mapping[str, torch.Tensor],
    ids: NDArray[np.int32] | None,
    target: TargetWeights,
    settings: EngineSettings,
) -> Network:
    """Fill a network on the `meta` device with its tensors; the embedding and head that it lacks are the target's.

    Raises:
        InvalidInput: tensors are missing or of another shape.
        Unsupported: there are tensors that the network lacks, or quantised ones.
    """
    kind = type(network).__name__.removesuffix("Network").upper()
    state = {name: tensor for name, tensor in tensors.items() if name not in MAP_TENSORS}
    if EMBEDDING_TENSOR not in state:
        state[EMBEDDING_TENSOR] = target.embedding()
    if HEAD_TENSOR not in state:
        head = target.head()
        state[HEAD_TENSOR] = head if ids is None else head[torch.from_numpy(ids).long()]
    _refuse_others(kind, network.state_dict(), state)
    device = select_device(settings.device)
    dtype_choice = select_dtype(settings.dtype, device)
    dtype = state[EMBEDDING_TENSOR].dtype if isinstance(dtype_choice, str) else dtype_choice
    network.load_state_dict({name: tensor.detach().to(device, dtype) for name, tensor in state.items()}, assign=True)
    return network.to(device)  # moves the rotations, which no file has


def _refuse_others(kind: str, own: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
    unknown = sorted(state.keys() - own.keys())
    if unknown:
        raise Unsupported(f"{kind} with tensors {', '.join(unknown[:3])}: no part of its published network")
    shapes = {name: (tuple(tensor.shape), tuple(own[name].shape)) for name, tensor in state.items()}
    misshapen = {name: shape for name, shape in shapes.items() if shape[0] != shape[1]}
    refuse_incomplete("draft", kind, own.keys() - state.keys(), misshapen)
    for name, tensor in state.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise Unsupported(
                f"{kind}: tensor {name} of {tensor.dtype}: quantised tensors of a drafter are not served"
            )


@dataclass(frozen=True, eq=False)
class Eagle3Files:
    """The contents of a folder, in the terms that both layouts share.

    Attributes:
        config: settings of the network.
        layers: configuration of its layers; its vocabulary is the target's.
        inputs: the target's layers whose inputs are joined.
        tensors: by the network's names, with the maps between vocabularies.
    """

    name: str
    config: Mapping[str, Any]
    layers: Any
    inputs: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]

    def form(self) -> Eagle3Form:
        """The network's variation.

        Raises:
            Unsupported: two norms at once.
        """
        norm_before_fc, fc_norm = flag(self.config, "norm_before_fc"), flag(self.config, "fc_norm")
        if norm_before_fc and fc_norm:
            raise Unsupported(
                f"draft {self.name}: norm_before_fc and fc_norm, both true: no published network has both"
            )
        return Eagle3Form(
            features=len(self.inputs),
            target_hidden=self.config.get("target_hidden_size") or self.layers.hidden_size,
            norm_before_residual=flag(self.config, "norm_before_residual"),
            input_norm=InputNorm.ALL_LAYERS
            if norm_before_fc
            else InputNorm.EACH_LAYER
            if fc_norm
            else InputNorm.NONE,
            norm_output=flag(self.config, "norm_output"),
        )

    def load(self, target: TargetWeights, settings: EngineSettings) -> EagleDraft:
        """Make the network.

        Raises:
            InvalidInput: another target's, or tensors that are missing or of another shape.
            Unsupported: tensors that the network doesn't have, or quantised ones.
        """
        form, vocab_size = self.form(), self.layers.vocab_size
        check_target(self.name, form.target_hidden, vocab_size, target)
        need = need_of_inputs(self.inputs, target)
        size = draft_size(self.config, self.tensors, vocab_size)
        ids = target_ids(self.tensors, size, vocab_size, self.name)
        with torch.device("meta"):
            network = Eagle3Network(self.layers, size, form)
        return EagleDraft(fill(network, self.tensors, ids, target, settings), need, ids)


def flag(config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A boolean of a configuration.

    Raises:
        InvalidInput: it is no boolean.
    """
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidInput.of(name, value, "true or false")
    return value
