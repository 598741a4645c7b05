"""EAGLE-3 as speculators 0.9 writes it (`speculators.models.eagle3`), read in November 2026.

Layers are listed by their *inputs* (2 is what layer 2 is given; as many as there are layers: the last one's output,
before the norm), by default 2, L/2 and L - 3. `d2t` is an offset, as SafeAILab's. Every proposal method says by what
rule a proposal is accepted: those that accept tokens that the target didn't draw are refused, whether they are the
default or not, since a draft's manifest must not state a rule that isn't followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from paceline.drafters.formats.draft_files import read_config, read_tensors
from paceline.drafters.formats.eagle_parts import Eagle3Files, default_inputs
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.eagle_rows import EagleDraft
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.runtime.config import EngineSettings

KIND = "speculators"
SERVED_KIND = "eagle3"
KIND_KEY = "speculators_model_type"
_DEFAULT_LAYERS = "qwen3"
"""Model type of layers that name none."""
_TARGET_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the target that training saves, too; they are ignored."""
_LOSSLESS = {"accept_tolerance": 0.0, "verifier_accept_k": 1}
"""The largest value of each acceptance setting that emits the target's own token alone."""


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is speculators', of any kind; kinds that aren't served are refused when loaded."""
    return KIND_KEY in config


def load_speculators_eagle3(folder: Path, target: TargetWeights, settings: EngineSettings) -> EagleDraft:
    """Read such an EAGLE-3 draft.

    Raises:
        InvalidInput: another target's, or tensors that are missing or of another shape.
        DamagedFile: naming the file.
        Unsupported: another kind, lossy acceptance, sliding windows, tensors that the network doesn't have.
    """
    name, config = folder.name, read_config(folder)
    kind = config.get(KIND_KEY)
    if kind != SERVED_KIND:
        reason = "it fills masked positions at once, and isn't trained on its own outputs" if kind == "peagle" else ""
        raise Unsupported(f"draft {name}: {KIND_KEY} = {kind}: must be {SERVED_KIND}{reason and f' ({reason})'}")
    refuse_lossy(config, name)
    layers = _layer_config(config, name)
    inputs = tuple(config.get("eagle_aux_hidden_state_layer_ids") or default_inputs(target.config.num_hidden_layers))
    tensors = {each: tensor for each, tensor in read_tensors(folder).items() if each not in _TARGET_TENSORS}
    return Eagle3Files(name, config, layers, inputs, tensors).load(target, settings)


def refuse_lossy(config: Mapping[str, Any], name: str) -> None:
    """Refuse a draft if any of its proposal methods accepts tokens that the target didn't draw.

    Raises:
        Unsupported: naming the setting.
    """
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or ()
    for method in methods:
        for setting, most in _LOSSLESS.items():
            value = method.get(setting)
            if value is not None and value > most:
                raise Unsupported(
                    f"draft {name}: {setting} = {value}: must be at most {most:g}, "
                    "or accepted text would not be the target's own"
                )


def _layer_config(config: Mapping[str, Any], name: str) -> PreTrainedConfig:
    layer_settings = dict(config.get("transformer_layer_config") or {})
    if not layer_settings:
        raise InvalidInput.of(f"draft {name}: transformer_layer_config", layer_settings, "given")
    layers = AutoConfig.for_model(layer_settings.pop("model_type", _DEFAULT_LAYERS), **layer_settings)
    if "sliding_attention" in (getattr(layers, "layer_types", None) or ()):
        raise Unsupported(f"draft {name}: layers of type sliding_attention; full attention only")
    return layers
