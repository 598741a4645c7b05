"""The committed tokens of one request: the only truth, from which every cache is rebuilt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.text.detokenizer import Detokenizer
from paceline.models.reasoning import ReasoningMarks
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import ProtocolMismatch
from paceline.protocol.generation import FinishReason, Provenance, SpeculationSettings, Tokens
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import MAX_TIME_LEFT_MS, SessionSpec
from paceline.protocol.target import RowLogprobs, Verdict
from paceline.runtime import clock
from paceline.sampling.acceptance import Decision


@dataclass(frozen=True)
class GenerationTask:
    """A checked request: everything that its rounds depend on."""

    prompt: tuple[int, ...]
    resume_token_ids: tuple[int, ...]
    sampling: SamplingParams
    noise: NoiseKey
    acceptance: Acceptance
    max_length: int
    max_rows: int
    """KV rows that the target reserves for the request, proposals included; at least `max_length`."""
    stop: tuple[str, ...]
    eos_token_ids: frozenset[int]
    speculation: SpeculationSettings
    deadline: float | None = None
    """On the monotonic clock, seconds."""
    tenant: str = ""
    """As `SessionSpec.tenant`."""
    prompt_logprobs: int | None = None
    """As `GenerateRequest.prompt_logprobs`."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the text as the model's end tokens do; their own text is no part of it."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every token that ends the text."""
        return self.eos_token_ids | self.stop_token_ids

    prediction: tuple[int, ...] = ()
    """Tokens that the client expects as output; empty: none."""

    @property
    def time_left_ms(self) -> int | None:
        """Milliseconds to the client's deadline, in [1, `MAX_TIME_LEFT_MS`]; None: it set none."""
        if self.deadline is None:
            return None
        return max(1, int(min((self.deadline - clock.now()) * 1e3, MAX_TIME_LEFT_MS)))

    def spec(self, committed: Iterable[int], traceparent: str) -> SessionSpec:
        """The specification of a service's session that goes on behind the committed tokens."""
        return SessionSpec(
            token_ids=tuple(committed),
            prompt_length=len(self.prompt),
            sampling=self.sampling,
            noise=self.noise,
            acceptance=self.acceptance,
            time_left_ms=self.time_left_ms,
            traceparent=traceparent,
            max_length=self.max_length,
            end_token_ids=tuple(sorted(self.end_token_ids)),
            tenant=self.tenant,
        )


class Sequence:
    """Prompt and committed output, the text they make, and whether it has ended."""

    def __init__(self, task: GenerationTask, tokenizer: Tokenizer, marks: ReasoningMarks | None = None) -> None:
        self._task = task
        self._span = None if marks is None else marks.follow(task.prompt)
        self._detokenizer = Detokenizer(tokenizer, task.prompt, task.stop)
        self.ids: list[int] = list(task.prompt)
        self.finish_reason: FinishReason | None = None
        for token_id in task.resume_token_ids:
            self._append(token_id)

    @property
    def reasoning(self) -> bool:
        """Whether the next token stands inside a span of reasoning."""
        return self._span is not None and self._span.is_open

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self._task.max_length - len(self.ids)

    @property
    def rows_left(self) -> int:
        """Most nodes that the target has KV rows for behind the last committed token."""
        return self._task.max_rows - len(self.ids)

    def commit(self, decision: Decision, proposal: Proposal | None, verdict: Verdict) -> Tokens:
        """Append a decision's tokens, up to the first that ends the text."""
        provenance = (Provenance.ACCEPTED,) * len(decision.accepted) + (decision.provenance,)
        text, ends = "", list[int]()
        for token_id in decision.committed:
            text += self._append(token_id)
            ends.append(len(text))
            if self.finish_reason is not None:
                break
        logprobs = _emitted_logprobs(decision, proposal, verdict, self._task.sampling)
        count = len(ends)
        replaced_ids = _replaced_ids(decision, proposal) if count == len(provenance) else ()
        return Tokens(
            decision.committed[:count], text, provenance[:count], logprobs[:count], tuple(ends), replaced_ids
        )

    def flush(self) -> str:
        """The text that was held back, once the sequence has ended."""
        return self._detokenizer.flush()

    def _append(self, token_id: int) -> str:
        self.ids.append(token_id)
        if self._span is not None:
            self._span.see(token_id)
        output_length = len(self.ids) - len(self._task.prompt)
        stops = token_id in self._task.stop_token_ids
        may_stop = output_length > self._task.sampling.min_tokens
        text = "" if stops else self._detokenizer.push(token_id, may_stop=may_stop)
        if stops or self._detokenizer.stopped or token_id in self._task.eos_token_ids:
            self.finish_reason = FinishReason.STOP
        elif self.room <= 0:
            self.finish_reason = FinishReason.LENGTH
        return text


def _replaced_ids(decision: Decision, proposal: Proposal | None) -> tuple[int, ...]:
    """The first proposed token in whose place a token was recovered; nothing where none was."""
    if proposal is None or decision.provenance is not Provenance.RECOVERED:
        return ()
    return (proposal.token_ids[proposal.parents.index(decision.node)],)


def _emitted_logprobs(
    decision: Decision, proposal: Proposal | None, verdict: Verdict, sampling: SamplingParams
) -> tuple[RowLogprobs, ...]:
    """One entry for each committed token: the token itself first, then the most probable ones.

    A node's log-probability is in its parent's row; row 0 is the root's.
    """
    if sampling.logprobs is None:
        return ()
    path = proposal.path(decision.node) if proposal else ()
    rows = (0, *(node + 1 for node in path))
    return tuple(
        _own_first(verdict.logprobs[row], token_id, sampling.logprobs)
        for row, token_id in zip(rows, decision.committed, strict=True)
    )


def _own_first(row: RowLogprobs, token_id: int, top: int) -> RowLogprobs:
    """A row with its own token first. The row has the n most probable tokens of the vocabulary, each once.

    Raises:
        ProtocolMismatch: the row lacks the token itself.
    """
    if token_id not in row.token_ids:
        raise ProtocolMismatch(f"the target sent no log-probability of token {token_id}, which it let in")
    entries = sorted(zip(row.token_ids, row.logprobs, strict=True), key=lambda entry: -entry[1])[:top]
    own_logprob = row.logprobs[row.token_ids.index(token_id)]
    return RowLogprobs(
        (token_id, *(each for each, _ in entries)), (own_logprob, *(logprob for _, logprob in entries))
    )
