"""Networks written as their authors do: one file of float16 weights, and a configuration beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from paceline.drafters.layers.manifest import WeightFormat, pack
from paceline.drafters.layers.stack import WEIGHTS_FILE
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline_training.checkpoint import CONFIG_FILE, save_config, save_tensors

NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


def write_published(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    maps: Mapping[str, torch.Tensor] = NOTHING,
) -> None:
    """Write weights in float16, maps between vocabularies as they are, and `config.json`."""
    save_tensors(folder / WEIGHTS_FILE, pack(weights, WeightFormat.FLOAT16) | dict(maps))
    save_config(folder / CONFIG_FILE, facts)


def speculators_facts(kind: str, target: Target, tokens: int) -> dict[str, Any]:
    """The keys that speculators' configurations have for every kind: target, and tokens of a round."""
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": target.name, "architectures": [type(target.model).__name__]},
        },
    }


def offset_maps(vocabulary: DraftVocabulary, target_width: int) -> dict[str, torch.Tensor]:
    """`d2t` [draft ids], offset from a draft id to the target's; `t2d` [target width], whether the draft has an id.

    Empty where the draft has every id.
    """
    if vocabulary.size == target_width:
        return {}
    t2d = np.zeros(target_width, np.bool_)
    t2d[vocabulary.d2t] = True
    offsets = vocabulary.d2t.astype(np.int64) - np.arange(vocabulary.size)
    return {"d2t": torch.from_numpy(offsets), "t2d": torch.from_numpy(t2d)}
