"""D7: what is left when a supervisor is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import psutil

from tests.attacks.registry import attack
from tests.warm import PACELINE

TABLE = "table:vocab=300,seed=1,eos=299"
ENDED_S = 20.0


@attack("D7", "SIGKILL and SIGHUP of `paceline serve`")
async def orphans(folder: Path) -> str:
    """Its services end with it."""
    slowest = 0.0
    for number in (signal.SIGKILL, signal.SIGHUP):
        slowest = max(slowest, await asyncio.to_thread(_end_serve, folder, number))
    return f"no service left after {slowest:.1f} s at most"


def _end_serve(folder: Path, number: signal.Signals) -> float:
    ports = ("--port", "0", "--draft-port", "0", "--target-port", "0")
    command = [*PACELINE, "serve", TABLE, "--drafter", f"model:{TABLE},noise=0.2"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"serve-{number.name}.log").open("wb") as log:
        serve = subprocess.Popen([*command, *ports], stdout=log, stderr=log)
    services: list[psutil.Process] = []
    try:
        services = _children(serve.pid)
        serve.send_signal(number)
        started = time.monotonic()
        _, left = psutil.wait_procs(services, ENDED_S)
        assert not left, f"{len(left)} of {len(services)} services live on after {number.name}"
        return time.monotonic() - started
    finally:
        for each in [*services, psutil.Process(serve.pid)] if psutil.pid_exists(serve.pid) else services:
            if each.is_running():
                each.kill()
        serve.wait()


def _children(pid: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children()
        if len(children) >= 3:
            return children
        time.sleep(0.05)
    raise AssertionError("paceline serve started no three services")
