"""The official clients, streaming and not, against the real model: every text is the one that gRPC gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.client import ChatMessage, Client
from paceline.local.supervisor import SupervisedServices
from tests.compat.harness import (
    SCRIPTS,
    HarnessReport,
    http_url,
    node_environment,
    node_versions,
    python_environment,
    python_versions,
    run,
    served,
)

MODEL = "smollm2-135m"
PROMPT = "Name three rivers of Europe, and say of each where it rises."
TOKENS, SEED = 48, 11
NODE_PACKAGES = ("openai@7.55.0", "@anthropic-ai/sdk@1.12.0")
NODE_NAMES = [package.rpartition("@")[0] for package in NODE_PACKAGES]
PYTHON_PACKAGES = ("openai==3.54.0", "anthropic==2.12.0")
CALLS_S = 200.0


def expected(services: SupervisedServices) -> dict[str, str]:
    """The texts over gRPC, by what is asked for."""
    with Client(services.address) as client:
        settings: dict[str, Any] = {"seed": SEED, "max_new_tokens": TOKENS}
        chat = client.generate(messages=[ChatMessage("user", PROMPT)], **settings)
        completion = client.generate(prompt=PROMPT, **settings)
    return {"chat": chat.text, "completion": completion.text}


def check(said: str, texts: Mapping[str, str]) -> list[str]:
    """Hold a script's lines of JSON, `{"call", "kind", "text"}`, against the texts over gRPC."""
    calls: Sequence[dict[str, str]] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len({call["call"] for call in calls}) == len(calls) > 0, "no call twice, and one at least"
    for call in calls:
        text = texts[call["kind"]]
        assert call["text"] == text, f"{call['call']}: {call['text']!r} instead of {text!r}"
    return [f"{call['call']}: {len(call['text'])} characters, equal to gRPC's" for call in calls]


def official_clients() -> list[HarnessReport]:
    """Python's and Node's."""
    python = python_environment("clients", *PYTHON_PACKAGES)
    node = node_environment("node", *NODE_PACKAGES)
    script = node / "clients.mjs"
    script.write_text((SCRIPTS / "clients.mjs").read_text())  # where Node looks for packages
    reports = []
    with served(MODEL) as services:
        texts = expected(services)
        asked = [http_url(services), MODEL, PROMPT, TOKENS, SEED]
        programs: Sequence[tuple[str, str | Path, Path, Mapping[str, str]]] = (
            ("clients in Python", python / "python", SCRIPTS / "clients_in_python.py", python_versions(python)),
            ("clients in Node", "node", script, node_versions(node, NODE_NAMES)),
        )
        for name, program, called, versions in programs:
            lines = check(run([program, called, *asked], CALLS_S), texts)
            command = f"{Path(program).name} {called.name} URL {MODEL} …"
            reports.append(HarnessReport(name, "passed", versions, [command], lines))
    return reports
