"""The round, on one screen.

1. take the planned proposal: drafted for this very outcome while the last round was verified, or
   an n-gram match, or drafted just in time, or none
2. the target verifies it; meanwhile the draft service drafts for its likely outcomes. What it has
   is prefetched to the target, which starts the next round by itself if the outcome is one of these.
   A round without a proposal may carry a lease: the target starts the next rounds by itself
3. the acceptance rule decides
4. commit: the tokens become the truth; the next round is planned from what is there and leaves
5. after it, while the target works: the draft service hears of the commit, the client gets the text

The client's text never waits for a service that only makes it faster: a draft
service that is slow, wrong or dead costs a round its proposal and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from coordinator.drafting.drafting import Drafting
from coordinator.drafting.prefetch import Prefetching
from coordinator.observer import RequestObserver
from coordinator.sessions.target import TargetSession
from coordinator.stats import StatsBuilder
from coordinator.text.outbox import Outbox
from coordinator.text.sequence import GenerationTask, Sequence
from paceline.protocol.generation import Tokens
from paceline.protocol.proposal import ROOT
from paceline.protocol.records import RoundRecord
from paceline.protocol.target import Round
from paceline.runtime import clock
from paceline.runtime.telemetry import RequestTrace, RoundTrace
from paceline.sampling import acceptance


async def run_rounds(
    task: GenerationTask,
    sequence: Sequence,
    target: TargetSession,
    drafting: Drafting,
    outbox: Outbox,
    stats: StatsBuilder,
    trace: RequestTrace,
    observer: RequestObserver,
) -> None:
    """Run rounds until the sequence has ended.

    Raises:
        PacelineError: the target failed in a way that re-opening can't mend.
    """
    accepted_node, decided_at = ROOT, clock.now()
    follow_ups: list[Callable[[], None]] = []
    prefetching = Prefetching(target, drafting)
    target.on_refused, target.prompt.reader = drafting.on_refused, outbox

    async def on_dispatch(round_: Round) -> None:
        await asyncio.sleep(0)  # the link's writer runs: nothing stands between the round and the wire
        prefetching.watch(drafting.verifying(round_))
        _run_all(follow_ups)

    while sequence.finish_reason is None:
        free_at = clock.now()
        await outbox.has_room()
        began_at = clock.now()
        round_trace = trace.start_round()
        drafted = await drafting.take(partial(_run_all, follow_ups), trace.traceparent)
        sent_at = clock.now()
        lease = min(drafted.lease, outbox.room)
        try:
            answer = await target.verify(
                sequence.ids,
                accepted_node,
                drafted.proposal,
                lease,
                round_trace.traceparent,
                on_dispatch,
                drafting=drafted.drafts_ahead,
            )
        finally:
            prefetching.end()
        verified_at = clock.now()
        if answer.self_started:
            began_at = sent_at = decided_at + (began_at - free_at)  # it started with the verdict before it
        round_, verdict = answer.round_, answer.verdict
        decision = acceptance.decide(task.acceptance, round_, verdict, task.noise)
        reasoning = sequence.reasoning
        tokens = sequence.commit(decision, round_.proposal, verdict)
        accepted_node = decision.node
        decided_at = clock.now()
        record = RoundRecord(
            base_length=round_.base_length,
            round_ms=(decided_at - began_at) * 1e3,
            draft_wait_ms=(sent_at - began_at) * 1e3,
            wire_ms=max(0.0, (verified_at - sent_at) * 1e3 - verdict.timings.service_ms),
            target=verdict.timings,
            accept_ms=(decided_at - verified_at) * 1e3,
            proposed=max(round_.proposal.depths) if round_.proposal else 0,
            accepted=len(decision.accepted),
            cache_hit=drafted.hit and round_.proposal is not None,
            cache_miss=drafted.miss,
            drafter=round_.proposal.drafter if round_.proposal else "",
            draft=drafted.timings,
            self_started=answer.self_started,
            begun_ms=(began_at - stats.arrived_at) * 1e3,
            feature_bytes=target.features.take_generated_bytes(),
            reasoning=reasoning,
            mode=drafted.mode,
        )
        outcome = decision.outcome(round_.base_length)
        goes_on = sequence.finish_reason is None
        target_next = target.next_after(round_, outcome, verdict) if goes_on else None
        drafting.commit(
            record, drafted, round_.proposal, outcome, tokens.token_ids, target_next, round_trace.traceparent
        )
        stats.add(record, len(tokens.token_ids), decided_at)
        if task.speculation.report_rounds and stats.reports_last:
            tokens = replace(tokens, records=(record,))
        follow_ups.append(partial(_follow_up, outbox, tokens, round_trace, record, decided_at))
        follow_ups.append(partial(observer.round_done, record, tokens.provenance))
    _run_all(follow_ups)


def _follow_up(outbox: Outbox, tokens: Tokens, trace: RoundTrace, record: RoundRecord, decided_at: float) -> None:
    """Send a round's tokens to the client and end its span; both can wait until the next round has left."""
    outbox.put(tokens)
    trace.finish(record, decided_at)


def _run_all(follow_ups: list[Callable[[], None]]) -> None:
    while follow_ups:
        follow_ups.pop(0)()
