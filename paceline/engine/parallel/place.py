"""The place of a rank among the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.protocol.errors import InvalidInput


@dataclass(frozen=True)
class Place:
    """The place of one rank; `local_rank` numbers the ranks of its machine.

    `port` is rank 0's on this machine; None: the environment says how to meet, as torchrun's does.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    port: int | None = None


def place_from(environment: Mapping[str, str], degree: int) -> Place | None:
    """The place that torchrun has given this process; None if it has not.

    Raises:
        InvalidInput: it started another number of ranks than are configured.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if size != degree:
        raise InvalidInput.of(
            "tensor_parallel_size", degree, f"{size}, the WORLD_SIZE that this rank was started with"
        )
    local_rank = int(environment.get("LOCAL_RANK", rank))
    return Place(rank, size, local_rank, int(environment.get("LOCAL_WORLD_SIZE", size)))
