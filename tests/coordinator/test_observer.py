"""What a request leaves in the log."""

from __future__ import annotations

import logging

import pytest

from coordinator.observer import MAX_ID_CHARACTERS, RequestObserver
from paceline.models.tokenizer import TableTokenizer, Tokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.records import GenerationStats
from paceline.runtime.logs import OneLine
from tests.coordinator.requests import task_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TOKENIZER = TableTokenizer(300, None)
PROMPT = TOKENIZER.encode("Rumpelstilzchen")
STATS = GenerationStats(
    rounds=4, committed=9, tokens_per_second=50.0, num_draft_tokens=8, num_accepted_draft_tokens=5
)


@pytest.fixture(autouse=True)
def as_services_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(OneLine())
    caplog.set_level(logging.INFO)


def observe(given_id: str, tokenizer: Tokenizer | None = None) -> None:
    with RequestObserver(given_id, tokenizer) as observer:
        observer.begin(task_of(prompt=tuple(PROMPT), tenant="alice"), chat=False)
        with observer.in_trace(f"00-{TRACE}-00f067aa0ba902b7-01"):
            logging.getLogger("coordinator.sessions").info("draft is late: session=%d", 3)
        observer.done(STATS, "stop", None)


def test_a_request_has_one_line_with_whose_it_was_and_how_it_went(caplog: pytest.LogCaptureFixture) -> None:
    observe("from-the-client")
    late, done = caplog.text.splitlines()
    assert f"session=3 request=from-the-client trace={TRACE}" in late
    for fact in ("tenant=alice", f"trace={TRACE}", "tokens=9", "tokens_per_second=50.0", "rounds=4", "reason=stop"):
        assert f" {fact} " in f"{done} "
    assert "accepted_per_round=1.25 proposed_per_round=2.00" in done
    assert done.endswith("request=from-the-client")


@pytest.mark.parametrize(("tokenizer", "shown"), [(None, False), (TOKENIZER, True)], ids=["unasked", "asked"])
def test_a_prompt_is_logged_only_where_asked_for(
    tokenizer: Tokenizer | None, shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    observe("", tokenizer)
    assert ("prompt=Rumpelstilzchen" in caplog.text) is shown


def test_a_failed_request_says_why_without_what_it_brought(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidInput), RequestObserver("x" * 10_000, None):
        raise InvalidInput.of("stop string", "Rumpelstilzchen", "shorter")
    (line,) = caplog.text.splitlines()
    assert "request failed: tenant=" in line
    assert "reason=INVALID_INPUT error=stop string was refused" in line
    assert "Rumpelstilzchen" not in line
    assert line.endswith(f"request={'x' * MAX_ID_CHARACTERS}")
