"""Files that are read again while a service runs: what comes in their place is told, counted and never waited for."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from paceline.access import gate as gate_module
from paceline.access.gate import KeyGate
from paceline.access.keys import ApiKey, ApiKeys, hash_of, new_key, save_keys
from paceline.local.certificates import Authority
from paceline.protocol.errors import InvalidInput
from paceline.rpc import endpoints
from paceline.rpc.endpoints import Endpoint, EndpointSource, EndpointWatch
from paceline.rpc.tls import server_files
from paceline.runtime import metrics
from paceline.runtime.config import ServerSettings
from paceline.runtime.files import MAX_LIVE_BYTES, read_live
from paceline.runtime.roles import PeerRole
from tests.metrics.scrape import Exposition
from tests.rpc.harness import background, until

KEY = new_key()


def a_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(file))


def too_much(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "it is a FIFO"),
    "directory": (Path.mkdir, "it is a directory"),
    "socket": (a_socket, "No such device"),
    "zeros without end": (lambda file: file.symlink_to("/dev/zero"), "it is a device"),
    "too much": (too_much, f"a file of at most {MAX_LIVE_BYTES} bytes"),
    "nothing": (lambda file: None, "No such file"),
    "link to itself": (lambda file: file.symlink_to(file), "Too many levels of symbolic links"),
    "unreadable": (lambda file: file.touch(mode=0), "Permission denied"),
}
"""What may stand in a file's place: how it is made, and what the error says."""


def replace(file: Path, odd: str) -> None:
    remove(file)
    ODD[odd][0](file)


def remove(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)


def in_time(read: Callable[[], Any]) -> Any:
    """What a call returns or raises, on a thread that the test does not wait for for good."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(read())
        except InvalidInput as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    assert results, "it waits for good"
    return results[0]


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_readable_regular_file_is_refused_at_once_by_what_it_is(tmp_path: Path, odd: str) -> None:
    if odd == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads every file")
    file = tmp_path / "f"
    replace(file, odd)
    error = in_time(lambda: read_live("api_keys", file, "JSON"))
    assert isinstance(error, InvalidInput)
    assert error.metadata["field"] == "api_keys"
    assert ODD[odd][1] in error.message
    remove(file)
    file.write_bytes(b"{}")
    assert read_live("api_keys", file, "JSON") == b"{}"


@pytest.fixture
def counted() -> Iterator[Callable[[str], float]]:
    """How often a kind of file was not right."""
    assert metrics.configure("paceline-coordinator", model="m", prometheus=True)

    def failures(kind: str) -> float:
        exposition = Exposition.of(metrics.exposition()[0].decode())
        return exposition.value("paceline_reload_failures_total", file=kind)

    yield failures
    metrics.shutdown()


@pytest.mark.parametrize("odd", ["FIFO", "nothing"])
async def test_keys_stay_and_are_read_again_once_the_file_is_right(
    tmp_path: Path,
    odd: str,
    counted: Callable[[str], float],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate_module, "REREAD_S", 0.01)
    file = tmp_path / "keys.json"
    kept = ApiKey(name="alice", sha256=hash_of(KEY))
    save_keys(ApiKeys(keys=(kept,)), file)
    gate = KeyGate(file)
    async with background(gate.watch()):
        replace(file, odd)
        await until(lambda: counted("api_keys") >= 3, 5)
        assert gate.authenticate(f"Bearer {KEY}").tenant == "alice"
        assert sum("key file not read" in record.message for record in caplog.records) == 1
        remove(file)
        save_keys(ApiKeys(keys=(kept.model_copy(update={"tenant": "new"}),)), file)
        await until(lambda: gate.authenticate(f"Bearer {KEY}").tenant == "new", 5)


async def test_endpoints_stay_and_are_read_again_once_the_file_is_right(
    tmp_path: Path, counted: Callable[[str], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "FILE_PERIOD_S", 0.01)
    file = tmp_path / "targets"
    file.write_text("a:1\n")
    told: list[tuple[Endpoint, ...]] = []
    watch = EndpointWatch([EndpointSource.parse("target.address", f"file:{file}")], told.append)
    async with background(watch.run()):
        await until(lambda: told == [(Endpoint("a:1"),)], 5)
        replace(file, "FIFO")
        await until(lambda: counted("endpoints") >= 3, 5)
        remove(file)
        file.write_text("b:2\n")
        await until(lambda: told[-1] == (Endpoint("b:2"),), 5)
        assert len(told) == 2


@pytest.mark.parametrize("name", ["server.key", "ca.crt"])
def test_certificates_stay_and_are_read_again_once_the_file_is_right(
    tmp_path: Path, name: str, counted: Callable[[str], float], caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority.in_folder(tmp_path)
    authority.issue_role(PeerRole.TARGET, lifetime=timedelta(hours=1)).write(tmp_path, "server")
    pair = {"tls_certificate": tmp_path / "server.crt", "tls_key": tmp_path / "server.key"}
    files = server_files(ServerSettings(**pair, tls_client_ca=tmp_path / "ca.crt"))
    before = files.read()
    right = (tmp_path / name).read_bytes()
    for place, odd in enumerate(("FIFO", "directory", "too much", "nothing"), start=1):
        replace(tmp_path / name, odd)
        for _ in range(2):
            assert in_time(files.read) is before
        assert counted("tls") == 2 * place, "at each connection"
        assert sum("TLS files are not right" in record.message for record in caplog.records) == place
    remove(tmp_path / name)
    (tmp_path / name).write_bytes(right)
    assert in_time(files.read) == before
    assert counted("tls") == 8
