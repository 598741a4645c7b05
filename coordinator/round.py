"""The round, on one screen.

1. take the planned proposal: drafted for this very outcome while the last round was verified, or
   an n-gram match, or drafted just in time, or none
2. the target verifies it; meanwhile the draft service drafts for its likely outcomes
3. the acceptance rule decides
4. commit: the tokens become the truth; the next round is planned from what is there
5. the client gets the text

The client's text never waits for a service that only makes it faster: a draft
that is slow, wrong or dead costs its round the proposal and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from coordinator.drafting import Drafting
from coordinator.sequence import Job, Sequence
from coordinator.stats import StatsBuilder
from coordinator.target_session import TargetSession
from paceline import acceptance
from paceline.telemetry import GenerationTrace
from paceline.types import ROOT, RoundRecord, Tokens

Emit = Callable[[Tokens], Awaitable[None]]


async def run_rounds(
    job: Job,
    sequence: Sequence,
    target: TargetSession,
    drafting: Drafting,
    emit: Emit,
    stats: StatsBuilder,
    trace: GenerationTrace,
) -> None:
    """Run rounds until the sequence has ended.

    Raises:
        PacelineError: the target failed in a way that re-opening can't mend.
    """
    accepted_node = ROOT
    drafting.open(sequence, trace.traceparent)
    while sequence.finish_reason is None:
        begun_ns, clock = time.time_ns(), time.perf_counter()
        round_trace = trace.start_round()
        drafted = await drafting.take()
        sent = time.perf_counter()
        round_, verdict = await target.verify(
            sequence.ids, accepted_node, drafted.proposal, round_trace.traceparent, drafting.verifying
        )
        verified = time.perf_counter()
        decision = acceptance.decide(job.acceptance, round_, verdict, job.noise)
        tokens = sequence.commit(decision, round_.proposal, verdict)
        accepted_node = decision.node
        decided = time.perf_counter()
        record = RoundRecord(
            base_length=round_.base_length,
            round_ms=(decided - clock) * 1e3,
            draft_wait_ms=(sent - clock) * 1e3,
            wire_ms=max(0.0, (verified - sent) * 1e3 - verdict.timings.service_ms),
            target=verdict.timings,
            accept_ms=(decided - verified) * 1e3,
            proposed=max(round_.proposal.depths) if round_.proposal else 0,
            accepted=len(decision.accepted),
            cache_hit=drafted.hit,
            cache_miss=drafted.miss,
            drafter=round_.proposal.drafter if round_.proposal else "",
            draft=drafted.timings,
        )
        path = round_.proposal.path(decision.node) if round_.proposal else ()
        drafting.learn(record, round_.proposal, path)
        if sequence.finish_reason is None:
            outcome = decision.outcome(round_.base_length)
            drafting.commit(outcome, tokens.token_ids, sequence, round_trace.traceparent)
        round_trace.finish(record, begun_ns)
        stats.add(record, len(tokens.token_ids))
        await emit(tokens)
