"""Drafters' checkpoints as others publish them: folders whose configuration or tensors are mutated, then loaded."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from paceline.drafters.formats.kinds import kind_of, load_onto, load_own
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.models.resolve import resolve
from tests.drafters.formats import eagle_files
from tests.drafters.heads import lookahead_files, tiny_block, tiny_mtp
from tests.engine.tiny import VOCAB
from tests.fuzz.byte_mutations import mutated_bytes
from tests.fuzz.odd_values import mutated_json

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
        medusa = lookahead_files.own_tensors(hidden=eagle_files.HIDDEN)
        lookahead_files.write(root / "medusa", medusa, "medusa_lm_head.pt", {"medusa_num_heads": 2})
        _write_predictions(root)
        _write_blocks(root)
        return {kind.name: _files(kind) for kind in root.iterdir()}


def _write_predictions(root: Path) -> None:
    """One that speculators wrote, and what targets of two layouts carry themselves."""
    for name in ("speculators", "deepseek_v3", "qwen3_next"):
        folder = root / f"mtp {name}"
        folder.mkdir()
        tiny_mtp.write(folder, name)
    file = root / "mtp speculators" / CONFIG
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    facts = {
        "speculators_model_type": "mtp",
        "transformer_layer_config": json.loads(file.read_text()),
        "num_nextn_predict_layers": 1,
        "speculators_config": {"algorithm": "mtp", "proposal_methods": [method]},
    }
    file.write_text(json.dumps(facts))


def _write_blocks(root: Path) -> None:
    folder, _ = tiny_target()
    target = load_file(Path(folder.name) / "model.safetensors")
    layers = tiny_block.config(vocab_size=VOCAB).to_dict()
    facts = {"num_target_layers": eagle_files.TARGET_LAYERS, "vocab_size": VOCAB}
    tiny_block.write_block(root / "block z-lab", target, "z-lab", **facts)
    tiny_block.write_block(root / "block speculators", target, "own vocabulary", transformer_layer_config=layers)


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


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
    write_files(folder, files)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _others() -> Any:
    return [json.loads(files[CONFIG]) for files in checkpoints().values()]


def load_checkpoint(folder: Path) -> None:
    """Load it onto the tiny target as the draft service does, or as a target's own. Raises what that raises."""
    _, target = tiny_target()
    kind = kind_of(folder)
    if kind is not None:
        load_onto(kind, folder, target, eagle_files.SETTINGS)
        return
    load_own(replace(target, source=resolve(str(folder))), eagle_files.SETTINGS)
