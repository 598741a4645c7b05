"""Every kind of drafter, tiny, of one tiny target: each reads its hidden states or begins as its layers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config

from draft_service.drafters.model import ModelDrafter
from paceline.client import AsyncClient
from paceline.drafters.formats.kinds import kind_of, load_onto
from paceline.drafters.formats.mtp import find_mtp, load_mtp
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.block import BlockDraft, build_block_engine
from paceline.drafters.heads.block_network import BlockForm, BlockNetwork, Sight
from paceline.drafters.heads.mtp import build_mtp_engine
from paceline.drafters.layers.manifest import TargetFingerprint, TrainedKind
from paceline.drafters.layers.stack import load_draft_engine
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.decoder import build_engine
from paceline.engine.interface import Engine
from paceline.protocol.features import FeatureNeed
from paceline.runtime.config import EngineSettings
from paceline_training.checkpoint import save_draft
from paceline_training.kinds import TraineeShape, make_trainee, manifest_of
from tests.drafters.formats import eagle_files
from tests.drafters.heads import tiny_mtp
from tests.drafters.heads.lookahead_files import own_tensors, write
from tests.e2e.in_process import three_services
from tests.engine import tiny
from tests.models.saving import save_with_tokenizer

SETTINGS = EngineSettings(threads=1, device="cpu", kv_bytes=1 << 24)
EXIT_LAYER = 5
"""Of eight: near enough to the target to be right now and then."""
SHARPENED = 30.0
"""By how much heads of random weights are: what is all but even is not worth proposing."""
Build = Callable[[Path, TargetWeights], Engine]
"""Makes a drafter's engine, with files in a folder, for a target."""
D = TypeVar("D", bound=ModelDrafter)


def target_model() -> PreTrainedModel:
    return tiny.random_model(eagle_files.target_config(), seed=7)


@asynccontextmanager
async def services(
    build: Build, folder: Path, make: type[D], *, static: bool = False
) -> AsyncIterator[tuple[AsyncClient, D]]:
    """All three, with a drafter; what is loaded is written to the folder. `static`: the target's engine is that of
    GPUs."""
    name = str(folder / "target")
    save_with_tokenizer(target_model(), folder / "target")
    weights = TargetWeights.load(name, SETTINGS)
    drafter = make(build(folder / "draft", weights), prefill_chunk=16)
    target = build_engine(target_model(), weights.tokenizer, SETTINGS, "tiny", static=static)
    async with three_services(target, drafter, model=name) as client:
        yield client, drafter


def _loaded(folder: Path, target: TargetWeights) -> Engine:
    kind = kind_of(folder)
    assert kind is not None
    return load_onto(kind, folder, target, SETTINGS)


def _eagle1(folder: Path, target: TargetWeights) -> Engine:
    return _loaded(eagle_files.write_draft(folder, eagle_files.LLAMA, eagle_files.eagle1_tensors()), target)


def _eagle3(folder: Path, target: TargetWeights) -> Engine:
    config = {**eagle_files.LLAMA, "draft_vocab_size": len(eagle_files.DRAFT_IDS)}
    return _loaded(eagle_files.write_draft(folder, config, eagle_files.eagle3_tensors()), target)


def _medusa(folder: Path, target: TargetWeights) -> Engine:
    return _loaded(write(folder, own_tensors(outputs=False), "medusa_lm_head.pt"), target)


def _mtp(folder: Path, target: TargetWeights) -> Engine:
    folder.mkdir()
    tiny_mtp.write(folder, "speculators")
    return build_mtp_engine(load_mtp(find_mtp(folder), SETTINGS), target.tokenizer, SETTINGS, "mtp")


def _block(_folder: Path, target: TargetWeights) -> Engine:
    shape = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": tiny.CONTEXT}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tiny.VOCAB}
    config = Qwen3Config.from_dict({**shape, **heads})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = BlockNetwork(config, tiny.VOCAB, BlockForm(4, 0, False, 2, (Sight(),)))
    network.lm_head.weight.data *= SHARPENED
    return build_block_engine(BlockDraft(network, FeatureNeed((0, 2))), target.tokenizer, SETTINGS, "block")


def _exit(folder: Path, target: TargetWeights) -> Engine:
    """As it is before its first step: the target's own first layers, and its last one as the exit."""
    name = target.source.location
    loaded = Target.load(name, SETTINGS)
    shape = TraineeShape(TrainedKind.EXIT, exit_layer=EXIT_LAYER).on(loaded)
    trainee = make_trainee(shape, loaded, DraftVocabulary(np.arange(0, tiny.VOCAB, 2, dtype=np.int32), tiny.VOCAB))
    made_for = TargetFingerprint(loaded.name, loaded.tokenizer.fingerprint, loaded.weights)
    save_draft(folder, trainee, manifest_of(shape, made_for, trainee, {}))
    return load_draft_engine(str(folder), SETTINGS, name)


DRAFTERS: dict[str, Build] = {
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "mtp": _mtp,
    "block": _block,
    "exit": _exit,
}
