"""The key file: hashed at rest, checked whole, replaced at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.access import keys
from paceline.access.keys import ApiKey, ApiKeys, KeyLimits, hash_of, load_keys, new_key, save_keys
from paceline.protocol.errors import InvalidInput


def a_key(name: str = "alice", key: str = "pl-1") -> ApiKey:
    return ApiKey(name=name, sha256=hash_of(key))


def test_keys_are_new_each_time_and_hold_256_bits() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("pl-") and len(key) == 3 + 43 for key in made)


def test_the_file_has_everything_but_the_key(tmp_path: Path) -> None:
    file, key = tmp_path / "keys.json", new_key()
    entry = ApiKey(name="alice", sha256=hash_of(key), tenant="acme", limits=KeyLimits(requests_per_minute=3))
    save_keys(ApiKeys(keys=(entry,)), file)
    assert key not in file.read_text()
    assert key.removeprefix("pl-") not in file.read_text()
    assert load_keys(file).keys == (entry,)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["keys.json"]


def test_a_file_keeps_the_mode_that_its_owner_gave_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    save_keys(ApiKeys(), file)
    file.chmod(0o640)
    save_keys(ApiKeys(keys=(a_key(),)), file)
    assert file.stat().st_mode & 0o777 == 0o640


def test_the_tenant_is_the_name_unless_told() -> None:
    assert keys.tenant_of(a_key("alice")) == "alice"
    assert keys.tenant_of(ApiKey(name="alice", sha256=hash_of("x"), tenant="acme")) == "acme"


def test_names_are_distinct_and_unknown_ones_refused() -> None:
    alone = ApiKeys(keys=(a_key(),))
    with pytest.raises(InvalidInput, match="name = 'alice': must be new in the file"):
        alone.with_key(a_key(key="pl-2"))
    with pytest.raises(InvalidInput, match="name = 'bob': must be one of: alice"):
        alone.without_key("bob")
    assert alone.without_key("alice") == ApiKeys()
    full = ApiKeys(keys=tuple(a_key(f"k{i}", f"pl-{i}") for i in range(keys.MAX_KEYS)))
    with pytest.raises(InvalidInput, match=f"keys = {keys.MAX_KEYS + 1}: must be at most {keys.MAX_KEYS}"):
        full.with_key(a_key("more", "pl-more"))


def keys_json(*entries: dict[str, Any]) -> str:
    return json.dumps({"keys": entries})


def plain(name: str, number: int = 0) -> dict[str, Any]:
    return {"name": name, "sha256": f"{number:064x}"}


NEVER = {"limits": {"requests_per_minute": 0}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "content: Invalid JSON"),
        ('{"keys": [], "kez": 1}', "kez: Extra inputs"),
        (keys_json({"name": "a"}), "keys.0.sha256: Field required"),
        (keys_json({"name": "a", "sha256": "pl-SECRET"}), "keys.0.sha256: String should match"),
        (keys_json(plain("a b")), "keys.0.name: String should match"),
        (keys_json(plain("a") | NEVER), "keys.0.limits.requests_per_minute: Input should be greater than or equal"),
        (keys_json(plain("a"), plain("a", 1)), "name a occurs"),
        (keys_json(plain("a"), plain("b")), "sha256 000"),
        (" " * (keys.MAX_FILE_BYTES + 1), f"at most {keys.MAX_FILE_BYTES} bytes"),
        (keys_json(*(plain(f"k{i}", i) for i in range(1025))), "keys: Tuple"),
    ],
)
def test_a_file_that_is_not_valid_is_refused_without_its_values(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(InvalidInput) as caught:
        load_keys(file)
    assert words in caught.value.message
    assert str(file) in caught.value.message
    assert "SECRET" not in repr(caught.value) + str(caught.value.__cause__) + str(caught.value.metadata)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"api_keys = '.*none.json': must be a readable JSON file"):
        load_keys(tmp_path / "none.json")
    with pytest.raises(InvalidInput, match="a file that can be written"):
        save_keys(ApiKeys(), tmp_path / "nowhere" / "keys.json")
