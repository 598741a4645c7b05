"""What a reply's generations are counted as.

The client is told usage, speculation in vLLM's shape, and the `paceline` object. The operator has a span and metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.protocol.generation import Finished, GenerateRequest, Started, Tokens
from paceline.protocol.records import GenerationStats, RoundStats
from paceline.runtime import genai, metrics, telemetry
from paceline.timeline.saved import rounds_json
from paceline_gateway.openai.choices import ChoiceEvent
from paceline_gateway.openai.types import PacelineOptions
from paceline_gateway.upstream.caller import HttpCaller


@dataclass
class Tally:
    """Counts what the events of all choices say.

    Attributes:
        samples: choices of each prompt.
        shows_tokens: whether the tokens are part of the reply.
        seeds: in force, by prompt.
    """

    samples: int
    shows_tokens: bool = True
    seeds: dict[int, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    stats: dict[int, GenerationStats] = field(default_factory=dict)

    def add(self, choice: ChoiceEvent) -> None:
        """Take one event in. Samples of one prompt share its tokens."""
        event, prompt = choice.event, choice.index // self.samples
        if isinstance(event, Started) and prompt not in self.seeds:
            self.seeds[prompt] = event.seed
            self.prompt_tokens += len(event.prompt_token_ids)
        elif isinstance(event, Tokens):
            self.completion_tokens += len(event.token_ids) * self.shows_tokens
        elif isinstance(event, Finished):
            self.stats[choice.index] = event.stats

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`. Of samples that share a prompt, the first one's cached tokens count, as its prompt does.

        Rejected prediction tokens are no part of the text, so they are not counted among the completion's.
        """
        cached = self._cached_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": sum(each.prediction_accepted for each in self.stats.values()),
                "rejected_prediction_tokens": sum(each.prediction_rejected for each in self.stats.values()),
            },
        }

    @property
    def _cached_tokens(self) -> int | None:
        """Of all prompts; None: a coordinator does not say it."""
        told = [stats.cached_prompt_tokens for i, stats in self.stats.items() if i % self.samples == 0]
        known = [tokens for tokens in told if tokens is not None]
        return sum(known) if len(known) == len(told) else None

    @property
    def metrics(self) -> dict[str, Any] | None:
        """vLLM's `metrics`, and parts apart where some was reasoning; None where there are several choices."""
        if len(self.stats) != 1 or self.samples > 1:
            return None
        (stats,) = self.stats.values()
        parts = {"reasoning": stats.reasoning, "answer": stats.answer}
        told = {name: part_figures(part) for name, part in parts.items() if part is not None}
        return {"speculative_decoding": speculative_decoding(stats), **told}

    def told(self, asked: PacelineOptions) -> dict[str, Any]:
        """The `paceline` object: seeds, and what was asked for of how the rounds went."""
        seeds = [self.seeds[prompt] for prompt in sorted(self.seeds)]
        shown: dict[str, Any] = {"seed": seeds[0]} | ({"seeds": seeds} if len(seeds) > 1 else {})
        stats = [self.stats[index] for index in sorted(self.stats)]
        if asked.explain:
            shown["explanation"] = _one_or_all([each.explanation and asdict(each.explanation) for each in stats])
        if asked.rounds:
            shown["rounds"] = _one_or_all([rounds_json(each.records) for each in stats])
        return shown


class ReplyMeter:
    """Counts each choice of a reply as one request."""

    def __init__(self, choices: Sequence[metrics.RequestMeter], operation: str) -> None:
        self._choices = choices
        self._operation = operation

    def take(self, choice: ChoiceEvent) -> None:
        """Count one event."""
        meter, event = self._choices[choice.index], choice.event
        if isinstance(event, Started):
            meter.asks(len(event.prompt_token_ids), chat=self._operation == genai.CHAT)
        elif isinstance(event, Tokens):
            meter.first_token()
        elif isinstance(event, Finished):
            meter.take_rounds(event.stats.records)
            meter.done(event.stats, event.reason.value)


@contextmanager
def observed(
    caller: HttpCaller, requests: Sequence[GenerateRequest], operation: str, samples: int
) -> Iterator[ReplyMeter]:
    """Within it, calls of coordinators belong to the reply's span."""
    model = requests[0].model
    attributes = genai.request_attributes(requests[0], model, operation)
    choices = dict(attributes) | {"gen_ai.request.choice.count": len(requests) * samples}
    with ExitStack() as stack:
        stack.enter_context(telemetry.start_request(genai.span_name(operation, model), caller.trace_headers, choices))
        meters = [stack.enter_context(metrics.RequestMeter()) for _ in range(len(requests) * samples)]
        yield ReplyMeter(meters, operation)


def speculative_decoding(stats: GenerationStats) -> Mapping[str, Any]:
    """vLLM's shape: `acceptance_histogram[j]` counts the rounds that accepted j of at most `num_spec_tokens`."""
    histogram: Sequence[int] = stats.acceptance_histogram
    return {
        **_figures(stats),
        "acceptance_histogram": [*histogram, *[0] * (stats.num_spec_tokens + 1 - len(histogram))],
        "num_spec_tokens": stats.num_spec_tokens,
    }


def part_figures(part: RoundStats) -> Mapping[str, Any]:
    """The rounds of reasoning, or of the answer: the same figures, and how fast they were."""
    return {
        **_figures(part),
        "rounds": part.rounds,
        "tokens": part.committed,
        "tokens_per_second": part.tokens_per_second,
    }


def _figures(stats: RoundStats) -> Mapping[str, Any]:
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "num_spec_steps": stats.num_spec_steps,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
    }


def _one_or_all(values: Sequence[Any]) -> Any:
    """One choice's value as it is; of several a list."""
    return values[0] if len(values) == 1 else list(values)
