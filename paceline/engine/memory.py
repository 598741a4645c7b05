"""The memory budget: computed before the first session opens, and refused if it can't fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline.engine.attention import PRODUCT_COPIES, AttentionFacts
from paceline.engine.cuda.device import share_left
from paceline.engine.cuda.footprint import static_bytes
from paceline.engine.index import INDICES
from paceline.engine.interface import prompt_logit_rows
from paceline.engine.mixers import WINDOW
from paceline.models.gguf_header import read_header
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.features import FeatureOffer
from paceline.protocol.proposal import MAX_PROPOSAL_NODES
from paceline.runtime.config import EngineSettings

DEFAULT_CPU_KV_BYTES = 2 << 30
"""KV budget on a CPU where none is set; chosen, not tuned."""
_CGROUP = Path("/sys/fs/cgroup")
_SCORE_COPIES = 3
"""Copies of one round's logits that exist while its verdict is drawn, at most."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. `available`: free once the weights were loaded; on a GPU, of this process's share of the memory."""

    device: str
    weights: int
    packing: int
    """A tied head's own copy in the packed layout."""
    workspace: int
    available: int
    kv: int
    row_bytes: int
    static: int = 0
    """Static buffers and steps on a GPU, and their graphs."""
    states: int = 0
    """Of one session's recurrent layers; a part of `kv`."""

    @property
    def room(self) -> int:
        """Bytes that are left for KV."""
        return self.available - self.packing - self.workspace - self.static

    def __str__(self) -> str:
        kv = f"KV {_mib(self.kv)} ({self.kv // self.row_bytes} rows of {self.row_bytes} bytes)"
        kv += f", {_mib(self.states)} of it for the states of each session" if self.states else ""
        static = f"static steps and graphs {_mib(self.static)} + " if self.static else ""
        return (
            f"memory on {self.device}: weights {_mib(self.weights)} (loaded); packed head {_mib(self.packing)} + "
            f"workspace {_mib(self.workspace)} + {static}{kv} = "
            f"{_mib(self.available - self.room + self.kv)} of {_mib(self.available)} available"
        )


def plan_memory(
    model: Any,
    settings: EngineSettings,
    attention: AttentionFacts,
    max_length: int,
    *,
    packs: bool,
    static: bool = False,
    features: FeatureOffer | None = None,
) -> MemoryPlan:
    """Divide what is available between workspace and KV.

    Args:
        model: the loaded decoder.
        settings: the KV budget, if one is set, and what bounds a step.
        attention: what its layers ask for, and the shape of a KV row.
        max_length: the longest session.
        packs: whether linear layers get a layout of their own.
        static: whether steps have few shapes and buffers of their own, and on a GPU graphs.
        features: hidden states that such steps may keep.

    Raises:
        InvalidInput: the configured KV budget, or any at all, doesn't fit; with the arithmetic.
    """
    head, shape = model.get_output_embeddings().weight, attention.shape
    is_tied = head is model.get_input_embeddings().weight
    plan = MemoryPlan(
        device=str(shape.device),
        weights=sum(weight.nbytes for weight in model.parameters()),
        packing=head.nbytes if packs and is_tied else 0,
        workspace=workspace_bytes(model.config.get_text_config(), settings, attention, max_length, head.shape[0]),
        available=_available_bytes(shape.device, settings),
        kv=settings.kv_bytes,
        row_bytes=shape.row_bytes,
        static=static_bytes(settings, attention, max_length, head.shape[0], features) if static else 0,
        states=attention.session_rows * shape.row_bytes,
    )
    if not plan.kv:
        budget = plan.room if shape.device.type == "cuda" else min(DEFAULT_CPU_KV_BYTES, plan.room)
        plan = replace(plan, kv=max(budget, 0))
    if plan.kv > plan.room or plan.room < shape.row_bytes:
        limit = f"at most {max(plan.room, 0)}: {plan}; fewer max_step_rows or a shorter max_model_len need less"
        raise InvalidInput.of("kv_bytes", plan.kv, limit)
    return plan


def workspace_bytes(
    config: Any, settings: EngineSettings, attention: AttentionFacts, max_length: int, width: int
) -> int:
    """An upper bound of the bytes that the largest step needs beside weights and KV.

    Its rows' activations in one layer, the attention masks of the longest chunk, its scores where no product of the
    library keeps them to itself, its logits, those of prompts included, with the copy that is handed out, and one
    verdict's scores.
    """
    rows, shape = settings.max_step_rows + settings.prefill_chunk, attention.shape
    hidden: int = config.hidden_size
    inner: int | list[int] = getattr(config, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, list) else inner
    activations = rows * (8 * hidden + 3 * inner) * shape.dtype.itemsize
    chunk = max(settings.prefill_chunk, MAX_PROPOSAL_NODES + 1)
    masks = len(attention.kinds) + (INDICES in attention.terms)
    mask = chunk * max_length * shape.groups * shape.dtype.itemsize * masks
    products = chunk * max_length * shape.heads * 4 * PRODUCT_COPIES if attention.terms - {INDICES} else 0
    logits = (
        (settings.max_step_rows + min(settings.prefill_chunk, prompt_logit_rows(width)))
        * width
        * (shape.dtype.itemsize + 4)
    )
    # One layer's states behind every row of the largest tree.
    states = WINDOW * max((mixer.state_bytes for mixer in attention.mixers), default=0)
    scores = _SCORE_COPIES * (MAX_PROPOSAL_NODES + 1) * width * 4
    return activations + mask + products + states + logits + scores


def refuse_weights_beyond(location: str, available: int) -> None:
    """Refuse a folder or a GGUF file whose weights alone exceed the memory, before they are read.

    Raises:
        InvalidInput: naming both sizes.
    """
    path = Path(location)
    if path.is_file():
        size = read_header(path).float32_bytes
    else:
        size = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0
    if size > available:
        limit = f"one whose weights fit: {_mib(size)} of weights, {_mib(available)} available"
        raise InvalidInput.of("model", location, limit)


def refuse_unpacked_beyond(model: str, size: int, available: int) -> None:
    """Refuse weights of few bits whose floats exceed the memory, before they are unpacked.

    Raises:
        InvalidInput: naming both sizes.
    """
    limit = f"one whose weights fit: {_mib(size)} unpacked, {_mib(available)} available"
    require(size <= available, "model", model, limit)


def available_ram() -> int:
    """Bytes that this process may still take: the machine's, or its control group's if that is less."""
    free = int(psutil.virtual_memory().available)
    limit = _read_int(_CGROUP / "memory.max")
    usage = _read_int(_CGROUP / "memory.current")
    if limit is None or usage is None:
        return free
    return min(free, max(0, limit - usage + _reclaimable()))


def _available_bytes(device: torch.device, settings: EngineSettings) -> int:
    if device.type != "cuda":
        return available_ram()
    return share_left(device, settings.gpu_memory_utilization)


def _read_int(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable() -> int:
    """Bytes of cached files, which a control group counts as used and frees on demand."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
