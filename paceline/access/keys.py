"""API keys, and the file that has their hashes.

A key is 256 random bits, so one round of SHA-256 protects it: nobody can guess it, however fast the hash. Slow hashes
are for secrets that people choose; here one would only slow down every request, wrong ones above all. The file has no
secrets: its reader learns names and limits, and can't send a request.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.protocol.errors import InvalidInput, require
from paceline.runtime.files import read_live, replace_text

KEY_PREFIX = "pl-"
"""Lets people and secret scanners recognise a key."""
KEY_BYTES = 32
MAX_KEYS = 1024
MAX_FILE_BYTES = 1 << 20
_NEW_FILE_MODE = 0o600

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class KeyLimits(BaseModel):
    """Limits of a key; None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: int | None = Field(None, ge=1, le=1 << 20)
    tokens_per_minute: int | None = Field(None, ge=1, le=1 << 40)
    max_concurrent_requests: int | None = Field(None, ge=1, le=1 << 20)


class ApiKey(BaseModel):
    """One key: its owner, and the hash that identifies it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: Name | None = None
    """The owner, if it has several keys; None: the name."""
    limits: KeyLimits = KeyLimits()


class ApiKeys(BaseModel):
    """A whole key file, JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[ApiKey, ...] = Field((), max_length=MAX_KEYS)

    @model_validator(mode="after")
    def _distinct(self) -> ApiKeys:
        for field in ("name", "sha256"):
            counts = Counter(getattr(key, field) for key in self.keys)
            for value, count in counts.items():
                if count > 1:
                    raise ValueError(f"{field} {value} occurs {count} times")
        return self

    def with_key(self, key: ApiKey) -> ApiKeys:
        """The keys with one more.

        Raises:
            InvalidInput: the name is taken, or the file is full.
        """
        is_taken = any(each.name == key.name for each in self.keys)
        require(not is_taken, "name", key.name, "new in the file; revoke the key of this name first")
        require(len(self.keys) < MAX_KEYS, "keys", len(self.keys) + 1, f"at most {MAX_KEYS}")
        return ApiKeys(keys=(*self.keys, key))

    def without_key(self, name: str) -> ApiKeys:
        """The keys without one.

        Raises:
            InvalidInput: no key has this name.
        """
        others = tuple(key for key in self.keys if key.name != name)
        require(len(others) < len(self.keys), "name", name, f"one of: {', '.join(key.name for key in self.keys)}")
        return ApiKeys(keys=others)


def tenant_of(key: ApiKey) -> str:
    """Whose sessions a key opens: sessions of one tenant may share what was computed for a prefix."""
    return key.tenant or key.name


def new_key() -> str:
    """A key that nobody has had."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_key_file(file: Path) -> bytes:
    """The file as it is.

    Raises:
        InvalidInput: it can't be read, is too large or no regular file.
    """
    return read_live("api_keys", file, "JSON", MAX_FILE_BYTES)


def parse_keys(content: bytes, file: Path) -> ApiKeys:
    """Read a key file's content.

    Raises:
        InvalidInput: naming what is wrong where, without the value: a key may stand in the place of its hash.
    """
    try:
        return ApiKeys.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        raise InvalidInput.of("api_keys", str(file), f"a valid key file ({where}: {first['msg']})") from None


def load_keys(file: Path) -> ApiKeys:
    """The keys of a file. Raises as `read_key_file` and `parse_keys` do."""
    return parse_keys(read_key_file(file), file)


def save_keys(keys: ApiKeys, file: Path) -> None:
    """Write a key file so that a reader sees the old one or the new one, with the mode that the old one has.

    Raises:
        InvalidInput: it can't be written.
    """
    text = keys.model_dump_json(indent=2, exclude_none=True) + "\n"
    try:
        replace_text(file, text, file.stat().st_mode & 0o777 if file.exists() else _NEW_FILE_MODE)
    except OSError as error:
        raise InvalidInput.of("api_keys", str(file), f"a file that can be written ({error.strerror})") from error
