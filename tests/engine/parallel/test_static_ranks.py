"""Ranks whose steps have few shapes: the bits of their sums, what they capture, and how long a step may take."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.cuda.buckets import common_shapes
from paceline.engine.decoder import capture_common
from paceline.engine.interface import Logits, StepItem, StepPlan
from paceline.engine.parallel import decoder, engine
from paceline.engine.parallel.engine import ParallelEngine, follow
from paceline.engine.parallel.group import RankGroup
from paceline.engine.parallel.place import Place
from tests.engine import tiny
from tests.engine.parallel.ranks import ThreadRanks, run_ranks
from tests.engine.parallel.test_parallel_engine import CPU, SETTINGS, four_heads, in_parallel, schedule, share_of
from tests.engine.test_device_engine import Capturing

RANKS = 2


def run_rank(rank: int, port: int, answers: multiprocessing.SimpleQueue[list[Logits]]) -> None:
    group = RankGroup(Place(rank, RANKS, rank, RANKS, port), CPU)
    group.watch(lambda reason: None)
    own, _ = share_of(tiny.random_model(four_heads()), group, static=True)
    if rank:
        follow(own, group)
        group.close()
        return
    leader = ParallelEngine(own, group)
    answers.put(schedule(leader))
    leader.stop()


def summed_in_order() -> list[Logits]:
    """The same in one process, which adds the ranks' parts in their order."""
    return in_parallel(four_heads, RANKS, lambda parallel, _: schedule(parallel), static=True)


def run_processes() -> list[Logits]:
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    answers: multiprocessing.SimpleQueue[list[Logits]] = context.SimpleQueue()
    ranks = [context.Process(target=run_rank, args=(rank, port, answers), daemon=True) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    return answers.get()


def test_processes_have_the_bits_of_sums_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those of a mutant, whose parts are rounded before they are added."""
    by_processes, exact = run_processes(), ThreadRanks.sum
    for theirs, mine in zip(by_processes, summed_in_order(), strict=True):
        np.testing.assert_array_equal(theirs, mine)
    monkeypatch.setattr(ThreadRanks, "sum", lambda self, part: exact(self, part.copy_((part * 3).div_(3))))
    with pytest.raises(AssertionError, match="not equal"):
        for theirs, mine in zip(by_processes, summed_in_order(), strict=True):
            np.testing.assert_array_equal(theirs, mine)


@pytest.mark.parametrize("with_race", [False, True])
def test_ranks_capture_the_same_steps_at_the_start(monkeypatch: pytest.MonkeyPatch, with_race: bool) -> None:
    """`with_race`: a mutant, which captures steps that ranks don't have: their logits are drawn from on the host."""
    runners: list[Capturing] = []

    def runner_for(device: torch.device, *, graphs: bool) -> Capturing:
        runners.append(Capturing())
        return runners[-1]

    monkeypatch.setattr(decoder, "runner_for", runner_for)
    if with_race:
        monkeypatch.setattr(decoder, "capture_common", lambda *args, **_: capture_common(*args))

    def replays(parallel: ParallelEngine, _: Any) -> int:
        before = runners[0].replays
        parallel.open(1, 2)
        parallel.step(StepPlan((StepItem(1, 0, (5,), logit_rows=(0,)),)))
        parallel.close(1)
        return runners[0].replays - before

    count = in_parallel(four_heads, RANKS, replays, static=True)
    assert count == 1 or with_race
    first, second = (set(runner._bodies) for runner in runners)
    assert first == second
    shapes = common_shapes(SETTINGS.max_num_seqs, tiny.CONTEXT, tiny.VOCAB, 1, with_race=False)
    assert (first >= set(shapes)) is not with_race


@pytest.mark.parametrize("has_limit", [True, False])
def test_a_step_that_takes_too_long_ends_the_group(monkeypatch: pytest.MonkeyPatch, has_limit: bool) -> None:
    """Sums within a graph have no limit of their own; without one (a mutant) nobody notices a rank that hangs."""
    monkeypatch.setattr(engine, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(ThreadRanks, "step_seconds", 0.05 if has_limit else -1.0)
    reasons: list[str] = []
    has_ended, go_on = threading.Event(), threading.Event()

    def on_lost(reason: str) -> None:
        reasons.append(reason)
        has_ended.set()

    monkeypatch.setattr(engine, "run_step", lambda *_: go_on.wait(10))

    def lead(group: ThreadRanks) -> None:
        leader = ParallelEngine(tiny.build(tiny.random_model(four_heads())), group, on_lost)
        worker = threading.Thread(target=lambda: leader.step_and_draw(StepPlan(()), ()))
        worker.start()
        assert has_ended.wait(5 if has_limit else 0.3) is has_limit
        go_on.set()
        worker.join()
        leader.stop()

    run_ranks(1, lead, lambda group: None)
    assert reasons == ["a step has taken 0.05 s"] * has_limit
