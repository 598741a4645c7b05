"""Drafters' checkpoints as others publish them: folders whose configuration or tensors are mutated, then loaded."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.formats.kinds import kind_of, load_onto
from paceline.formats.target_weights import TargetWeights
from tests.formats import eagle_files
from tests.fuzz.byte_mutations import mutated_bytes
from tests.fuzz.odd_values import mutated_json
from tests.heads import lookahead_files

CONFIG = "config.json"


@functools.cache
def checkpoints() -> Mapping[str, dict[str, bytes]]:
    """Whole folders by name: their files."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        eagle_files.write_draft(root / "eagle1", eagle_files.LLAMA, eagle_files.eagle1_tensors())
        eagle_files.write_draft(root / "eagle3", eagle_files.LLAMA, eagle_files.eagle3_tensors(), pickled=True)
        config, tensors = eagle_files.speculators_config(), eagle_files.eagle3_tensors("layers.0")
        eagle_files.write_draft(root / "speculators", config, tensors)
        lookahead_files.write(root / "medusa", _medusa(), "medusa_lm_head.pt", {"medusa_num_heads": 2})
        return {kind.name: {file.name: file.read_bytes() for file in kind.iterdir()} for kind in root.iterdir()}


def _medusa() -> lookahead_files.Tensors:
    return lookahead_files.own_tensors(hidden=eagle_files.HIDDEN)


@functools.cache
def tiny_target() -> tuple[tempfile.TemporaryDirectory[str], TargetWeights]:
    """A target of that shape; its folder lives as long as this process."""
    folder = tempfile.TemporaryDirectory()
    return folder, eagle_files.write_target(Path(folder.name))


def mutated_checkpoint(rng: random.Random, folder: Path) -> None:
    """Write a folder of which one file was mutated, or is missing."""
    files = dict(checkpoints()[rng.choice(sorted(checkpoints()))])
    name = CONFIG if rng.random() < 0.6 else rng.choice(sorted(files))
    if name == CONFIG and rng.random() < 0.85:
        config = json.loads(files[CONFIG])
        files[CONFIG] = json.dumps(mutated_json(rng, config, [_others()], most=2)).encode()
    elif rng.random() < 0.05:
        del files[name]
    else:
        files[name] = mutated_bytes(rng, files[name], rng.choice([*files.values()]))
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _others() -> Any:
    return [json.loads(files[CONFIG]) for files in checkpoints().values()]


def load_checkpoint(folder: Path) -> None:
    """Load it onto the tiny target as the draft service does. Raises what that raises."""
    kind = kind_of(folder)
    if kind is not None:
        _, target = tiny_target()
        load_onto(kind, folder, target, eagle_files.SETTINGS)
