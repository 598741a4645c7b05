"""Models' folders, loaded as a target and as a tokenizer: any of their files mutated, tensors' headers among them."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Gemma3TextConfig

from paceline.engine.loading import load_engine
from paceline.models.tokenizer import load_tokenizer
from paceline.runtime.config import EngineSettings
from tests.engine import tiny
from tests.fuzz.cases import FuzzCase
from tests.fuzz.checkpoint_files import write_files
from tests.fuzz.files_surface import read
from tests.fuzz.odd_values import deep_somewhere, mutated_bytes, mutated_json
from tests.models.saving import byte_level_tokenizer

SETTINGS = EngineSettings(threads=1, max_num_seqs=2)
WIDTH = 258
_LENGTH_BYTES = 8
"""Of a safetensors file: how long its header is."""
_ROTATION = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
_GENERATION = {"eos_token_id": [1, 2], "temperature": 0.7}


@functools.cache
def folders() -> Mapping[str, dict[str, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        windows = Gemma3TextConfig(**shape, **heads, sliding_window=16, vocab_size=WIDTH)
        _write(root / "llama", tiny.llama(vocab_size=WIDTH))
        _write(root / "windows", windows)
        _write(root / "shards", tiny.qwen2(vocab_size=WIDTH, tie_word_embeddings=True), max_shard_size="60KB")
        file = root / "llama" / "config.json"
        raw = json.loads(file.read_text())
        del raw["rope_parameters"]
        file.write_text(json.dumps(raw | {"rope_theta": 5e5, "rope_scaling": _ROTATION}))
        return {kind.name: {file.name: file.read_bytes() for file in kind.iterdir()} for kind in root.iterdir()}


def _write(folder: Path, config: Any, **saving: Any) -> None:
    tiny.random_model(config).save_pretrained(folder, **saving)
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(_GENERATION))


def mutated_folder(rng: random.Random) -> dict[str, bytes]:
    """The files of a folder, one or two of them mutated, emptied or missing."""
    files = dict(folders()[rng.choice(sorted(folders()))])
    for _ in range(rng.choice((1, 1, 2))):
        name = "config.json" if rng.random() < 0.5 else rng.choice(sorted(files) or ["config.json"])
        if rng.random() < 0.03:
            files.pop(name, None)
        elif rng.random() < 0.15:
            files[name] = mutated_bytes(rng, files.get(name, b""), rng.choice([*files.values()]))
        else:
            files[name] = _mutated_file(rng, name, files.get(name, b"{}"))
    return files


def _mutated_file(rng: random.Random, name: str, content: bytes) -> bytes:
    if name.endswith(".json"):
        return _mutated_text(rng, content)
    if name.endswith(".safetensors") and len(content) > _LENGTH_BYTES:
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        header = _mutated_text(rng, content[_LENGTH_BYTES:end])
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header + content[end:]
    return mutated_bytes(rng, content, content)


def _mutated_text(rng: random.Random, content: bytes) -> bytes:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):  # mutated before
        return mutated_bytes(rng, content, content)
    if rng.random() < 0.05:
        return deep_somewhere(rng, value).encode()
    others = [json.loads(files["config.json"]) for files in folders().values()]
    return json.dumps(mutated_json(rng, value, others, most=2)).encode()


@dataclass
class FoldersTarget:
    folder: Path

    async def run(self, case: FuzzCase) -> str:
        return await asyncio.to_thread(self._run, case)

    def _run(self, case: FuzzCase) -> str:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            write_files(Path(name), mutated_folder(case.rng))
            read(lambda: load_tokenizer(name))
            return read(lambda: load_engine(name, SETTINGS))

    async def probe(self) -> None:
        await asyncio.to_thread(self._probe)

    def _probe(self) -> None:
        for name, files in folders().items():
            write_files(self.folder / name, files)
            load_engine(str(self.folder / name), SETTINGS)

    def facts(self) -> dict[str, str]:
        return {"folders": str(len(folders()))}


@asynccontextmanager
async def open_folders(seed: int) -> AsyncIterator[FoldersTarget]:
    with tempfile.TemporaryDirectory() as folder:
        yield FoldersTarget(Path(folder))
