"""When a shape is captured and replayed, with CUDA's part played by a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.cuda import graphs
from paceline.engine.cuda.graphs import GraphRunner, StepRunner, download, runner_for, upload

CPU = torch.device("cpu")


class FakeCuda:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.device = "cuda:0"

    def wait_stream(self, stream: object) -> None:
        self.log.append("wait")

    def replay(self) -> None:
        self.log.append("replay")

    @contextmanager
    def graph(self, graph: object, **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        self.log.append("capture")
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    of_a_device = dict.fromkeys(("Stream", "current_stream"), lambda device: fake)
    names = {"CUDAGraph": lambda: fake, "graph_pool_handle": lambda: (0, 0), "graph": fake.graph}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**of_a_device, **names, stream=lambda stream: nullcontext()))
    return fake


def test_a_shape_runs_then_is_captured_then_replayed(cuda: FakeCuda) -> None:
    runner = GraphRunner(torch.device("cuda"))

    def body() -> None:
        cuda.log.append("body")

    for expected in (["wait", "body", "wait"], ["capture", "body", "replay"], ["replay"], ["replay"]):
        cuda.log.clear()
        runner.run("shape", body)
        assert cuda.log == expected
    assert runner.graphs == 1


class KeepingTheFirst(GraphRunner):
    """A mutant: the first shapes keep their places for good."""

    def run(self, shape: Hashable, body: Callable[[], None]) -> None:
        if shape in self._graphs or len(self._graphs) < graphs.MAX_GRAPHS:
            super().run(shape, body)


@pytest.mark.parametrize("kind", [GraphRunner, KeepingTheFirst])
def test_the_least_recently_used_shape_makes_way(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    runner = kind(torch.device("cuda"))

    def replays(shape: str) -> bool:
        cuda.log.clear()
        runner.run(shape, lambda: None)
        return "replay" in cuda.log

    assert [replays(shape) for shape in "aabb"] == [False, True, False, True]
    assert [replays(shape) for shape in "acac"] == [True, False, True, kind is GraphRunner], "b made way, a did not"
    assert runner.graphs == 2
    assert runner.captures == (3 if kind is GraphRunner else 2)
    # Shapes that come once take a place, but not that of one that is used between them.
    once = [replays(shape) for shape in "adaeafa"]
    assert once == [shape == "a" for shape in "adaeafa"]


def test_the_steps_of_an_engine_are_on_one_thread(cuda: FakeCuda) -> None:
    runner = GraphRunner(torch.device("cuda"))
    runner.run("shape", lambda: None)
    with ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="on two threads"):
        other.submit(runner.run, "shape", lambda: None).result()
    assert "capture" not in cuda.log


def test_what_moves_between_host_and_device_is_what_it_was() -> None:
    there = upload(np.arange(5), CPU)
    into = torch.empty(5, dtype=torch.int64)
    assert upload(np.arange(5) * 2, CPU, out=into) is into
    first, second = download((there, into))
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4], [0, 2, 4, 6, 8])
    assert type(runner_for(CPU, graphs=True)) is StepRunner
