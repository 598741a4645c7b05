"""The numeric fingerprint: what decides the bits of logits."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

from paceline.engine.cpu.linear import can_pack
from paceline.models.gguf import library_versions

RAGGED = "ragged"
"""In a numeric fingerprint: steps have whatever shape they have."""
STATIC = "static, fused"
"""Steps are padded to one of few shapes, and layers fused."""
_SAMPLED_WEIGHTS = 64
"""Values of each tensor that its digest covers; chosen, not tuned."""


def numeric_fingerprint(
    model: PreTrainedModel,
    max_length: int,
    row_shapes: str = RAGGED,
    *,
    ranks: int = 1,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    panels: torch.dtype | None = None,
) -> str:
    """A digest of all that decides the bits of logits. Equal ones promise equal bits, others only equal laws.

    `device`, `dtype`: where the model will run, and in which dtype, if it isn't so yet.
    `panels`: as `panel_dtype` says.
    """
    device = device or model.device
    layout = "packed" if panels is None else f"in panels of {panels}"
    volatile = ("_name_or_path", "transformers_version", "quantization_config", "architectures", "dtype")
    config = {key: value for key, value in model.config.to_dict().items() if key not in volatile}
    facts = {
        "config": config,
        "dtype": str(dtype or model.dtype),
        "device": device.type,
        "capability": _capability(device),
        "threads": torch.get_num_threads(),
        "tensor_parallel": ranks,
        "row_shapes": row_shapes,
        "layers": f"fused, {layout} and compiled" if device.type == "cpu" and can_pack(model) else "plain",
        "max_length": max_length,
        "libraries": library_versions(),
        "weights": weights_digest(model),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _capability(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, sums in float32"
    return torch.backends.cpu.get_cpu_capability()


@torch.inference_mode()
def weights_digest(model: PreTrainedModel) -> str:
    """Digest of every weight's name, shape and some evenly spaced values: cheap, and enough to tell models apart."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.reshape(-1)
        indices = torch.linspace(0, flat.numel() - 1, _SAMPLED_WEIGHTS, dtype=torch.float64).long()
        values = flat[indices.to(flat.device)].double().cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + values)
    return digest.hexdigest()
