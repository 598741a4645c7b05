"""What checkpoints of heads over one hidden state have in common: which tensors there must be, what is made of them.

Their configurations are not believed where tensors say otherwise: uploaded ones state 2 heads where the files hold 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.lookahead import LookaheadEngine, LookaheadNetwork
from paceline.engine.interface import EngineInfo
from paceline.engine.weights import chosen_device, chosen_dtype, set_threads
from paceline.models.whole import refuse_incomplete
from paceline.protocol.errors import Unsupported, require
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.proposal import MAX_PROPOSAL_NODES
from paceline.runtime.config import EngineSettings

Shapes = Mapping[str, tuple[int, ...]]

_LONGEST = 1 << 20
"""Tokens of a session, where the target states no context: heads themselves have no limit."""
_TREE_ROWS = 4 * MAX_PROPOSAL_NODES
"""Rows beyond a session's tokens: more than its tree takes, and they hold nothing."""

_LOSSY = (
    *("posterior_threshold", "posterior_alpha"),
    *("typical_acceptance_sampler_posterior_threshold", "typical_acceptance_sampler_posterior_alpha"),
    *("typical_acceptance", "use_typical_acceptance"),
)
"""Settings of Medusa's typical acceptance, as its own code and vLLM's call them."""
_METHODS = ("acceptance_method", "spec_decoding_acceptance_method", "sampling")
_TYPICAL = "typical"
"""What the name of such a method contains."""


def refuse_typical_acceptance(config: Mapping[str, Any], name: str) -> None:
    """Refuse a draft whose configuration asks for typical acceptance: it emits tokens that the target didn't choose.

    Raises:
        Unsupported: naming the setting.
    """
    asked = [key for key in _LOSSY if config.get(key)]
    asked += [key for key in _METHODS if _TYPICAL in str(config.get(key, ""))]
    if asked:
        raise Unsupported(
            f"draft {name}: {asked[0]} = {config[asked[0]]}: typical acceptance changes the target's distribution; "
            "take the setting out of its config.json, and the heads are served with exact acceptance"
        )


def require_exactly(name: str, tensors: Mapping[str, torch.Tensor], shapes: Shapes) -> None:
    """Require every tensor of these shapes, and no other.

    Raises:
        InvalidInput: naming those that are missing or of another shape.
        Unsupported: naming one that the heads don't have.
    """
    found = {each: tuple(tensor.shape) for each, tensor in tensors.items()}
    misshapen = {each: (found[each], shape) for each, shape in shapes.items() if found.get(each, shape) != shape}
    refuse_incomplete("draft", name, shapes.keys() - found.keys(), misshapen)
    unknown = sorted(found.keys() - shapes.keys())
    if unknown:
        raise Unsupported(f"draft {name}: tensor {unknown[0]}, which such heads don't have ({len(unknown)} in all)")


def require_hidden_size(name: str, found: int, target: TargetWeights) -> None:
    """Refuse heads over hidden states of another width than the target's.

    Raises:
        InvalidInput: naming both.
    """
    hidden: int = target.config.hidden_size
    require(found == hidden, f"draft {name} hidden size", found, f"{hidden}, {target.name}'s")


def require_vocabulary(name: str, found: int, target: TargetWeights) -> None:
    """Refuse heads with logits for another vocabulary than the target's.

    Raises:
        InvalidInput: naming both.
    """
    width: int = target.config.vocab_size
    require(found == width, f"draft {name} vocabulary", found, f"{width}, {target.name}'s")


def counted(name: str, what: str, numbers: Iterable[int]) -> int:
    """How many there are of what is numbered from 0 on.

    Raises:
        InvalidInput: there are none.
    """
    count = max(numbers, default=-1) + 1
    require(count > 0, f"draft {name} {what}", count, "at least 1")
    return count


def frozen(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A linear layer of these weights, which shares their memory."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a module the tensors of its parameters, whose shapes have been checked."""
    missing, unexpected = module.load_state_dict(dict(tensors), strict=False, assign=True)
    assert not unexpected, unexpected
    assert all(each.startswith(("outputs.", "embedding.")) for each in missing), missing


def serve(
    network: LookaheadNetwork, name: str, kind: str, target: TargetWeights, settings: EngineSettings
) -> LookaheadEngine:
    """The engine of loaded heads, in the dtype and on the device of the settings."""
    assert isinstance(network, nn.Module)
    set_threads(settings.threads)
    device = chosen_device(settings.device)
    dtype = chosen_dtype(settings.dtype, device)
    network.to(device, dtype if isinstance(dtype, torch.dtype) else None).requires_grad_(False).train(False)
    length = settings.max_model_len or getattr(target.config, "max_position_embeddings", None) or _LONGEST
    tokenizer = target.tokenizer
    numeric = f"{kind} {name} {network.empty_feature.dtype} {device.type}"
    fingerprint = Fingerprint(name, tokenizer.fingerprint, tokenizer.vocab_size, numeric)
    rows = settings.max_num_seqs * (length + _TREE_ROWS)
    return LookaheadEngine(network, EngineInfo(fingerprint, length, rows), settings)


def each_of(heads: int, layers: int) -> Iterable[tuple[int, int]]:
    """Every (head, layer)."""
    return itertools.product(range(heads), range(layers))
