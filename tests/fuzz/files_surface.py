"""Files that users give, valid and mutated, read in this process: JSON, lines of JSON, TOML, tensors, text."""

from __future__ import annotations

import asyncio
import io
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
from typing import Any

import numpy as np

from coordinator.text.library import load_corpus
from paceline.access.keys import load_keys
from paceline.drafters.layers.manifest import load_manifest
from paceline.local.settings import speculative_drafter
from paceline.models.table_names import TableSpec
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import PacelineError
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.rpc.endpoints import EndpointSource
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.sources import load
from paceline.timeline.saved import read_rounds, rounds_json
from paceline_lab.bench.prompts.questions import load_questions
from paceline_lab.bench.record import read_recordings
from paceline_lab.plan.times import size_named
from paceline_lab.simulate.scenario import Scenario
from paceline_lab.simulate.trace import read_trace
from paceline_training.corpus import read_shards
from paceline_training.focus import BRANCHING, read_focus
from paceline_training.text_kinds import CELLS
from paceline_training.user_data import read_jsonl
from tests.fuzz.cases import ACCEPTED, FuzzCase, typed, within
from tests.fuzz.checkpoint_files import (
    load_checkpoint,
    load_gguf,
    mutated_checkpoint,
    mutated_gguf,
    tiny_target,
    whole,
)
from tests.fuzz.odd_values import deep_json, deep_somewhere, mutated_bytes, mutated_json

TOKENIZER = TableTokenizer(300, None)


@dataclass(frozen=True)
class FileKind:
    name: str
    file: str
    contents: tuple[bytes, ...]
    read: Callable[[Path], Any]


def _lines(*values: Any) -> bytes:
    return "".join(f"{json.dumps(value)}\n" for value in values).encode()


def _rounds() -> bytes:
    timings = StepTimings(1.0, 2.0, 0.5, 4.0, 2, 7)
    records = [RoundRecord(number, 1.0, 5.0, 0.5, timings, 0.1, 2, 1, True, "model", timings) for number in range(2)]
    return _lines({"paceline": {"rounds": rounds_json(records)}})


def _trace() -> bytes:
    costs = {"alone": [[1, 10.0], [64, 14.0]], "draft": [[1, 2.0]], "lease": 4}
    header = {"format": "paceline-trace", "version": 2, **costs}
    request = {
        "arrival_ms": 1.5, "prompt": [0, 1, 2], "answer": [3, 1, 2], "ranks": [1, 2, 0], "chances": [0.5, 0.25, 0.0],
        "rounds": [{"at_ms": 3.0, "committed": 2}],
    }  # fmt: skip
    return _lines(header, request, request)


def _shard() -> bytes:
    buffer = io.BytesIO()
    ids = np.array([[1, 2, 3], [4, 5, 0]], np.uint16)
    roles = np.array([[1, 2, 2], [1, 2, 0]], np.int8)
    np.savez_compressed(buffer, token_ids=ids, role=roles, temperature=np.array([0.0, 1.0], np.float32))
    return buffer.getvalue()


def _focus(file: Path) -> Any:
    return read_focus(file, TOKENIZER)


