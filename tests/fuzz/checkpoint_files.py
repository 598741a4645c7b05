"""Published checkpoints of drafters, and GGUF files: settings, tensors or bytes are mutated, then loaded."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from paceline.drafters.formats.kinds import kind_of, load_onto, load_own
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.engine.loading import load_engine
from paceline.models.gguf_config import ARCHITECTURES
from paceline.models.resolve import resolve
from paceline.models.tokenizer import load_tokenizer
from paceline.runtime.config import EngineSettings
from tests.drafters.formats import eagle_files
from tests.drafters.heads import lookahead_files, tiny_block, tiny_mtp
from tests.engine.tiny import VOCAB
from tests.fuzz.odd_values import mutated_bytes, mutated_json
from tests.models import gguf_files

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


FILE = "model.gguf"
_ODD = (
    0, 1, 2, 3, 5, 7, -1, 255, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 10**15, (1 << 63) - 1, 0.0,
    0.5, 1e-30, 1e30, float("nan"), float("inf"), -1.0, "", "x", "linear", "yarn", "longrope", "none", "gpt2",
    "llama", True, False, [0], [1, 1], [True, False], [0.5] * 300, ["a", "b"], None,
)  # fmt: skip
_KEYS = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.scale", "attn_logit_softcapping",
    "final_logit_softcapping", "expert_count", "expert_used_count", "expert_feed_forward_length", "vocab_size",
    "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "general.alignment", "general.type", "general.name", "split.count", "tokenizer.chat_template",
    *(
        f"tokenizer.ggml.{key}"
        for key in (
            "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id",
            "eot_token_id", "eos_token_ids", "unknown_token_id", "padding_token_id", "add_bos_token",
            "add_eos_token", "add_space_prefix",
        )
    ),
)  # fmt: skip
_TENSORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "output.weight",
    "blk.0.attn_q.weight",
    "blk.1.ffn_up.bias",
)
_SHAPES = ((8,), (1,), (64,), (64, 64), (4, 32, 64), (267, 64))


@functools.cache
def whole(architecture: str = "llama") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return gguf_files.write(Path(folder) / FILE, architecture).read_bytes()


def mutated_gguf(rng: random.Random, folder: Path) -> Path:
    """Write a file of which some keys or tensors are others, or some bytes."""
    file = folder / FILE
    if rng.random() < 0.6:
        architecture = rng.choice(sorted(ARCHITECTURES))
        gguf_files.write(file, architecture, _odd_keys(rng), _odd_tensors(rng))
    else:
        file.write_bytes(whole(rng.choice(sorted(ARCHITECTURES))))
    if rng.random() < 0.5:
        content = file.read_bytes()
        header = content.index(b"token_embd") + rng.randrange(2000)
        file.write_bytes(mutated_bytes(rng, content[:header], content[-200:]) + content[header:])
    return file


def _odd_keys(rng: random.Random) -> Mapping[str, Any]:
    return {key: rng.choice(_ODD) for key in rng.sample(_KEYS, rng.randint(1, 3))}


def _odd_tensors(rng: random.Random) -> Mapping[str, np.ndarray | None]:
    if rng.random() < 0.7:
        return {}
    shape = rng.choice(_SHAPES)
    return {rng.choice(_TENSORS): rng.choice((None, np.ones(shape, np.float32), np.zeros(shape, np.float32)))}


def load_gguf(file: Path) -> None:
    """Load it as target and coordinator do. Raises what that raises."""
    load_tokenizer(str(file))
    load_engine(str(file), EngineSettings(threads=1, max_model_len=64, kv_bytes=1 << 20))
