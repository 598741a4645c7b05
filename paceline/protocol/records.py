"""Where the time of steps, rounds and generations went."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.explanation import PlanExplanation

MAX_RECORDS = 4096
"""Most rounds of one generation whose records a client gets: the first ones."""


@dataclass(frozen=True)
class StepTimings:
    """Durations of one answer on the service's own clock; `service_ms` includes the other three.

    `rows` and `sessions` are the whole step's; `prefix_rows` are those that compute prefixes of opening sessions.
    """

    queue_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    service_ms: float = 0.0
    rows: int = 0
    sessions: int = 0
    prefix_rows: int = 0


@dataclass(frozen=True)
class RoundRecord:
    """Where one round's time went; draft_wait + wire + target.service + accept = round_ms.

    Of a self-started round `round_ms` is the time between two verdicts. The target's part began with
    the first of them, so the parts exceed the round by how late that one was.
    """

    base_length: int
    round_ms: float
    draft_wait_ms: float
    wire_ms: float
    target: StepTimings
    accept_ms: float
    proposed: int
    accepted: int
    cache_hit: bool
    drafter: str = ""
    draft: StepTimings = StepTimings()
    cache_miss: bool = False
    self_started: bool = False
    begun_ms: float = 0.0
    """From the request's arrival; 0 from a coordinator that does not say it."""
    feature_bytes: int = 0
    """Of the target's hidden states of generated tokens that came since the round before."""
    reasoning: bool = False
    """Whether the round's first token stands in a span of reasoning that was open before."""
    mode: str = ""
    """What its group let it do (`GroupReport.mode`); empty: the request fixes its drafts, or an older coordinator."""


@dataclass(frozen=True)
class RoundStats:
    """What rounds of a generation did together; names follow what load tools read from vLLM."""

    rounds: int = 0
    committed: int = 0
    tokens_per_second: float = 0.0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted ÷ steps that carried a proposal; 1 if none did."""
        return 1 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted ÷ proposed; 0 if nothing was proposed."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)


@dataclass(frozen=True)
class GenerationStats(RoundStats):
    """Statistics of all rounds of one generation.

    `explanation`: only where the request asked for it, of a coordinator that can say it.
    `prediction_accepted`, `prediction_rejected`: of the proposed tokens, those of the request's prediction.
    `cached_prompt_tokens`: of the prompt's tokens, those that the target had in its prefix cache; None: not told.
    `feature_bytes`: of the target's hidden states that came for the drafter, the prompt's included.
    `reasoning`, `answer`: the rounds that began inside and outside spans of reasoning; None: none began inside.
    """

    cache_hits: int = 0
    cache_misses: int = 0
    time_to_first_token_ms: float = 0.0
    verify_ms_p50: float = 0.0
    draft_wait_ms_p50: float = 0.0
    acceptance_histogram: tuple[int, ...] = ()
    num_spec_tokens: int = 0
    records: tuple[RoundRecord, ...] = ()
    explanation: PlanExplanation | None = None
    prediction_accepted: int = 0
    prediction_rejected: int = 0
    cached_prompt_tokens: int | None = None
    feature_bytes: int = 0
    reasoning: RoundStats | None = None
    answer: RoundStats | None = None
