"""When a shape is captured and replayed, with CUDA's part played by a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.cuda import graphs
from paceline.engine.cuda.graphs import GraphRunner, StepRunner, download, runner_for, upload

CPU = torch.device("cpu")


class FakeCuda:
    """Notes what is asked of CUDA, in order."""

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

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    names = SimpleNamespace(
        Stream=lambda device: fake,
        CUDAGraph=lambda: fake,
        graph_pool_handle=lambda: (0, 0),
        graph=fake.graph,
        stream=fake.stream,
        current_stream=lambda device: fake,
    )
    monkeypatch.setattr(torch, "cuda", names)
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


def test_shapes_beyond_the_limit_run_as_they_are(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    runner = GraphRunner(torch.device("cuda"))
    for _ in range(3):
        for shape in range(3):
            cuda.log.clear()
            runner.run(shape, lambda: None)
            assert ("replay" in cuda.log) <= (shape < 2)
    assert runner.graphs == 2


def test_what_moves_between_host_and_device_is_what_it_was() -> None:
    there = upload(np.arange(5), CPU)
    into = torch.empty(5, dtype=torch.int64)
    assert upload(np.arange(5) * 2, CPU, out=into) is into
    first, second = download((there, into))
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4], [0, 2, 4, 6, 8])
    assert type(runner_for(CPU, graphs=True)) is StepRunner
