"""Files that users give, read in this process: JSON, lines of JSON, TOML, tensors, text."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.protocol.errors import PacelineError
from tests.fuzz.byte_mutations import mutated_bytes
from tests.fuzz.cases import ACCEPTED, FuzzCase, typed, within
from tests.fuzz.checkpoint_files import load_checkpoint, mutated_checkpoint, tiny_target
from tests.fuzz.gguf_headers import load_gguf, mutated_gguf, whole
from tests.fuzz.odd_values import deep_json, deep_somewhere, mutated_json
from tests.fuzz.user_files import KINDS, FileKind

READ_S = 5.0
"""A reader's time: a checkpoint of 100 KB takes some 20 ms."""
CHECKPOINTS = 0.2
"""Share of cases whose file is a checkpoint's."""
GGUF_FILES = 0.05
"""Share of cases whose file is a GGUF model: 300 KB, which load in 0.2 s."""
_VALUE = re.compile(rb"(?<== )[^\n]+")
_TOML = (
    b"nan", b"-inf", b"-1", b"0", b"1e400", b"9" * 400, b'""', b'"x"', b"[]", b"{}", b"[[]]", b"true", b"{a = 1}",
    b"1979-05-27", b"[[1, nan]]", b'"\\u0000"', b"[" * 2000, b"0xffffffffffffffffff",
)  # fmt: skip


@dataclass
class ReadersTarget:
    folder: Path

    async def run(self, case: FuzzCase) -> str:
        return await asyncio.to_thread(self._run, case)

    def _run(self, case: FuzzCase) -> str:
        rng = case.rng
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            chosen = rng.random()
            if chosen > 1 - GGUF_FILES:
                file = mutated_gguf(rng, folder)
                return read(lambda: load_gguf(file))
            if chosen < CHECKPOINTS:
                mutated_checkpoint(rng, folder)
                return read(lambda: load_checkpoint(folder))
            kind = rng.choice(KINDS)
            file = folder / kind.file
            file.write_bytes(mutated_file(rng, kind))
            return read(lambda: kind.read(file))

    async def probe(self) -> None:
        await asyncio.to_thread(self._probe)

    def _probe(self) -> None:
        for kind in KINDS:
            for content in kind.contents:
                file = self.folder / kind.file
                file.write_bytes(content)
                kind.read(file)
        file = self.folder / "whole.gguf"
        file.write_bytes(whole())
        load_gguf(file)

    def facts(self) -> dict[str, str]:
        return {"kinds of files": str(len(KINDS) + 2)}


def mutated_file(rng: random.Random, kind: FileKind) -> bytes:
    """A file's content after mutations that suit it, of its bytes, or both."""
    content = rng.choice(kind.contents)
    other = rng.choice(rng.choice(KINDS).contents)
    if rng.random() < 0.75:
        if kind.file.endswith((".json", ".jsonl")):
            content = _mutated_lines(rng, content)
        elif kind.file.endswith(".toml"):
            content = _mutated_toml(rng, content)
    if rng.random() < 0.4:
        content = mutated_bytes(rng, content, other)
    return content


def _mutated_lines(rng: random.Random, content: bytes) -> bytes:
    """One of the lines, which are JSON each."""
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    value = json.loads(lines[place])
    if rng.random() < 0.1:
        lines[place] = deep_somewhere(rng, value).encode()
    elif rng.random() < 0.05:
        lines[place] = deep_json(rng)
    else:
        lines[place] = json.dumps(mutated_json(rng, value, [json.loads(line) for line in lines])).encode()
    return b"\n".join(lines) + b"\n"


def _mutated_toml(rng: random.Random, content: bytes) -> bytes:
    values = [*_VALUE.finditer(content)]
    chosen = rng.choice(values)
    return content[: chosen.start()] + rng.choice(_TOML) + content[chosen.end() :]


def read(reader: Callable[[], object]) -> str:
    """What a reader's case is counted as; it may take `READ_S`."""
    began = time.thread_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn of what they read
            reader()
    except PacelineError as error:
        return typed(error)
    finally:
        within(READ_S, began)
    return ACCEPTED


@asynccontextmanager
async def open_files(seed: int) -> AsyncIterator[ReadersTarget]:
    tiny_target()
    with tempfile.TemporaryDirectory() as folder:
        yield ReadersTarget(Path(folder))
