"""What a process takes of a GPU: its share, no cached pieces, and nothing once its engine is gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from paceline.engine import decoder, memory
from paceline.engine.cuda.device import choose_kernels, empty_caches, share_left
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.protocol.errors import InvalidInput
from tests.engine import tiny

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
TOTAL, CONTEXT = 1000, 10
Share = Callable[[torch.device, float], int]


def others_count(device: torch.device, utilization: float) -> int:
    """A mutant: what other processes have counts as used."""
    free, total = torch.cuda.mem_get_info(device)
    return int(utilization * total) - (total - free)


def plan_services(share: Share, monkeypatch: pytest.MonkeyPatch, *services: tuple[float, int]) -> list[int]:
    """The bytes that are left to services of (share, weights), which start one after another and take all of it."""
    free, plans = TOTAL, []
    for utilization, weights in services:
        free -= CONTEXT + weights
        facts = (free, TOTAL)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, facts=facts: facts)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, weights=weights: weights)
        plans.append(share(CUDA, utilization))
        free -= plans[-1]
    return plans


@pytest.mark.parametrize("share", [share_left, others_count])
def test_a_target_and_a_draft_on_one_gpu_start_in_any_order(monkeypatch: pytest.MonkeyPatch, share: Share) -> None:
    target, draft = (0.6, 300), (0.3, 50)
    plans = [plan_services(share, monkeypatch, target, draft), plan_services(share, monkeypatch, draft, target)[::-1]]
    assert (plans == [[300, 250], [300, 250]]) is (share is share_left)
    if share is share_left:
        with pytest.raises(InvalidInput, match=r"gpu_memory_utilization = 0.9: must be at most 0.130: of 1000 bytes"):
            plan_services(share, monkeypatch, (0.85, 300), (0.9, 50))


def test_the_plan_of_a_gpu_is_of_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "share_left", lambda device, utilization: int(1000 * utilization))
    settings = tiny.THREAD.model_copy(update={"gpu_memory_utilization": 0.25})
    assert memory._available_bytes(CUDA, settings) == 250


def test_parts_of_fused_layers_are_given_back_before_the_pool_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def noting(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def call(*args: Any) -> Any:
            log.append(name)
            return own(*args)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((decoder, "empty_caches"), (decoder, "fuse_layers"), (StaticEngine, "__init__")):
        noting(owner, name)
    tiny.static(tiny.random_model(tiny.llama()), kv_bytes=1 << 20)
    assert log == ["fuse_layers", "empty_caches", "__init__"]


def test_caches_are_emptied_of_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: log.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty"))
    empty_caches(CPU)
    assert not log
    empty_caches(CUDA)
    assert log == ["collect", "empty"]


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_an_engine_that_nobody_holds_is_gone_at_once(in_a_cycle: bool) -> None:
    engine = tiny.static(tiny.random_model(tiny.llama()), kv_bytes=1 << 20)
    if in_a_cycle:  # a mutant
        engine._ledger._blocks._release = partial(lambda whole, block: whole._pool.release(block.page), engine)
    alive = weakref.ref(engine._pool.rows)
    gc.disable()
    del engine
    is_alive = alive() is not None
    gc.enable()
    assert is_alive is in_a_cycle


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[bool, bool]]]:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, torch.backends.cuda.cudnn_sdp_enabled()
    matmul.allow_bf16_reduced_precision_reduction = True  # as a process begins
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield lambda: (matmul.allow_bf16_reduced_precision_reduction, torch.backends.cuda.cudnn_sdp_enabled())
    matmul.allow_bf16_reduced_precision_reduction = before[0]
    torch.backends.cuda.enable_cudnn_sdp(before[1])


def test_kernels_follow_from_how_shapes_grow(flags: Callable[[], tuple[bool, bool]]) -> None:
    for device, grow, expected in (
        (CPU, True, (True, True)),
        (CUDA, False, (False, True)),
        (CUDA, True, (False, False)),
        (CUDA, False, (False, False)),  # another engine of the process has shapes that grow
    ):
        choose_kernels(device, shapes_grow=grow)
        assert flags() == expected


def test_engines_say_whether_their_shapes_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[bool] = []
    monkeypatch.setattr(decoder, "choose_kernels", lambda device, *, shapes_grow: notes.append(shapes_grow))
    for static in (False, True):
        tiny.build(tiny.random_model(tiny.llama()), kv_bytes=1 << 20, static=static)
    assert notes == [True, False]
