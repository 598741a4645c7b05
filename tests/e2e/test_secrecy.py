"""No log and no span of any service has a key, a prompt or a text in it, also where something goes wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from paceline.access.keys import hash_of, new_key
from paceline.client import (
    ChatMessage,
    Client,
    GenerateRequest,
    Generation,
    Grammar,
    GrammarKind,
    PacelineError,
    SamplingParams,
)
from tests.e2e.cluster import Cluster
from tests.e2e.keys import write_keys
from tests.rpc.otlp import Receiver, otlp_receiver

ROOT = Path(__file__).resolve().parents[2]
MODEL = "table:vocab=300,seed=1"
MARKER = "Rumpelstilzchen"
KEY, WRONG_KEY = new_key(), new_key()
VERBOSE = """
import logging
logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s %(message)s")
logging.getLogger("numba").setLevel(logging.INFO)  # shows every instruction that it compiles
"""
TELLING = """
from paceline.protocol import errors
errors.PacelineError.for_log = property(lambda error: error.message)
"""
"""The control: errors are logged with the values that they refuse."""


def asked() -> Iterator[GenerateRequest]:
    """Requests with the marker wherever a client can put text; some are refused, here or at the target."""
    whole = partial(GenerateRequest, max_new_tokens=24, seed=3, ignore_eos=True)
    yield whole(prompt=f"Once {MARKER} said")
    yield whole(messages=(ChatMessage("user", MARKER),))
    yield whole(prompt=MARKER, stop=(MARKER,))
    yield GenerateRequest(prompt=MARKER, model=MARKER)
    yield GenerateRequest(prompt=MARKER * 100_000)
    for kind in GrammarKind:
        text = f'{{"type": "{MARKER}"}}' if kind is GrammarKind.JSON_SCHEMA else f"({MARKER}["
        yield GenerateRequest(prompt="x", sampling=SamplingParams(grammar=Grammar(kind, text)), max_new_tokens=4)
    grammar = Grammar(GrammarKind.REGEX, f"{MARKER}.*")
    yield GenerateRequest(prompt="x", sampling=SamplingParams(grammar=grammar), max_new_tokens=24)


def run(folder: Path, endpoint: str, bootstrap: str, *drafters: str) -> tuple[str, list[Generation]]:
    """Send the requests to services that log everything; returns their logs, and what they generated."""
    (folder / "boot").mkdir(parents=True)
    (folder / "boot" / "sitecustomize.py").write_text(bootstrap)
    write_keys(folder / "keys.json", {"alice": KEY})
    environment = {"PYTHONPATH": f"{folder / 'boot'}:{ROOT}", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    cluster = Cluster(
        folder / "cluster",
        MODEL,
        drafters,
        coordinator_flags={"api_keys": str(folder / "keys.json")},
        environment=environment,
    )
    cluster.api_key = KEY
    generations: list[Generation] = []
    with cluster:
        for request in asked():
            with Client(cluster.address, api_key=KEY, timeout_s=30) as client, contextlib.suppress(PacelineError):
                generations.append(client.generate(request))
        with Client(cluster.address, api_key=WRONG_KEY) as client, pytest.raises(PacelineError):
            client.generate(prompt=MARKER)
    return "".join(process.log_file.read_text() for process in cluster.processes.values()), generations


def test_nothing_that_a_client_sends_or_gets_is_logged_or_traced(tmp_path: Path) -> None:
    with otlp_receiver() as (receiver, endpoint):
        log, generations = run(tmp_path, endpoint, VERBOSE, f"model:{MODEL}")
    spans = shown(receiver)
    assert len(generations) >= 4
    assert "DEBUG" in log
    assert "session failed" in log, "a grammar was refused at the target"
    assert {service for service, _ in receiver.spans} >= {"paceline-coordinator"}
    secrets = [MARKER, KEY, WRONG_KEY, KEY.removeprefix("pl-"), hash_of(WRONG_KEY)]
    for generation in generations:
        ids = (generation.prompt_token_ids, generation.token_ids)
        secrets += [generation.text, *(listed(token_ids) for token_ids in ids if len(token_ids) >= 4)]
    for secret in secrets:
        assert len(secret) >= 8, "what is short is found anywhere"
        assert secret not in log
        assert secret not in spans


def test_an_error_logged_whole_would_tell(tmp_path: Path) -> None:
    with otlp_receiver() as (receiver, endpoint):
        log, _ = run(tmp_path, endpoint, VERBOSE + TELLING)
    assert MARKER in log
    assert MARKER in shown(receiver)


def listed(token_ids: tuple[int, ...]) -> str:
    """The first ids as any list of them is shown."""
    return ", ".join(map(str, token_ids[:4]))


def shown(receiver: Receiver) -> str:
    return "\n".join(f"{service} {span}" for service, span in receiver.spans)
