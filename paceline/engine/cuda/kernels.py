"""What attends and races in a GPU's steps: the library's kernels, or ours in Triton, which answer alike."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.engine.attention import AttentionFacts
from paceline.engine.cuda.attention import gathered_attention
from paceline.engine.cuda.buckets import GATHERED_ROWS, GroupShape
from paceline.engine.cuda.footprint import RACED_AT_ONCE
from paceline.engine.cuda.layout import Layout
from paceline.engine.cuda.noise import Race, check_race, race_candidates
from paceline.engine.cuda.pages import PagePool
from paceline.engine.forward import Attender
from paceline.protocol.errors import Unsupported

logger = logging.getLogger(__name__)

NO_LIMIT = 1 << 62


class AttentionMaker(Protocol):
    """Makes the attention of a step from its integers."""

    def __call__(
        self,
        inputs: torch.Tensor,
        layout: Layout,
        shapes: tuple[GroupShape, ...],
        pool: PagePool,
        facts: AttentionFacts,
        /,
    ) -> Attender:
        """As `gathered_attention`."""


@dataclass(frozen=True)
class Kernels:
    """A way to compute steps.

    Attributes:
        attention: of a step.
        race: of rows.
        raced_at_once: rows that memory has room for.
        gathered_rows: KV rows that a group may have, where memory has to hold copies of them.
    """

    attention: AttentionMaker
    race: Race
    raced_at_once: int
    gathered_rows: int


TORCH = Kernels(gathered_attention, race_candidates, RACED_AT_ONCE, GATHERED_ROWS)


def triton_kernels() -> Kernels:
    """Ours.

    Raises:
        Unsupported: Triton is not installed.
    """
    try:
        from paceline.engine.cuda import attention_kernel, race_kernel
    except ModuleNotFoundError as error:
        raise Unsupported(f"kernels = triton: {error}") from error
    return Kernels(attention_kernel.paged_attention, race_kernel.race_candidates, NO_LIMIT, NO_LIMIT)


def kernels_of(name: str, device: torch.device) -> Kernels:
    """The kernels of a setting, whose race has been compared with the definition's on the device.

    `auto` is Triton's on a GPU where they compile: that takes a C compiler and the GPU's driver.

    Raises:
        Unsupported: Triton is not installed; or a race has other noise than the reference's.
    """
    if name == "auto" and device.type == "cuda":
        try:
            return _checked(triton_kernels(), device)
        except Exception as error:  # noqa: BLE001  # whatever a compiler raises
            logger.warning("Triton's kernels fail on %s (%s); steps use torch's, which are slower", device, error)
    return _checked(triton_kernels() if name == "triton" else TORCH, device)


def _checked(kernels: Kernels, device: torch.device) -> Kernels:
    check_race(device, kernels.race)
    return kernels