_QUESTIONS = (
    {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
    {"question_id": "x", "category": "c", "turns": ["d"]},
)
_TEXTS = (
    _lines({"prompt": "a"}, {"text": "bcd"}),
    _lines({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
)
_FOCUS = {
    "report": BRANCHING,
    "tokenizer": TOKENIZER.fingerprint,
    "cells": {name: {"positions": 40, "lost": 3.5} for name in list(CELLS)[:3]},
}
_MANIFEST = {
    "format": "paceline-draft/1", "kind": "draft", "layers": [0, 3], "draft_vocab": 16, "weights": "float16",
    "target": {"model": "m", "tokenizer": "a", "weights": "b"}, "depth": 2, "trees": True,
}  # fmt: skip
_LIMITED = {"name": "a", "sha256": "0" * 64, "limits": {"requests_per_minute": 5}}
_KEYS = {"keys": [_LIMITED, {"name": "b", "sha256": "1" * 64}]}
_SIZE = {
    "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_TARGET = b'model = "table:vocab=64"\nmax_queue = 5\n[engine]\nthreads = 1\nkv_bytes = 1000000\n[server]\nport = 50\n'
_COORDINATOR = b'model = "table"\nnum_draft_tokens = 3\n[target]\naddress = "a:1"\n[draft]\naddress = "b:2"\n'
_DRAFT = b'drafters = ["model:table:vocab=64"]\n[engine]\nmax_num_seqs = 3\n'
_GATEWAY = b'model = "table"\nmax_body_bytes = 4000\n[coordinator]\naddress = "a:1"\n[server]\nhost = "127.0.0.1"\n'
_SCENARIO = (
    b'seconds = 60\n[coordinators]\ncount = 2\n[[targets]]\ncount = 2\ngpu = "h100"\nmodel = "qwen3-32b"\n'
    b'tensor_parallel = 4\nlink = {ms = 0.2}\n[[drafts]]\nstep = [[1, 2.0], [64, 3.0]]\n[speculation]\nk = "auto"\n'
    b"[[traffic]]\nrequests_per_second = 6.0\nprompt_tokens = {median = 500, p99 = 3000}\n"
)
_KEPT = _lines({"seed": 3, "lines": {"alone": [[1, 2.0]]}}, {"seed": 4})


def _config(kind: Any) -> Callable[[Path], Any]:
    return lambda file: load(kind, file, {})


def _endpoints(file: Path) -> Any:
    return asyncio.run(_resolved(EndpointSource.parse("target.address", f"file:{file}")))


async def _resolved(source: EndpointSource) -> Any:
    return await source.resolve()


KINDS: tuple[FileKind, ...] = (
    FileKind("saved response", "response.json", (_rounds(),), read_rounds),
    FileKind("trace", "trace.jsonl", (_trace(),), read_trace),
    FileKind("Spec-Bench questions", "questions.jsonl", (_lines(*_QUESTIONS),), load_questions),
    FileKind("texts to train on", "data.jsonl", _TEXTS, lambda file: read_jsonl(file, TOKENIZER, 64)),
    FileKind("shard", "shard.npz", (_shard(),), read_shards),
    FileKind("branching points", "branches.json", (_lines(_FOCUS),), _focus),
    FileKind("draft's manifest", "manifest.json", (_lines(_MANIFEST),), lambda file: load_manifest(file.parent)),
    FileKind("API keys", "keys.json", (_lines(_KEYS),), load_keys),
    FileKind("model's config.json", "config.json", (_lines(_SIZE),), lambda file: size_named("model", str(file))),
    FileKind("target's configuration", "target.toml", (_TARGET,), _config(TargetConfig)),
    FileKind("draft's configuration", "draft.toml", (_DRAFT,), _config(DraftConfig)),
    FileKind("coordinator's configuration", "coordinator.toml", (_COORDINATOR,), _config(CoordinatorConfig)),
    FileKind("gateway's configuration", "gateway.toml", (_GATEWAY,), _config(GatewayConfig)),
    FileKind("scenario", "scenario.toml", (_SCENARIO,), _config(Scenario)),
    FileKind("coordinator's records", "records.jsonl", (_KEPT,), read_recordings),
    FileKind(
        "corpus",
        "corpus.txt",
        (b"one line\nand another\n", "é漢🙂\n".encode()),
        lambda file: load_corpus([file], TOKENIZER, 1000),
    ),
    FileKind("endpoints", "endpoints.txt", (b"# pool\na.example:50\n[::1]:60\n",), _endpoints),
    FileKind(
        "table model's name",
        "name.txt",
        (b"table:vocab=64,seed=1,noise=0.3", b"table:distribution=text,max_length=64,step_ms=1"),
        lambda file: TableSpec.parse(file.read_text(errors="replace")),
    ),
    FileKind(
        "speculative_config",
        "speculative.json",
        (b'{"method": "eagle3", "model": "m", "num_speculative_tokens": 3}', b'{"method": "ngram"}'),
        lambda file: speculative_drafter(file.read_text(errors="replace")),
    ),
)


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
