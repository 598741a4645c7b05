"""How the ranks of one engine talk: rank 0's commands, sums inside the model, what each drew.

Commands and draws are a few hundred bytes that no device needs to see, so they always travel over gloo,
on the host; the model's sums travel over NCCL where there are GPUs.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.engine.parallel.wire import Ints

JOIN_SECONDS = 600.0
"""How long ranks wait for each other while they load, which takes each its own time."""
COLLECTIVE_SECONDS = 30.0
"""How long a rank may keep the others waiting in a step, and rank 0's silence last; dead ranks are noticed at once."""
INLINE_INTS = 1024
"""A command of so many integers takes one broadcast, a longer one two."""

Bytes = NDArray[np.uint8]


class RankGroup(Protocol):
    """The ranks that share a model. Every call is made by all of them, in the same order.

    Any call may raise what the transport raises once a rank is gone; the group is of no use after that.
    """

    @property
    def rank(self) -> int:
        """This process's number; 0 serves."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def tell(self, command: Ints) -> None:
        """Rank 0: send a command to all others."""

    def hear(self) -> Ints:
        """Others: wait for rank 0's next command."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks, in place; returns it."""

    def exchange(self, data: Bytes) -> Bytes:
        """Every rank's bytes [size, n], on every rank."""

    def collect(self, data: Bytes) -> Bytes | None:
        """Every rank's bytes [size, n] on rank 0, None elsewhere."""

    def close(self) -> None:
        """Leave; harmless when a rank is gone."""


@dataclass(frozen=True)
class Place:
    """Where one rank stands; `local_rank` numbers the ranks of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int


class ProcessRanks:
    """Ranks as processes, over torch.distributed; one a process."""

    def __init__(self, place: Place, device: torch.device, listener: int | None = None) -> None:
        """Join the group; returns once all ranks have.

        Args:
            place: this rank's.
            device: of the model's tensors.
            listener: rank 0: a bound and listening socket of `place.port`, taken over; None: it is bound here.

        Raises:
            RuntimeError: the others did not come within `JOIN_SECONDS`.
        """
        self.rank, self.size = place.rank, place.size
        patience = datetime.timedelta(seconds=JOIN_SECONDS)
        store = dist.TCPStore(
            place.address,
            place.port,
            place.size,
            place.rank == 0,
            timeout=patience,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        sums = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=patience)
        limit = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
        self._talk = dist.new_group(backend="gloo", timeout=limit)
        self._sums = dist.new_group(backend=sums, timeout=limit)

    def gather_facts(self, facts: bytes) -> list[bytes]:
        """What every rank says of itself once it has loaded, on all of them; waits for the slowest."""
        length = torch.tensor([len(facts)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        longest = max(int(each) for each in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(facts)] = torch.frombuffer(bytearray(facts), dtype=torch.uint8)
        found = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return [each[: int(n)].numpy().tobytes() for each, n in zip(found, lengths, strict=True)]

    def tell(self, command: Ints) -> None:  # noqa: D102
        first = torch.zeros(INLINE_INTS, dtype=torch.int64)
        first[0] = command.size
        rest = torch.from_numpy(command)
        held = min(command.size, INLINE_INTS - 1)
        first[1 : 1 + held] = rest[:held]
        dist.broadcast(first, 0, group=self._talk)
        if held < command.size:
            dist.broadcast(rest[held:].clone(), 0, group=self._talk)

    def hear(self) -> Ints:  # noqa: D102
        first = torch.zeros(INLINE_INTS, dtype=torch.int64)
        dist.broadcast(first, 0, group=self._talk)
        length = int(first[0])
        if length < INLINE_INTS:
            return np.asarray(first[1 : 1 + length].numpy())
        rest = torch.zeros(length - INLINE_INTS + 1, dtype=torch.int64)
        dist.broadcast(rest, 0, group=self._talk)
        return np.asarray(torch.cat([first[1:], rest]).numpy())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:  # noqa: D102
        dist.all_reduce(tensor, group=self._sums)
        return tensor

    def exchange(self, data: Bytes) -> Bytes:  # noqa: D102
        found = torch.empty((self.size, data.size), dtype=torch.uint8)
        dist.all_gather(list(found), torch.from_numpy(data), group=self._talk)
        return np.asarray(found.numpy())

    def collect(self, data: Bytes) -> Bytes | None:  # noqa: D102
        found = torch.empty((self.size, data.size), dtype=torch.uint8) if self.rank == 0 else None
        dist.gather(torch.from_numpy(data), None if found is None else list(found), 0, group=self._talk)
        return None if found is None else np.asarray(found.numpy())

    def close(self) -> None:  # noqa: D102
        dist.destroy_process_group()
