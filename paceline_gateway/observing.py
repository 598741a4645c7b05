"""What a reply leaves behind for whoever operates the gateway: a span, and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from paceline.protocol.generation import Finished, GenerateRequest, Started, Tokens
from paceline.runtime import genai, metrics, telemetry
from paceline_gateway.caller import HttpCaller
from paceline_gateway.choices import ChoiceEvent


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
