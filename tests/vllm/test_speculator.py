"""The speculator in a V2 model runner that is a fake: its slots of tokens, its batches, and its dummy runs."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.protocol.errors import InvalidInput
from tests.drafting.foreign_server import FIRST_STEP_S, TOKENS, plain, verify
from tests.e2e.cluster import free_port
from tests.services.harness import RecordingEngine, draft_service, eventually
from tests.vllm.fakes import BaseSpeculator, config, parameters, put_module, put_tokenizers
from tests.vllm.sampler_rule import PROPOSE

SLOTS, WIDTH = 12, 128
CPU = torch.device("cpu")


class Group:
    """The ranks that share a target: what is broadcast by the first is what others get."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.of_first_rank: torch.Tensor | None = None

    def broadcast(self, rows: torch.Tensor, src: int) -> torch.Tensor:
        assert src == 0
        assert rows.is_contiguous()
        self.sent.append(rows)
        return rows if self.of_first_rank is None else self.of_first_rank


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """vLLM's modules; `speculator` is imported anew over them."""
    own = Group()
    put_tokenizers(monkeypatch)
    put_module(monkeypatch, "vllm.distributed.parallel_state", get_tp_group=lambda: own)
    put_module(monkeypatch, "vllm.v1.worker.gpu.spec_decode.speculator", BaseSpeculator=BaseSpeculator)
    sys.modules.pop("paceline_vllm.speculator", None)
    yield own
    sys.modules.pop("paceline_vllm.speculator", None)


class States:
    """vLLM's `RequestState`: a slot of tokens for each request that runs."""

    def __init__(self) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(SLOTS, WIDTH, dtype=torch.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32))
        self.prompt_len = SimpleNamespace(np=np.zeros(SLOTS, np.int32))
        self.last_sampled = torch.zeros(SLOTS, 1, dtype=torch.int64)


@contextmanager
def speculator_of(asked: Any, states: States) -> Iterator[Any]:
    from paceline_vllm.speculator import DraftSpeculator

    speculator = DraftSpeculator(asked, CPU, states)
    speculator.init_cudagraph_manager(None)
    speculator.capture()
    try:
        yield speculator
    finally:
        if speculator.drafts.client is not None:
            speculator.drafts.client.close()


def propose(speculator: Any, states: States, req_ids: list[str], *, dummy: bool = False) -> torch.Tensor:
    """As the runner calls it: by place up to the seeds, then by name."""
    slots = torch.tensor([states.req_id_to_index.get(each, 0) for each in req_ids], dtype=torch.int32)
    batch = SimpleNamespace(req_ids=req_ids, num_reqs=len(req_ids), idx_mapping=slots)
    nothing = torch.zeros(0)
    rows: torch.Tensor = speculator.propose(
        batch, None, None, nothing, None, nothing, nothing, states.last_sampled, nothing, nothing, nothing,
        num_speculative_tokens=TOKENS, dp_sync_state=None, mm_inputs=None, dummy_run=dummy,
    )  # fmt: skip
    return rows


