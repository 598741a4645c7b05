"""The target service over real gRPC: verdicts, state, batching, fairness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.protocol.proposal import ROOT, Acceptance, Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.target import Round, TargetOpened, Verdict
from paceline.sampling.distribution import row_logprobs
from tests.services.expected import next_token, own_tokens
from tests.services.harness import LAW, Events, RecordingEngine, chain, first_round, target_open, verdict_of

PREFIX = (1, 2, 3, 4, 5)
OWN = own_tokens(PREFIX, 24)
WRONG = (OWN[0] + 1) % 32
"""In the place of the first of the target's own tokens."""
SUPPORT = SparseDistribution((4, 9), (0.5, 0.5))


async def test_a_round_is_answered_with_the_targets_own_tokens(target: Events) -> None:
    assert (await target.answer(target_open(1, PREFIX), TargetOpened)).reused_tokens == 0
    verdict = await verdict_of(target, first_round(1, PREFIX, chain(OWN[:3])))
    assert (verdict.token_ids, verdict.base_length) == (tuple(OWN[:4]), len(PREFIX) - 1)
    timings = verdict.timings
    assert (timings.rows, timings.sessions) == (4, 1)
    assert timings.service_ms >= timings.queue_ms + timings.forward_ms + timings.sample_ms
    assert timings.forward_ms > 0


async def test_the_accepted_path_of_a_tree_is_compacted(engine: RecordingEngine, target: Events) -> None:
    # Nodes: 0 wrong, 1 right, 2 below 0, 3 wrong below 1, 4 right below 1.
    tokens = (WRONG, OWN[0], OWN[1], (OWN[1] + 1) % 32, OWN[1])
    tree = Proposal(1, tokens, (1.0,) * 5, (ROOT, ROOT, 0, 1, 1))
    target.send(target_open(1, PREFIX))
    verdict = await verdict_of(target, first_round(1, PREFIX, tree))
    assert [verdict.token_ids[row] for row in (0, 2, 5)] == OWN[:3]
    assert verdict.token_ids[1] == next_token([*PREFIX, WRONG])
    follow = Round(1, len(PREFIX) + 2, 4, (OWN[2],), chain(OWN[3:5], 2))
    assert (await verdict_of(target, follow)).token_ids == tuple(OWN[3:6])
    assert engine.plans[-1].items[0].kept_rows == (6, 9)


@pytest.mark.parametrize(
    ("round_", "field", "expected", "got"),
    [
        (Round(1, 4, ROOT, (5,), chain([9])), "proposal", "None", "Proposal"),
        (Round(1, 9, ROOT, (3,)), "base_length", "5", "9"),
        (Round(1, 2, ROOT, (3,)), "base_length", "5", "2"),
        (Round(1, 5, 3, (3,)), "accepted_node", "in [-1, -1]", "3"),
        (Round(1, 5, ROOT, (WRONG,)), "first committed token", str(OWN[0]), str(WRONG)),
    ],
)
async def test_what_does_not_continue_the_session_is_a_prefix_mismatch(
    round_: Round, field: str, expected: str, got: str, target: Events
) -> None:
    target.send(target_open(1, PREFIX))
    verdict = await verdict_of(target, first_round(1, PREFIX))
    right = Round(1, 5, ROOT, verdict.token_ids)
    failure = await target.expect_failure(round_, "PREFIX_MISMATCH", field, closed=False)
    assert expected in failure.metadata["expected"]
    assert got in failure.metadata["got"]
    assert (await verdict_of(target, right)).token_ids == (next_token([*PREFIX, *verdict.token_ids]),)


async def test_a_node_off_the_coupled_path_is_refused(target: Events) -> None:
    tree = Proposal(1, (WRONG, OWN[0]), (1.0, 1.0), (ROOT, ROOT))
    target.send(target_open(1, PREFIX))
    verdict = await verdict_of(target, first_round(1, PREFIX, tree))
    follow = Round(1, len(PREFIX) + 1, 0, (verdict.token_ids[1],))
    await target.expect_failure(follow, "PREFIX_MISMATCH", "accepted_node", closed=False)


async def test_many_sessions_share_one_step(engine: RecordingEngine, target: Events) -> None:
    prefixes = {i: (i, i + 1, i + 2) for i in range(1, 25)}
    for i, prefix in prefixes.items():
        target.send(target_open(i, prefix, noise=NoiseKey(i)))
    for i in prefixes:
        await target.of(TargetOpened, i)
    steps = len(engine.plans)
    for i, prefix in prefixes.items():
        target.send(first_round(i, prefix), urgent=True)
    verdicts = {i: await target.of(Verdict, i) for i in prefixes}
    assert len(engine.plans) == steps + 1
    for i, prefix in prefixes.items():
        assert verdicts[i].token_ids == (next_token(prefix, NoiseKey(i)),)
        assert verdicts[i].timings.sessions == len(prefixes)


async def test_logprobs_start_with_what_may_be_emitted(target: Events) -> None:
    sampling = SamplingParams(temperature=0.5, top_k=3, logprobs=2)
    target.send(target_open(1, PREFIX, sampling=sampling))
    verdict = await verdict_of(target, first_round(1, PREFIX, chain([9])))
    assert len(verdict.logprobs) == 2
    drawn = verdict.token_ids[0]
    assert verdict.logprobs[0].token_ids[: 1 if drawn == 9 else 2] == tuple(dict.fromkeys((9, drawn)))
    direct = row_logprobs(LAW.logits(PREFIX), (9, drawn), 2)
    assert verdict.logprobs[0].token_ids == direct.token_ids
    assert verdict.logprobs[0].logprobs == pytest.approx(direct.logprobs, abs=1e-5)


async def test_status_tells_sessions_rows_and_steps(target: Events) -> None:
    await target.open(target_open(1, PREFIX))
    status = await target.link.status(5)
    assert (status.sessions, status.steps, status.queue_length) == (1, 1, 0)
    assert status.kv_rows > 0
    assert status.resident_bytes > 1 << 20
    assert status.frames_sent >= 1


async def test_under_rejection_a_repeated_round_must_have_the_same_draft_probabilities(
    engine: RecordingEngine, target: Events
) -> None:
    proposal = Proposal(1, (9,), (0.5,), supports=(SUPPORT,))
    target.send(target_open(1, PREFIX, acceptance=Acceptance.REJECTION))
    verdict = await verdict_of(target, first_round(1, PREFIX, proposal))
    steps = len(engine.plans)
    assert await verdict_of(target, first_round(1, PREFIX, replace(proposal, proposal_id=2))) == verdict
    assert len(engine.plans) == steps
    other = first_round(1, PREFIX, replace(proposal, draft_probabilities=(0.5000002384185791,)))
    await target.expect_failure(other, "PREFIX_MISMATCH", closed=False)
