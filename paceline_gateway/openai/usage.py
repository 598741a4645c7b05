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
    """Counts the events of all choices, for the client.

    Attributes:
        samples: the number of choices of each prompt.
        shows_tokens: whether the tokens are part of the reply.
        seeds: the seeds, by prompt.
    """

    samples: int
    shows_tokens: bool = True
    seeds: dict[int, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    stats: dict[int, GenerationStats] = field(default_factory=dict)

    def add(self, choice: ChoiceEvent) -> None:
        """Count one event; samples of one prompt share its tokens."""
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
        """OpenAI's `usage`.

        Of samples that share a prompt, the first one's cached tokens count, as its prompt does. Rejected prediction
        tokens are no part of the text, so they do not count among the completion's.
        """
        cache_tokens = self._cached_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": None if cache_tokens is None else {"cached_tokens": cache_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": sum(stats.prediction_accepted for stats in self.stats.values()),
                "rejected_prediction_tokens": sum(stats.prediction_rejected for stats in self.stats.values()),
            },
        }

    @property
    def _cached_tokens(self) -> int | None:
        """The cached tokens of all prompts; None: a coordinator does not report them."""
        counts = [stats.cached_prompt_tokens for i, stats in self.stats.items() if i % self.samples == 0]
        numbers = [count for count in counts if count is not None]
        return sum(numbers) if len(numbers) == len(counts) else None

    @property
    def metrics(self) -> dict[str, Any] | None:
        """vLLM's `metrics`, with separate figures of reasoning and answer; None where there are several choices."""
        if len(self.stats) != 1 or self.samples > 1:
            return None
        (stats,) = self.stats.values()
        parts = {"reasoning": stats.reasoning, "answer": stats.answer}
        figures = {name: part_figures(part) for name, part in parts.items() if part is not None}
        return {"speculative_decoding": speculative_decoding(stats), **figures}

    def paceline_object(self, options: PacelineOptions) -> dict[str, Any]:
        """Return the `paceline` object: the seeds, and the optional reports of the rounds."""
        seeds = [self.seeds[prompt] for prompt in sorted(self.seeds)]
        fields: dict[str, Any] = {"seed": seeds[0]} | ({"seeds": seeds} if len(seeds) > 1 else {})
        stats = [self.stats[index] for index in sorted(self.stats)]
        if options.explain:
            explanations = [choice.explanation and asdict(choice.explanation) for choice in stats]
            fields["explanation"] = _one_or_all(explanations)
        if options.rounds:
            fields["rounds"] = _one_or_all([rounds_json(choice.records) for choice in stats])
        return fields


class ReplyMeter:
    """Counts the events of all choices, for the operator; each choice is one request."""

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
def observe_reply(
    caller: HttpCaller, requests: Sequence[GenerateRequest], operation: str, samples: int
) -> Iterator[ReplyMeter]:
    """Yield the reply's meter; calls of coordinators within this context belong to the reply's span."""
    model = requests[0].model
    attributes = genai.request_attributes(requests[0], model, operation)
    choices = dict(attributes) | {"gen_ai.request.choice.count": len(requests) * samples}
    with ExitStack() as stack:
        stack.enter_context(telemetry.start_request(genai.span_name(operation, model), caller.trace_headers, choices))
        meters = [stack.enter_context(metrics.RequestMeter()) for _ in range(len(requests) * samples)]
        yield ReplyMeter(meters, operation)


def speculative_decoding(stats: GenerationStats) -> Mapping[str, Any]:
    """Write figures in vLLM's shape.

    `acceptance_histogram[j]` counts the rounds that accepted j of at most `num_spec_tokens`.
    """
    histogram: Sequence[int] = stats.acceptance_histogram
    return {
        **_figures(stats),
        "acceptance_histogram": [*histogram, *[0] * (stats.num_spec_tokens + 1 - len(histogram))],
        "num_spec_tokens": stats.num_spec_tokens,
    }


def part_figures(part: RoundStats) -> Mapping[str, Any]:
    """Write the figures of the rounds of reasoning, or of the answer, with their speed."""
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
    """Return the only value, or the list of several."""
    return values[0] if len(values) == 1 else list(values)
