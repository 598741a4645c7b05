"""Ranks as threads of the test's own process: what tensor parallelism computes, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from paceline.engine.parallel.group import Bytes, RankGroup
from paceline.engine.parallel.wire import Ints

T = TypeVar("T")
WAIT_S = 60.0


class _Table:
    def __init__(self, size: int) -> None:
        self.met = threading.Barrier(size, timeout=WAIT_S)
        self.brought: list[Any] = [None] * size


class ThreadRanks(RankGroup):
    def __init__(self, rank: int, size: int, table: _Table) -> None:
        self.rank, self.size = rank, size
        self._table = table
        self.exchanged = 0
        """Bytes that this rank has sent, commands and sums apart."""

    def tell(self, command: Ints) -> None:
        self._together(command)

    def hear(self) -> Ints:
        command: Ints = self._together(None)[0]
        return command

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self._together(tensor.clone())).sum(dim=0)
        return tensor.copy_(total)

    def exchange(self, data: Bytes) -> Bytes:
        self.exchanged += data.size
        return np.stack(self._together(data))

    def collect(self, data: Bytes) -> Bytes | None:
        found = self.exchange(data)
        return found if self.rank == 0 else None

    def agree(self, same: str, max_kv_rows: int) -> int:
        found = self._together((same, max_kv_rows))
        assert len({each[0] for each in found}) == 1
        return int(min(each[1] for each in found))

    def close(self) -> None:
        self._table.met.abort()

    def _together(self, brought: Any) -> list[Any]:
        self._table.met.wait()
        self._table.brought[self.rank] = brought
        self._table.met.wait()
        return list(self._table.brought)


def run_ranks(size: int, leader: Callable[[ThreadRanks], T], follower: Callable[[ThreadRanks], None]) -> T:
    """Run rank 0 on this thread and the others on threads of their own; their errors are raised here."""
    table = _Table(size)
    groups = [ThreadRanks(rank, size, table) for rank in range(size)]
    errors: list[Exception] = []

    def run(group: ThreadRanks) -> None:
        try:
            follower(group)
        except threading.BrokenBarrierError:
            return
        except Exception as error:  # noqa: BLE001  # raised by the test's own thread
            errors.append(error)
            group.close()

    threads = [threading.Thread(target=run, args=(group,)) for group in groups[1:]]
    for thread in threads:
        thread.start()
    try:
        return leader(groups[0])
    except threading.BrokenBarrierError:
        pass
    finally:
        groups[0].close()
        for thread in threads:
            thread.join(WAIT_S)
        if errors:
            raise errors[0]
    raise AssertionError("rank 0 was cut off without an error of another rank")
