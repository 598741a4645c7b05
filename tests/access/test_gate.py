"""Who is let in: by key, until it is revoked."""

from __future__ import annotations

import asyncio
import hmac
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline.access import gate as gate_module
from paceline.access.gate import REFUSAL, REVOCATION, Caller, Gate, KeyGate, gate_of
from paceline.access.keys import ApiKey, ApiKeys, KeyLimits, hash_of, new_key, save_keys
from paceline.protocol.errors import Overloaded, Unauthenticated
from tests.rpc.harness import until

ALICE, BOB = new_key(), new_key()
WRONG_KEY = "pl-" + "x" * 43


def keys_of(*names: str, **limits: int) -> ApiKeys:
    by_name = {"alice": ALICE, "bob": BOB}
    made = (ApiKey(name=name, sha256=hash_of(by_name[name]), limits=KeyLimits(**limits)) for name in names)
    return ApiKeys(keys=tuple(made))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_keys(keys_of("alice", "bob"), tmp_path / "keys.json")
    return tmp_path / "keys.json"


@asynccontextmanager
async def watched(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(gate_module, "REREAD_S", 0.01)
    watching = asyncio.create_task(gate.watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def refuses(gate: Gate, key: str) -> bool:
    try:
        gate.authenticate(f"Bearer {key}")
    except Unauthenticated:
        return True
    return False


async def revoked(caller: Caller) -> Unauthenticated:
    async with asyncio.timeout(10):
        with pytest.raises(Unauthenticated) as caught:
            await caller.until_revoked()
    return caught.value


MISSING = ("", "Bearer", "Bearer ", "Bearer  ", "Basic ")
WRONG = (WRONG_KEY, ALICE[:-1], ALICE + "x", hash_of(ALICE), "\udc80", "x" * 100_000)


@pytest.mark.parametrize(
    "authorization",
    [*MISSING, ALICE, f"Basic {ALICE}", f"Bearer {ALICE} ", f"Bearer  {ALICE}", *(f"Bearer {key}" for key in WRONG)],
    ids=itertools.count(),
)
def test_a_missing_and_a_wrong_key_get_one_message(file: Path, authorization: str) -> None:
    with pytest.raises(Unauthenticated) as caught:
        gate_of(file).authenticate(authorization)
    assert caught.value.message == REFUSAL
    assert not caught.value.metadata


@pytest.mark.parametrize("key", [ALICE, BOB, WRONG_KEY, ""], ids=["first", "last", "wrong", "none"])
def test_every_key_is_compared_in_constant_time_whichever_comes(
    file: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compared = gate_of(file), list[str]()

    def compare(one: str, other: str) -> bool:
        compared.append(one)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(gate_module, "hmac", type("Counting", (), {"compare_digest": staticmethod(compare)}))
    assert refuses(gate, key) == (key not in (ALICE, BOB))
    assert compared == [hash_of(ALICE), hash_of(BOB)]


async def test_a_revoked_key_is_refused_and_its_requests_are_told(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of(file)
    alice, bob = gate.authenticate(f"Bearer {ALICE}"), gate.authenticate(f"bearer {BOB}")
    assert (alice.tenant, bob.tenant) == ("alice", "bob")
    async with watched(gate, monkeypatch):
        save_keys(keys_of("bob"), file)
        assert (await revoked(alice)).message == REVOCATION
        with pytest.raises(Unauthenticated, match="with a key of this coordinator"):
            gate.authenticate(f"Bearer {ALICE}")
        assert gate.authenticate(f"Bearer {BOB}") is bob
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await bob.until_revoked()


async def test_a_key_of_the_same_name_is_another_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, other = gate_of(file), new_key()
    alice = gate.authenticate(f"Bearer {ALICE}")
    async with watched(gate, monkeypatch):
        save_keys(ApiKeys(keys=(ApiKey(name="alice", sha256=hash_of(other)),)), file)
        await revoked(alice)
        assert gate.authenticate(f"Bearer {other}").tenant == "alice"


async def test_a_broken_file_is_logged_once_and_changes_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gate_of(file)
    async with watched(gate, monkeypatch):
        await asyncio.to_thread(file.write_text, '{"keys": [{"name": "x", "sha256": "pl-SECRET"}]}')
        await until(lambda: "key file not read" in caplog.text)
        await asyncio.sleep(0.05)
        assert gate.authenticate(f"Bearer {ALICE}").tenant == "alice"
        save_keys(keys_of("bob"), file)
        await until(lambda: refuses(gate, ALICE))
    assert caplog.text.count("key file not read") == 1
    assert "SECRET" not in caplog.text


async def test_new_limits_of_a_key_keep_what_it_has_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = KeyGate(file, clock=lambda: 0.0)
    alice = gate.authenticate(f"Bearer {ALICE}")
    with alice.request():
        async with watched(gate, monkeypatch):
            save_keys(keys_of("alice", max_concurrent_requests=1), file)
            await until(lambda: refuses(gate, BOB))
        with pytest.raises(Overloaded, match="max_concurrent_requests = 1"), alice.request():
            pass
    with alice.request():
        assert gate.authenticate(f"Bearer {ALICE}") is alice


def test_without_a_file_anybody_is_let_in_and_nothing_is_counted() -> None:
    caller = gate_of(None).authenticate("")
    assert caller.tenant == ""
    with caller.request():
        caller.take_prompt(10**9)
        caller.take_generated(10**9)
