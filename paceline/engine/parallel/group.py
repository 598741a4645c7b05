"""The ranks of one engine and their messages; no GPU has run their sums over NCCL yet.

These are rank 0's commands, sums inside the model, and the draws of each. Commands and draws are a few hundred bytes
that no device needs to see, so they always travel over gloo, on the host; the model's sums travel over NCCL where
there are GPUs.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.engine.parallel.place import Place
from paceline.engine.parallel.wire import Ints
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import LOCALHOST

JOIN_SECONDS = 600.0
"""Seconds that ranks wait for each other while they load; chosen, not tuned: the slowest disk decides."""
COLLECTIVE_SECONDS = 30.0
"""Seconds that a rank may keep the others waiting in a step, and that rank 0 may be silent.

Chosen in docs/decisions/2026-11-21-ranks-talk-over-gloo-and-end-together.md.
"""
WATCH_SECONDS = 1e8
"""Seconds that a connection on which nothing but its end is awaited may be silent: years."""
INLINE_INTS = 1024
"""Commands of fewer integers take one broadcast, longer ones two. Chosen, not tuned: few commands are longer."""

Bytes = NDArray[np.uint8]


class RankGroup:
    """The ranks that share a model: processes, over torch.distributed.

    Every call is made by all of them, in the same order. Any call may raise what the transport raises once a rank is
    gone; the group is of no use after that.

    Attributes:
        rank: this process's number; 0 serves.
        size: number of ranks.
        step_seconds: longest time of a step; -1: its sums have limits of their own, which those in a graph have not.
    """

    step_seconds = -1.0

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
        sums = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            self.step_seconds = COLLECTIVE_SECONDS
        dist.init_process_group(
            "gloo", store=_store(place, listener), rank=place.rank, world_size=place.size, timeout=patience
        )
        limit = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
        self._talk = dist.new_group(backend="gloo", timeout=limit)
        self._sums = dist.new_group(backend=sums, timeout=limit)
        self._ends = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=WATCH_SECONDS))
        # NCCL connects in its first sum, which must not be within a step: across machines it may take seconds.
        self.sum(torch.zeros(1, device=device))

    def agree(self, same: str, max_kv_rows: int) -> int:
        """Wait for the slowest rank to load.

        Returns:
            The KV rows that every rank has room for.

        Raises:
            InvalidInput: a rank's `same` is not rank 0's.
        """
        facts = np.append(np.frombuffer(hashlib.sha256(same.encode()).digest(), np.int64), max_kv_rows)
        buffer = torch.empty((self.size, facts.size), dtype=torch.int64)
        dist.all_gather(list(buffer), torch.from_numpy(facts))
        rank_facts: Ints = buffer.numpy()
        for rank, row in enumerate(rank_facts):
            if (row[:-1] != rank_facts[0, :-1]).any():
                raise InvalidInput.of(f"what rank {rank} loaded", "another model", "rank 0's")
        return int(rank_facts[:, -1].min())

    def tell(self, command: Ints) -> None:
        """Rank 0: send a command to all others."""
        first = torch.zeros(INLINE_INTS, dtype=torch.int64)
        first[0] = command.size
        rest = torch.from_numpy(command)
        inline = min(command.size, INLINE_INTS - 1)
        first[1 : 1 + inline] = rest[:inline]
        dist.broadcast(first, 0, group=self._talk)
        if inline < command.size:
            dist.broadcast(rest[inline:].clone(), 0, group=self._talk)

    def hear(self) -> Ints:
        """Others: wait for rank 0's next command."""
        first = torch.zeros(INLINE_INTS, dtype=torch.int64)
        dist.broadcast(first, 0, group=self._talk)
        length = int(first[0])
        if length < INLINE_INTS:
            return np.asarray(first[1 : 1 + length].numpy())
        rest = torch.zeros(length - INLINE_INTS + 1, dtype=torch.int64)
        dist.broadcast(rest, 0, group=self._talk)
        return np.asarray(torch.cat([first[1:], rest]).numpy())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks, in place; returns it."""
        dist.all_reduce(tensor, group=self._sums)
        return tensor

    def exchange(self, data: Bytes) -> Bytes:
        """Every rank's bytes [size, n], on every rank."""
        buffer = torch.empty((self.size, data.size), dtype=torch.uint8)
        dist.all_gather(list(buffer), torch.from_numpy(data), group=self._talk)
        return np.asarray(buffer.numpy())

    def collect(self, data: Bytes) -> Bytes | None:
        """Every rank's bytes [size, n] on rank 0, None elsewhere."""
        buffer = torch.empty((self.size, data.size), dtype=torch.uint8) if self.rank == 0 else None
        dist.gather(torch.from_numpy(data), None if buffer is None else list(buffer), 0, group=self._talk)
        return None if buffer is None else np.asarray(buffer.numpy())

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` on a thread of its own when a rank ends without `close`.

        Rank 0 watches all others and they watch rank 0, over connections that break with their process, also while a
        step waits for the device. A machine that has gone breaks none: it is noticed by `COLLECTIVE_SECONDS`.
        """
        for peer in self._peers:
            threading.Thread(target=self._await_end, args=(peer, on_lost), name=f"rank-{peer}", daemon=True).start()

    def close(self) -> None:
        """Leave, telling those who watch; harmless when a rank is gone. The process should end soon."""
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                dist.send(torch.zeros(1), peer, group=self._ends)

    @property
    def _peers(self) -> Sequence[int]:
        """The ranks that this one watches, and that watch it."""
        return (0,) if self.rank else range(1, self.size)

    def _await_end(self, peer: int, on_lost: Callable[[str], None]) -> None:
        try:
            dist.recv(torch.zeros(1), peer, group=self._ends)
        except RuntimeError as error:
            on_lost(f"rank {peer} is gone ({str(error).partition(chr(10))[0]})")


def _store(place: Place, listener: int | None) -> Any:
    """The store in which ranks find each other; None: the one that the environment names."""
    if place.port is None:
        return None
    return dist.TCPStore(  # type: ignore[attr-defined]  # exported, though not explicitly
        LOCALHOST,
        place.port,
        place.size,
        place.rank == 0,
        timeout=datetime.timedelta(seconds=JOIN_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
