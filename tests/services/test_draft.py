"""The draft service over real gRPC: what it proposes, when, and what it keeps computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, DraftOpened
from paceline.protocol.proposal import ROOT, Outcome
from paceline.protocol.sampling import SamplingParams
from paceline.protocol.session import Close
from tests.services.expected import next_token, own_tokens
from tests.services.harness import LAW, Events, RecordingEngine, draft_open, eventually, linked_draft

PREFIX = (1, 2, 3, 4, 5)
OWN = own_tokens(PREFIX, 20)
K4 = DraftBudget(max_tokens=4)


def commit_of(
    session_id: int, text: Sequence[int], node: int, tokens: Sequence[int], budget: DraftBudget = K4
) -> Commit:
    outcome = Outcome(len(text) - 1, node, tokens[-1])
    return Commit(session_id, outcome, tuple(tokens), len(text), budget)


async def test_a_coupled_chain_of_the_targets_own_model_is_the_targets_own_text(draft: Events) -> None:
    opened = await draft.answer(draft_open(1, PREFIX, K4), DraftOpened)
    drafted = await draft.of(DraftedProposal, 1)
    assert (opened.drafter, drafted.outcome) == ("model", None)
    for at in range(0, 20, 5):
        assert drafted.proposal.token_ids == tuple(OWN[at : at + 4])
        assert all(0 < q <= 1 for q in drafted.proposal.draft_probabilities)
        commit = commit_of(1, [*PREFIX, *OWN[:at]], 3, OWN[at : at + 5])
        drafted = await draft.answer(commit, DraftedProposal)
        assert drafted.outcome == commit.outcome
    assert drafted.timings.service_ms >= drafted.timings.queue_ms + drafted.timings.forward_ms


@pytest.mark.parametrize(
    ("node", "tokens", "computed"),
    [(1, (*OWN[:2], 31), 1), (3, tuple(OWN[:5]), 2)],
    ids=["two of four, and a token that was not drafted", "all of four: the last has no row yet"],
)
async def test_accepted_rows_are_not_computed_again(
    node: int, tokens: tuple[int, ...], computed: int, engine: RecordingEngine, draft: Events
) -> None:
    await draft.proposal(draft_open(1, PREFIX, K4))
    engine.plans.clear()
    proposal = await draft.proposal(commit_of(1, PREFIX, node, tokens))
    assert proposal.token_ids == tuple(own_tokens((*PREFIX, *tokens), 4))
    first = engine.plans[0].items[0]
    assert (first.base_length, first.token_ids) == (len(PREFIX) + len(tokens) - computed, tokens[-computed:])


async def test_a_tree_holds_the_targets_path_and_is_compacted(engine: RecordingEngine, draft: Events) -> None:
    budget = DraftBudget(max_tokens=3, tree_widths=(3, 2))
    tree = await draft.proposal(draft_open(1, PREFIX, budget))
    assert tree.depths == (1,) * 3 + (2,) * 6 + (3,) * 6
    paths = {tuple(tree.token_ids[i] for i in tree.path(node)) for node in range(len(tree))}
    assert tuple(OWN[:3]) in paths
    # The path through the second child is what was committed: its rows move.
    leaf = next(n for n in range(len(tree)) if tree.depths[n] == 2 and tree.path(n)[0] == 1)
    path = [tree.token_ids[i] for i in tree.path(leaf)]
    engine.plans.clear()
    proposal = await draft.proposal(commit_of(1, PREFIX, leaf, [*path, 30], budget))
    first = engine.plans[0].items[0]
    assert first.kept_rows == tuple(len(PREFIX) + node for node in tree.path(leaf))
    assert first.token_ids == (30,)
    assert proposal.token_ids[0] == next_token([*PREFIX, *path, 30])


async def test_a_commit_during_drafting_ends_it(engine: RecordingEngine, draft: Events) -> None:
    await engine.hold(draft, draft_open(1, PREFIX, DraftBudget(max_tokens=40)))
    commit = commit_of(1, PREFIX, ROOT, OWN[:1])
    await draft.handled(commit)
    engine.go.set()
    drafted = await draft.of(DraftedProposal, 1)
    assert drafted.outcome == commit.outcome
    assert drafted.proposal.token_ids == tuple(OWN[1:5])
    assert len(engine.plans) <= 1 + 4


async def test_at_the_deadline_what_is_drafted_is_sent() -> None:
    engine = RecordingEngine()
    long = tuple(i % 32 for i in range(180))
    async with linked_draft(engine, prefill_chunk=4) as events:
        await engine.hold(events, draft_open(1, long, DraftBudget(max_tokens=8, deadline_ms=100)))
        # The step in progress outlasts the deadline by far.
        await asyncio.to_thread(engine.go.wait, 0.15)
        engine.go.set()
        assert len((await events.of(DraftedProposal, 1)).proposal) == 0
        assert len(engine.plans) < len(long) // 4
        proposal = await events.proposal(commit_of(1, long, ROOT, [7]))
    assert proposal.token_ids == tuple(own_tokens((*long, 7), 4))


async def test_sessions_draft_together_and_a_long_prefix_delays_nobody_by_more_than_a_chunk() -> None:
    engine = RecordingEngine()
    prefixes = {i: (i, i + 1) for i in range(2, 8)} | {8: tuple(i % 32 for i in range(200))}
    async with linked_draft(engine, prefill_chunk=8) as events:
        await engine.hold(events, draft_open(1, PREFIX, K4))
        await events.handled(*(draft_open(i, prefix, K4) for i, prefix in prefixes.items()))
        engine.go.set()
        for i, prefix in prefixes.items():
            assert (await events.of(DraftedProposal, i)).proposal.token_ids == tuple(own_tokens(prefix, 4))
    assert max(len(item.token_ids) for plan in engine.plans for item in plan.items) <= 8
    assert max(len(plan.items) for plan in engine.plans) >= 7


async def test_greedy_drafts_the_most_probable_token(draft: Events) -> None:
    greedy = SamplingParams(temperature=0.0)
    proposal = await draft.proposal(draft_open(1, PREFIX, DraftBudget(max_tokens=1), sampling=greedy))
    assert proposal.token_ids == (int(LAW.logits(PREFIX).argmax()),) == (next_token(PREFIX, sampling=greedy),)
    # How sure it is, which a point mass would not tell: no rule looks at q under coupled acceptance.
    logits = LAW.logits(PREFIX).astype(np.float64)
    assert proposal.draft_probabilities == pytest.approx((1 / np.exp(logits - logits.max()).sum(),))


@pytest.mark.parametrize(
    ("prefix", "changes", "text"),
    [
        (PREFIX, {"drafter": "oracle"}, "drafter = 'oracle': must be one of: model"),
        ((1, 40), {}, "token_ids = 40"),
        ((1,) * 257, {}, "prefix length = 257: must be at most 256"),
    ],
)
async def test_an_open_that_cannot_be_served(
    prefix: tuple[int, ...], changes: dict[str, Any], text: str, draft: Events
) -> None:
    await draft.expect_failure(draft_open(1, prefix, K4, **changes), "INVALID_INPUT", text, closed=True)
    await still_drafts(draft)


async def test_closing_and_cut_links_free_everything(engine: RecordingEngine, draft: Events) -> None:
    status = draft.servicer.status
    async with draft.another() as cut:
        for i in range(1, 5):
            await cut.proposal(draft_open(i, PREFIX, K4))
    await draft.proposal(draft_open(1, PREFIX, K4))
    await eventually(lambda: status().sessions == 1, "the cut link's sessions are gone")
    draft.send(Close(1))
    await eventually(lambda: engine.kv_rows == 0, "all rows are free")
    assert status().frames_sent > 0
    await still_drafts(draft)


async def test_sessions_beyond_the_limit_are_overloaded() -> None:
    async with linked_draft(RecordingEngine(), max_num_seqs=1) as events:
        events.send(draft_open(1, PREFIX, K4))
        assert (await events.expect_failure(draft_open(2, PREFIX, K4), "OVERLOADED", closed=True)).retry_after_ms


async def still_drafts(events: Events) -> None:
    assert (await events.proposal(draft_open(77, PREFIX, K4))).token_ids == tuple(OWN[:4])
