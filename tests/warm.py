"""Python processes that tests start, as forks of one that has imported what services and commands import.

Imports of gRPC, numba and torch take a process one to five seconds of CPU, and tests start hundreds of processes.
While `warm_processes` is open, `subprocess.Popen` has a fork of a process that holds those modules where the command
is one of ours, and so has `multiprocessing` for the ranks of a service. All else is as it would be: a child of the
test's own, with the environment, the folder, the streams and the process group that it was to have. The process that
forks is itself a fork of the one that runs the tests, which has imported nearly all of it.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from paceline.local.service_process import PROGRAMS, thread_environment

COMMAND = "from paceline.cli.main import main; main()"
PACELINE = (sys.executable, "-c", COMMAND)
"""`paceline` of this interpreter, to be followed by its arguments."""
SERVICES = frozenset(module for module, _ in PROGRAMS.values())
IMPORTS = (*(f"{module}.__main__" for module in SERVICES), "paceline.cli.main", "paceline.engine.transformer")
KERNELS = ("drafted", "racing", "ranking", "suffix")
"""Modules of `paceline.sampling` that compile."""
READ_BY_IMPORTS = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "TORCH", "HF_", "GRPC_", "TOKENIZERS_")
"""How variables begin that libraries read while they load: a process with others than ours imports for itself."""
THREADS = "OMP_NUM_THREADS"
WISH_BYTES = 1 << 18
STREAMS = (0, 1, 2)
MOST_DESCRIPTORS = 32
BEYOND_OPEN = 1 << 16
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): what the children of a process leave behind becomes its own child."""


class Nursery:
    """The process that forks, seen from one that asks it: a fork of that one, which ends with it.

    It is made while no other thread of ours holds a lock.
    """

    def __init__(self) -> None:
        self._wishes, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        if os.fork() == 0:
            _serve(theirs)
        theirs.close()

    def close(self) -> None:
        """End the process that forks; its forks go on."""
        self._wishes.close()

    def fork(self, wish: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Start a process that has these descriptors under the numbers that it wishes for; returns its id."""
        with self._lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._wishes, [json.dumps(wish).encode()], descriptors)
                child = self._wishes.recv(WISH_BYTES)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        assert child, "the process that forks has ended; what it printed says why"
        return int(child)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value)


@contextmanager
def warm_processes() -> Iterator[None]:
    """Have `subprocess.Popen` start our own programs as forks, and `multiprocessing` its processes."""
    nursery = Nursery()
    start, spawn = subprocess.Popen._execute_child, util.spawnv_passfds  # type: ignore[attr-defined]
    parameters = inspect.signature(start)

    def fork_or_start(popen: subprocess.Popen[bytes], *arguments: Any) -> None:
        call = parameters.bind(popen, *arguments).arguments
        wish = _wish_of(call)
        if wish is None:
            start(popen, *arguments)
            return
        pipes = (call["p2cread"], call["c2pwrite"], call["errwrite"])
        popen.pid = nursery.fork(wish, [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)])
        popen._child_created = True  # type: ignore[attr-defined]
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(call[end] for end in ends))  # type: ignore[attr-defined]

    def fork_or_spawn(path: bytes, command: Sequence[str], passed: Sequence[int]) -> int:
        program = [*command[command.index("-c") :]]
        if "spawn_main" not in program[1]:
            return int(spawn(path, command, passed))
        numbers = [*STREAMS, *passed]
        facts = {"program": program, "environment": dict(os.environ), "folder": str(Path.cwd()), "numbers": numbers}
        return nursery.fork(facts | {"name": "spawn_main"}, numbers)

    with (
        mock.patch.object(subprocess.Popen, "_execute_child", fork_or_start),
        mock.patch.object(util, "spawnv_passfds", fork_or_spawn),
    ):
        try:
            yield
        finally:
            nursery.close()


def _wish_of(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a fork is to be; None: the program is not ours, or `Popen` is asked for more than forks can do."""
    program, environment = _program(call["args"]), dict(os.environ if call["env"] is None else call["env"])
    more = call["preexec_fn"] or call["pass_fds"] or call["shell"] or call["executable"]
    if more or program is None or not _loads_alike(environment):
        return None
    return {
        "program": program,
        "environment": environment,
        "folder": os.fspath(call["cwd"] or Path.cwd()),
        "numbers": STREAMS,
        "process_group": call["process_group"],
        "session": call["start_new_session"],
    }


def _program(command: object) -> list[str] | None:
    """`-m` or `-c`, the program and its arguments; None: not ours."""
    words = [os.fspath(word) for word in command] if isinstance(command, list | tuple) else []
    if words[:1] == [str(Path(sys.executable).with_name("paceline"))]:
        return ["-c", COMMAND, *words[1:]]
    is_service = words[:2] == [sys.executable, "-m"] and words[2] in SERVICES
    return words[1:] if is_service or words[:3] == [*PACELINE] else None


def _loads_alike(environment: Mapping[str, str]) -> bool:
    """Whether libraries would read the same as they load; a fork sets the number of its threads itself."""
    ours = {**os.environ, **thread_environment(1), THREADS: environment.get(THREADS)}
    return all(ours.get(name) == value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS))


