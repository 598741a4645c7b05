"""A deployment on two nodes, driven by `paceline ray` as a user drives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.cluster import eventually
from tests.warm import PACELINE

COMMAND_SECONDS = 120.0
BACK_SECONDS = 60.0
"""A killed actor serves again within this time, on a machine that other tests keep busy."""
ENVIRONMENT = {
    **os.environ,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # a token would be read from the user's home, or written there
    # Workers that no actor asks for import Ray all the same: half a minute of a core.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}
RAY = (*PACELINE, "ray")
"""`paceline ray`, of this interpreter."""
Line = dict[str, Any]


class TwoNodes:
    """A cluster in a process of its own, which also looks at deployments: a command would take seconds for it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to, self._from = process.stdin, process.stdout
        self.address = self._from.readline().strip()
        assert self.address, "the cluster has started"

    def status(self, deployment: str) -> Any:
        """Every actor's line, or the error."""
        self._to.write(f"{deployment}\n")
        self._to.flush()
        return json.loads(self._from.readline())


@contextmanager
def two_nodes(programs: Path) -> Iterator[TwoNodes]:
    """A cluster that ends with the context; its nodes have the programs of a folder."""
    argv = [sys.executable, "-m", "tests.ray.two_nodes"]
    own = ENVIRONMENT | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own) as process:
        try:
            yield TwoNodes(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(COMMAND_SECONDS)


class Deployed:
    def __init__(self, nodes: TwoNodes, name: str = "paceline") -> None:
        self.nodes = nodes
        self.name = name
        self.said = ""
        """By the `up` that made it."""

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`paceline ray COMMAND …`, whatever it returns."""
        argv = [*RAY, command, "--address", self.nodes.address, "--name", self.name, *arguments]
        return subprocess.run(
            argv, capture_output=True, text=True, env=ENVIRONMENT, timeout=COMMAND_SECONDS, check=False
        )

    def do(self, command: str, *arguments: str) -> str:
        done = self.run(command, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def lines(self) -> list[Line]:
        found = self.nodes.status(self.name)
        assert isinstance(found, list), found
        return found

    def names_of(self, role: str) -> list[str]:
        return [line["name"] for line in self.lines() if line["role"] == role]

    def line(self, service: str, rank: int = 0) -> Line:
        (found,) = (each for each in self.lines() if each["name"] == f"{self.name}/{service}/rank-{rank}")
        return found

    def kill(self, line: Line) -> None:
        os.kill(line["pid"], signal.SIGKILL)

    def await_back(self, service: str, before: Line, rank: int = 0) -> Line:
        found: Line = {}

        def is_back() -> bool:
            nonlocal found
            found = self.line(service, rank)
            return bool(found["state"] == "serving" and found["pid"] != before["pid"])

        eventually(is_back, f"{service} is back", BACK_SECONDS)
        return found


def controller_pids() -> list[int]:
    """The processes of controllers; Ray names a process after its actor."""
    found = (each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"])
    return [each.pid for each in found if each.info["cmdline"][0].startswith("ray::DeploymentController")]
