"""The plugin in an SGLang that is restated, with a draft service over a real link."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from paceline.protocol.errors import InvalidInput
from paceline_sglang import register
from tests.drafting.foreign_server import FIRST_STEP_S, lie_to
from tests.drafting.test_client import LIES
from tests.e2e.cluster import free_port
from tests.services.harness import SPEC, RecordingEngine, draft_service, eventually
from tests.sglang import restated
from tests.sglang.restated import SamplingParams
from tests.sglang.server import Server, arguments, plain, worker_of

GREEDY = SamplingParams(temperature=0)
PROMPTS = ((1, 2, 3), (9, 8), (5,))


async def step_with_drafts(server: Server) -> None:
    """Step when the draft has something for each request."""
    requests = server.worker.ngram_corpus._sessions
    async with asyncio.timeout(FIRST_STEP_S):
        for each in requests.values():
            while not each.session.has_prepared(each.length - 1):  # noqa: ASYNC110  # by a thread
                await asyncio.sleep(0.001)
    await asyncio.to_thread(server.step)


def check(server: Server, params: SamplingParams = GREEDY) -> None:
    for req in server.reqs:
        assert req.text == plain(req.origin_input_ids_unpadded, params, len(req.text))[: len(req.text)]


@pytest.mark.parametrize(
    ("topk", "is_overlapped"),
    [
        (3, True),
        (1, False),
        pytest.param(3, False, marks=pytest.mark.full),
        pytest.param(1, True, marks=pytest.mark.full),
    ],
)
async def test_requests_are_served_from_what_was_drafted_ahead(
    drafts: Callable[..., None], topk: int, is_overlapped: bool
) -> None:
    async with draft_service(RecordingEngine()) as (servicer, address):
        drafts(address, topk=topk, nodes=9 if topk > 1 else 5, steps=3)
        with worker_of(arguments(disable_overlap_schedule=not is_overlapped)) as worker:
            client = worker.ngram_corpus.drafts.client
            await eventually(lambda: client.is_up, "the link")
            server = Server(worker, is_overlapped=is_overlapped)
            for name, prompt in zip("abc", PROMPTS, strict=True):
                await asyncio.to_thread(server.admit, name, prompt)
            await asyncio.to_thread(server.step)
            assert set(worker.ngram_corpus._sessions) == {*"abc"}
            shapes, steps = set[bool](), 0
            while steps < 10 or (topk > 1 and shapes == {True} and steps < 40):  # a tree is a chain while it grows
                await step_with_drafts(server)
                shapes |= {each.proposal.is_chain for each in worker.ngram_corpus._sessions.values() if each.proposal}
                steps += 1
            check(server)
            assert client.counts.hits > 15
            assert client.counts.accepted > 20, "the draft is the target's own model"
            assert (topk == 1) is (shapes == {True})
            assert servicer.scheduler.sessions == client.sessions == 3
            server.reqs.pop(1)
            await asyncio.to_thread(server.step)
            await eventually(lambda: servicer.scheduler.sessions == client.sessions == 2, "its end is noticed")
            worker.clear_cache_pool()
            await eventually(lambda: servicer.scheduler.sessions == 0, "all ends are")
            await asyncio.to_thread(server.step)
            check(server)


async def test_requests_that_come_and_go_leave_no_session(drafts: Callable[..., None]) -> None:
    draws = random.Random(4)
    async with draft_service(RecordingEngine()) as (servicer, address):
        drafts(address, topk=3, nodes=9, steps=3)
        with worker_of() as worker:
            client = worker.ngram_corpus.drafts.client
            await eventually(lambda: client.is_up, "the link")
            server, all_requests = Server(worker), []
            for number in range(200):
                rid = str(number if number % 7 else number - 1)  # some names come again
                if rid not in {req.rid for req in server.reqs}:
                    prompt = (number % SPEC.vocab, draws.randrange(SPEC.vocab))
                    all_requests.append(server.admit(rid, prompt))
                await asyncio.to_thread(server.step)
                while len(server.reqs) > draws.randint(1, 6):
                    server.reqs.pop(draws.randrange(len(server.reqs)))
            server.reqs = server.reqs[:1]
            await asyncio.to_thread(server.step)
            await eventually(lambda: client.sessions == servicer.scheduler.sessions <= 1, "those of others ended")
            server.reqs = all_requests
            check(server)


LIES_IN_CI = (
    *("other tokens", "a tree", "too many nodes", "supports", "ids beyond the vocabulary", "another outcome"),
    "a failure",
)
"""What can reach a tree, and what ends a session; `tests/drafting` tells the client every lie."""


@pytest.mark.parametrize(
    ("temperature", "lie"),
    [
        pytest.param(temperature, lie, marks=() if temperature and lie in LIES_IN_CI else pytest.mark.full)
        for temperature in (0.0, 1.0)
        for lie in LIES
    ],
)
async def test_a_draft_that_lies_changes_no_text(drafts: Callable[..., None], temperature: float, lie: str) -> None:
    async with draft_service(RecordingEngine()) as (_, address):
        drafts(address, topk=3, nodes=9, steps=3)
        with worker_of() as worker:
            client = worker.ngram_corpus.drafts.client
            await eventually(lambda: client.is_up, "the link")
            lies = lie_to(client, LIES[lie])
            params = SamplingParams(temperature=temperature)
            server = Server(worker)
            server.admit("a", PROMPTS[0], params)
            await asyncio.to_thread(server.step)
            await eventually(lambda: bool(lies), "a lie")
            for _ in range(20):
                await asyncio.to_thread(server.step)
                await asyncio.sleep(0.002)
            check(server, params)


async def test_a_draft_that_dies_or_was_never_there_changes_no_text(drafts: Callable[..., None]) -> None:
    params = SamplingParams(temperature=0.8)
    async with draft_service(RecordingEngine()) as (_, address):
        drafts(address)
        with worker_of() as worker:
            client = worker.ngram_corpus.drafts.client
            await eventually(lambda: client.is_up, "the link")
            server = Server(worker)
            server.admit("a", PROMPTS[0], params)
            await asyncio.to_thread(server.step)
            await step_with_drafts(server)
    for _ in range(6):
        await asyncio.to_thread(server.step)
    check(server, params)
    drafts(f"127.0.0.1:{free_port()}")
    with worker_of() as worker:
        alone = Server(worker)
        alone.admit("a", PROMPTS[0], params)
        for _ in range(6):
            await asyncio.to_thread(alone.step)
        assert len(alone.reqs[0].text) == len(PROMPTS[0]) + 7, "nothing was offered"
        check(alone, params)


async def test_a_defect_ends_the_drafts_and_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_of() as worker:
        monkeypatch.setattr(worker.ngram_corpus, "_committed", lambda *values: 1 / 0)
        server = Server(worker)
        server.admit("a", PROMPTS[0])
        for _ in range(3):
            server.step()
        assert worker.ngram_corpus.drafts.client is None
        check(server)


COUNTED: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 0.5},
    "presence": {"presence_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.1},
    "a least length": {"min_new_tokens": 3},
}


async def test_requests_whose_steps_are_counted_have_no_drafts() -> None:
    with worker_of() as worker:
        server = Server(worker)
        for name, counted in COUNTED.items():
            server.admit(name, (1, 2), SamplingParams(temperature=0, **counted))
        server.admit("processed", (1, 2), custom_logit_processor="own")
        server.admit("free", (1, 2))
        server.step()
        assert set(worker.ngram_corpus._sessions) == {"free"}


async def test_ranks_verify_the_first_ones_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    group = restated.Group(rank_in_group=1, said=[("ids", "mask")])
    monkeypatch.setattr(restated.PARALLEL, "tp_group", group)
    with worker_of() as worker:
        assert worker.ngram_corpus.drafts.client is None, "it links to nobody"
        req = Server(None).admit("a", (1, 2))
        batch = Server(None)
        batch.reqs = [req]
        monkeypatch.setattr(worker, "enable_overlap", False)
        assert worker._prepare_draft_tokens(batch) == ("ids", "mask")


def test_the_algorithm_is_registered_as_speculation_by_n_grams() -> None:
    register()
    algorithm = restated.REGISTERED["PACELINE"]
    assert (algorithm.is_ngram(), algorithm.has_draft_kv(), algorithm.supports_overlap) == (True, False, True)
    assert not algorithm.need_topk()
    assert not algorithm.carries_draft_hidden_states()
    assert (
        algorithm.create_future_map("cuda", "pool", needs_cpu_seq_lens=False)[0]
        is restated.SpeculativeAlgorithm.NGRAM
    )
    assert algorithm.create_worker(arguments()).__mro__[1] is restated.NGRAMWorker


def completed(**changes: Any) -> Any:
    register()
    args = arguments(**changes)
    restated.REGISTERED["PACELINE"].handle_server_args(args)
    return args


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (1, 5, 4)),
        ({"speculative_num_draft_tokens": 32}, (1, 32, 31)),
        ({"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 10}, (3, 10, 3)),
        ({"speculative_eagle_topk": 9, "speculative_num_draft_tokens": 4}, (9, 4, 1)),
        ({"speculative_num_steps": 2}, (1, 5, 2)),
        ({"speculative_eagle_topk": 2, "page_size": 64, "attention_backend": "flashinfer"}, (2, 5, 2)),
    ],
)
def test_arguments_are_completed(changes: dict[str, Any], shape: tuple[int, int, int]) -> None:
    args = completed(**changes)
    own = (args.speculative_eagle_topk, args.speculative_num_draft_tokens, args.speculative_num_steps)
    assert own == shape
    assert args.speculative_ngram_max_trie_depth >= args.speculative_num_draft_tokens, (
        "a step's tokens are seen whole"
    )
    assert (args.enable_mixed_chunk, args.max_running_requests) == (False, 48)
    assert not args.disable_overlap_schedule
    assert completed(**changes, device="cpu", max_running_requests=3).disable_overlap_schedule


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("device", {"device": "npu"}),
        ("pp_size", {"pp_size": 2}),
        ("attn_dp_size", {"attn_dp_size": 2}),
        ("disaggregation_mode", {"disaggregation_mode": "decode"}),
        ("skip_tokenizer_init", {"skip_tokenizer_init": True}),
        ("speculative_eagle_topk", {"speculative_eagle_topk": 2, "page_size": 64}),
        ("speculative_num_draft_tokens", {"speculative_num_draft_tokens": 1}),
    ],
)
def test_arguments_that_would_not_do_are_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"^{field} = "):
        completed(**changes)


def test_an_unread_version_and_wrong_settings_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, name in (('{"adress": 1}', "adress"), ('{"answer_ms": -1}', "answer_ms"), ("{", "PACELINE_SGLANG")):
        monkeypatch.setenv("PACELINE_SGLANG", text)
        with pytest.raises(InvalidInput, match=name):
            completed()
    monkeypatch.setitem(restated.MODULES["sglang.version"], "__version__", "0.6.0")
    restated.install(monkeypatch)
    with pytest.raises(InvalidInput, match=r"sglang = '0\.6\.0': must be one of 0\.5\.23"):
        completed()