def _serve(wishes: socket.socket) -> NoReturn:
    """Fork for as long as somebody asks, and be what they asked for in each fork."""
    _forget_tests(wishes.fileno())
    wish = _next_of_forks(wishes)
    if wish is not None:
        _become(wish)
    os._exit(0)


def _forget_tests(wishes: int) -> None:
    """Undo what a test runner has set for its own process, and leave its files alone."""
    faulthandler.disable()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    os.closerange(3, wishes)
    os.closerange(wishes + 1, BEYOND_OPEN)


def compile_in_turn(worker: int) -> None:
    """Compile what steps and draws need, each part in one of several workers; others wait and read its machine code.

    A fresh checkout has none, and every process would compile for half a minute.
    """
    parts = ((_compile_sampling, "sampling"), (_compile_engine, "engine"))
    for turn in range(worker, worker + len(parts)):
        compile_part, package = parts[turn % len(parts)]
        with (Path(__file__).parent / package / "__init__.py").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            compile_part()


def _compile_sampling() -> None:
    for name in KERNELS:
        importlib.import_module(f"paceline.sampling.{name}").warm_up()


def _compile_engine() -> None:
    from tests.engine import tiny

    tiny.read(tiny.transformer(tiny.random_model(tiny.llama())), (1, 2, 3))


@functools.cache
def _load() -> None:
    """Import what a program needs, and compile; forks do so no more."""
    for name in IMPORTS:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    _compile_sampling()
    gc.freeze()  # what is loaded by now is no fork's garbage: a collection would copy its pages


def _next_of_forks(wishes: socket.socket) -> dict[str, Any] | None:
    """In a fork: what it is to be. None once nobody asks."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(wishes, WISH_BYTES, MOST_DESCRIPTORS)
        if not message:
            return None
        _load()
        if (child := _fork_twice()) is None:
            wishes.close()
            wish: dict[str, Any] = json.loads(message)
            _renumber(descriptors, wish["numbers"])
            return wish
        for descriptor in descriptors:
            os.close(descriptor)
        wishes.send(str(child).encode())


def _renumber(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors other numbers, and close all others."""
    beyond = max(*descriptors, *numbers) + 1
    for moved, descriptor in enumerate(descriptors, beyond):
        os.dup2(descriptor, moved)
    os.closerange(len(STREAMS), beyond)
    for moved, number in enumerate(numbers, beyond):
        os.dup2(moved, number)
        os.close(moved)


def _fork_twice() -> int | None:
    """The id of a process whose parent, a child of ours, has ended; None in that process."""
    reading, writing = os.pipe()
    if (between := os.fork()) == 0:
        os.close(reading)
        if (child := os.fork()) == 0:
            os.close(writing)
            return None
        os.write(writing, str(child).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)
    with os.fdopen(reading, "rb") as pipe:
        return int(pipe.read())


def _become(wish: Mapping[str, Any]) -> NoReturn:
    """Be the process that somebody asked for, to its end."""
    if "name" in wish:
        _prctl(PR_SET_NAME, wish["name"].encode())
    if wish.get("session"):
        os.setsid()
    if wish.get("process_group") not in (None, -1):
        os.setpgid(0, wish["process_group"])
    os.environ.clear()
    os.environ.update(wish["environment"])
    if THREADS in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ[THREADS]))
    os.chdir(wish["folder"])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    try:
        _run(wish["program"], wish["folder"])
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _end(end.code or 0)
        sys.stderr.write(f"{end.code}\n")
        _end(1)
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        sys.excepthook(*sys.exc_info())
        _end(1)
    _end(0)


def _run(words: Sequence[str], folder: str) -> None:
    flag, program, *arguments = words
    if flag == "-m":
        sys.argv, sys.path[0] = [program, *arguments], folder
        sys.modules.pop(f"{program}.__main__", None)
        with warm_processes() if _has_ranks(arguments) else nullcontext():
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = ["-c", *arguments], ""
        with warm_processes():
            exec(program, {"__name__": "__main__"})


def _has_ranks(arguments: Sequence[str]) -> bool:
    """Whether a service may start ranks: only then is it worth a process that forks."""
    files = (Path(value) for flag, value in pairwise(arguments) if flag == "--config")
    return any("tensor_parallel_size" in file.read_text() for file in files if file.is_file())


def _end(code: int) -> NoReturn:
    """What an interpreter does as it ends, but for freeing each module, by which a fork would copy its pages."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
