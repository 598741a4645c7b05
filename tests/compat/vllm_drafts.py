"""vLLM with our draft service behind it: its greedy texts are its own, whatever happens to the draft."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.local.services import LocalServices
from paceline.models.resolve import pulled_path
from tests.chaos.framing import Direction, Frame
from tests.chaos.proxy import Proxy, Wire
from tests.compat.acceptance import MODEL
from tests.compat.harness import SCRIPTS, HarnessReport, python_versions, run
from tests.compat.vllm_client import installed_python

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "vllm_drafts.py"
PROMPTS, TOKENS = 50, 32
TOKENS_ASKED = ("--tokens", TOKENS)
LONGEST_PROMPT = 700
"""Characters; the script's vLLM takes 512 tokens."""
RUN_S = 900.0
LATE_S = 0.1
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
Runs = Mapping[str, Mapping[str, Any]]


def vllm_drafts() -> list[HarnessReport]:
    """Run plain, then with drafts that come late, are served, stopped for a while and killed; compare the texts."""
    python = installed_python()
    install_ours(python)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompts.json").write_text(json.dumps(prompts()))
        plain = ran(python, SCRIPT, folder, "plain", *TOKENS_ASKED, "--runs", "1", "8")
        with LocalServices(folder / "services") as services:
            services.start("draft", "draft", {"target_model": MODEL, "server.port": 0})
            services.await_serving("draft")
            address, pid = services.address_of("draft"), services.processes["draft"].pid
            host, _, port = address.partition(":")
            with Proxy((host, int(port)), Late) as proxy:
                late = ("--draft", proxy.address, "--runs", "slow", "aborted")
                drafted = ran(python, SCRIPT, folder, "late", *TOKENS_ASKED, *late)
            own = ("--draft", address, "--draft-pid", pid, "--runs", "1", "8", "stopped", "killed")
            drafted |= ran(python, SCRIPT, folder, "drafted", *TOKENS_ASKED, *own)
        again = ran(python, SCRIPT, folder, "again", *TOKENS_ASKED, "--runs", "8")["8"]
    command = f"python {SCRIPT} --model {MODEL} --tokens {TOKENS} --draft HOST:PORT"
    lines = [noise(plain["8"], again), *compare(plain, drafted)]
    return [HarnessReport("vllm drafts", "passed", python_versions(python.parent), [command], lines)]


def install_ours(python: Path) -> None:
    """What our tree, which is on the path, needs beside vLLM."""
    needs = [each for each in importlib.metadata.requires("paceline") or () if "extra ==" not in each]
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *needs], RUN_S)


def prompts() -> list[str]:
    """The first of the benchmarks' prompts that are short."""
    files = sorted((ROOT / "paceline_lab/bench/prompts").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row["prompt"] for row in rows if len(row.get("prompt", "")) in range(1, LONGEST_PROMPT)][:PROMPTS]


def ran(python: Path, script: str, folder: Path, name: str, *further: object) -> Any:
    """A script's results; it finds our tree, and packages in the folder."""
    out, spare = folder / f"{name}.json", max(1, (os.cpu_count() or 1) - 1)
    path = os.pathsep.join((str(ROOT), str(folder)))
    environment = os.environ | VLLM | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(spare)}
    options = ["--model", pulled_path(MODEL), "--prompts", folder / "prompts.json", "--out", out]
    run([python, SCRIPTS / script, *options, *further], RUN_S, env=environment)
    return json.loads(out.read_text())


class Late:
    """The tap of a draft whose messages come late."""

    async def pass_on(self, way: Direction, frame: Frame, wire: Wire) -> None:
        """Write it later, and what comes behind it after that."""
        if way is Direction.DOWN:
            await asyncio.sleep(LATE_S)
        await wire.write(frame.raw)


def noise(plain: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    """What the other ratios are read beside."""
    over = settled_over(again, plain)
    return f"plain again, 8 at once, behind all others: {over:.2f} of plain from the third second on"


def settled_over(results: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """A run's speed from the third second on over plain's."""
    return float(results["settled_tokens_per_second"] / (plain["settled_tokens_per_second"] or 1.0))


def compare(plain: Runs, drafted: Runs) -> list[str]:
    """The report's lines.

    Raises:
        AssertionError: a text differs, nothing came from what was drafted ahead, or a session is left at the draft.
    """
    lines = []
    assert any(results["counts"]["hits"] for results in drafted.values()), "no round was drafted ahead"
    for name, results in drafted.items():
        assert results["sessions_left"] == 0, f"{name}: {results['sessions_left']} sessions are left at the draft"
        if name == "aborted":
            lines.append(f"{name}: 1,000 requests, and no session is left at the draft")
            continue
        own, counts = plain.get(name, plain["8"]), results["counts"]
        differing = sum(a != b for a, b in zip(own["ids"], results["ids"], strict=True))
        assert not differing, f"{name}: {differing} of {PROMPTS} differ"
        lines.append(
            f"{name}: {len(own['ids'])} texts equal; {counts['hits']} of {counts['rounds']} rounds served from what "
            f"was drafted ahead, {counts['accepted']} of {counts['proposed']} tokens accepted; "
            f"{results['tokens_per_second']:.1f} tokens/s, {own['tokens_per_second']:.1f} without; "
            f"from the third second on {settled_over(results, own):.2f} of plain"
        )
    return lines