class Runner:
    """Steps its requests as a V2 runner does: every row verifies all its places."""

    def __init__(self, speculator: Any, states: States) -> None:
        self.speculator, self.states = speculator, states
        self.texts: dict[str, list[int]] = {}
        self.offers: dict[str, list[int]] = {}

    def add(self, req_id: str, prompt: tuple[int, ...]) -> None:
        slot = min({*range(SLOTS)} - {*self.states.req_id_to_index.values()})
        self.states.req_id_to_index[req_id] = slot
        self.states.prompt_len.np[slot] = len(prompt)
        self.texts[req_id], self.offers[req_id] = [*prompt], []
        self._write(req_id)

    def remove(self, req_id: str) -> list[int]:
        """The request ends or is preempted; its text."""
        del self.states.req_id_to_index[req_id], self.offers[req_id]
        return self.texts.pop(req_id)

    def step(self, computing: str = "", without: str = "") -> None:
        """A step of all requests but `without`; that of `computing` computes a part of its prompt."""
        req_ids = [each for each in self.texts if each != without]
        for req_id in req_ids:
            if req_id != computing:
                self.texts[req_id] += verify(self.texts[req_id], self.offers[req_id])
                self._write(req_id)
        rows = propose(self.speculator, self.states, req_ids)
        assert rows.dtype == torch.int64
        assert rows.shape == (len(req_ids), TOKENS)
        self.offers |= dict(zip(req_ids, rows.tolist(), strict=True))

    def has_drafts(self) -> bool:
        requests = self.speculator._requests
        return all(requests[each].session.has_prepared(requests[each].length - 1) for each in self.texts)

    def _write(self, req_id: str) -> None:
        slot, text = self.states.req_id_to_index[req_id], self.texts[req_id]
        self.states.all_token_ids.gpu[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        self.states.total_len.gpu[slot] = len(text)
        self.states.last_sampled[slot] = text[-1]


async def run_with_drafts(runner: Runner, steps: int) -> None:
    for _ in range(steps):
        async with asyncio.timeout(FIRST_STEP_S):
            while not runner.has_drafts():  # noqa: ASYNC110  # by a thread
                await asyncio.sleep(0.001)
        await asyncio.to_thread(runner.step)


async def test_rows_are_served_from_what_was_drafted_ahead_and_their_texts_are_the_servers_own(group: Group) -> None:
    states = States()
    async with draft_service(RecordingEngine(), name="model") as (servicer, address):
        with speculator_of(config(address), states) as speculator:
            client = speculator.drafts.client
            await eventually(lambda: client.is_up, "the link")
            runner = Runner(speculator, states)
            prompts = {"a": (1, 2, 3), "b": (7, 7), "c": (1, 2, 3)}
            for req_id, prompt in prompts.items():
                runner.add(req_id, prompt)
            await asyncio.to_thread(runner.step, "b")
            await run_with_drafts(runner, 8)
            text = runner.remove("a")
            assert text == plain(prompts["a"], len(text) - 3)
            prompts["d"] = (5,)
            runner.add("d", prompts["d"])
            await asyncio.to_thread(runner.step, without="c")
            await run_with_drafts(runner, 6)
            for req_id, text in runner.texts.items():
                assert text == plain(prompts[req_id], len(text) - len(prompts[req_id]))
            assert client.counts.hits > 20
            assert client.counts.accepted > 0.9 * client.counts.proposed
            await eventually(lambda: servicer.scheduler.sessions == len(runner.texts), "one session a request")


@pytest.mark.parametrize("requests", [100, pytest.param(400, marks=pytest.mark.full)])
async def test_requests_that_are_aborted_or_preempted_at_any_time_leave_no_session(
    group: Group, requests: int
) -> None:
    draws, states = random.Random(4), States()
    async with draft_service(RecordingEngine()) as (servicer, address):
        with speculator_of(config(address, idle_s=0.2), states) as speculator:
            client = speculator.drafts.client
            await eventually(lambda: client.is_up, "the link")
            runner = Runner(speculator, states)
            for number in range(requests):
                runner.add(f"r{number}", (number % 30, draws.randrange(30)))
                await asyncio.to_thread(runner.step, draws.choice(["", f"r{number}"]))
                if draws.random() < 0.2:  # it comes back with the tokens that it had
                    req_id = draws.choice([*runner.texts])
                    runner.add(req_id, tuple(runner.remove(req_id)))
                while len(runner.texts) > draws.randint(0, 8):
                    runner.remove(draws.choice([*runner.texts]))
            assert client.sessions > 0
            await eventually(lambda: client.sessions == servicer.scheduler.sessions == 0, "no session is left")


async def test_a_place_without_a_draft_has_the_last_token_and_no_id_outside_the_vocabulary(
    group: Group,
) -> None:
    states = States()
    with speculator_of(config(f"127.0.0.1:{free_port()}"), states) as speculator:
        runner = Runner(speculator, states)
        runner.add("a", (1, 2))
        runner.step()
        assert runner.offers["a"] == [runner.texts["a"][-1]] * TOKENS
        speculator.drafts.ask = lambda call: [[9]]
        assert propose(speculator, states, ["a"]).tolist() == [[9, *[runner.texts["a"][-1]] * (TOKENS - 1)]]


async def test_a_reused_id_is_another_request(group: Group) -> None:
    states = States()
    with speculator_of(config(f"127.0.0.1:{free_port()}"), states) as speculator:
        runner = Runner(speculator, states)
        runner.add("a", (1, 2, 3, 4))
        runner.step()
        first = speculator._requests["a"]
        runner.remove("a")
        runner.add("a", (6, 7))
        runner.step()
        assert speculator._requests["a"] is not first
        assert speculator._requests["a"].length == 3


async def test_all_ranks_verify_the_rows_of_the_first(group: Group) -> None:
    states = States()
    with speculator_of(config("127.0.0.1:1", rank=1), states) as speculator:
        assert speculator.drafts.client is None
        runner = Runner(speculator, states)
        runner.add("a", (1, 2))
        group.of_first_rank = torch.tensor([[3] * TOKENS])
        runner.step()
        assert runner.offers["a"] == [3] * TOKENS
        assert len(group.sent) == 1
        propose(speculator, states, ["x", "y"], dummy=True)
        assert len(group.sent) == 1


async def test_a_dummy_run_and_a_defect_open_nothing(group: Group) -> None:
    states = States()
    with speculator_of(config(f"127.0.0.1:{free_port()}"), states) as speculator:
        assert propose(speculator, states, ["_dummy_req_0", "_dummy_req_1"], dummy=True).shape == (2, TOKENS)
        assert not speculator._requests
        runner = Runner(speculator, states)
        runner.add("a", (1, 2))
        speculator._latest = lambda slots: 1 / 0
        runner.step()
        assert speculator.drafts.client is None
        runner.step()
        assert runner.offers["a"] == [runner.texts["a"][-1]] * TOKENS


def test_the_contract_is_vllms(group: Group) -> None:
    from paceline_vllm.speculator import DraftSpeculator

    assert parameters(DraftSpeculator.propose) == PROPOSE
    assert DraftSpeculator.draft_logits is None
    assert not DraftSpeculator.supports_mm_inputs


def test_context_parallel_ranks_are_refused_by_name(group: Group) -> None:
    from paceline_vllm.speculator import DraftSpeculator

    asked = config("127.0.0.1:1")
    asked.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(InvalidInput, match="prefill_context_parallel_size = 2"):
        DraftSpeculator(asked, CPU, States())
