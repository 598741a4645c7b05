"""The grammar hosts and workers below a process, as the operating system shows them."""

from __future__ import annotations

import os

import psutil


def hosts(pid: int | None = None) -> list[psutil.Process]:
    """Grammar hosts that a process has started."""
    return [child for child in psutil.Process(pid or os.getpid()).children() if _is_grammars(child)]


def workers(pid: int | None = None) -> list[psutil.Process]:
    """Grammar workers of a process, those that have ended and were not reaped left out."""
    found = [worker for host in hosts(pid) for worker in _children(host)]
    return [worker for worker in found if _is_grammars(worker)]


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def _is_grammars(process: psutil.Process) -> bool:
    try:
        return "paceline.grammars.host" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
