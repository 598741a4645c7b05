"""Multi-token prediction and blocks through all three services: they read the target's features, no text changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from draft_service.drafters.model import ModelDrafter
from paceline.engine.decoder import build_engine
from paceline.engine.features import FeatureEngine
from paceline.formats.mtp import find_mtp, load_mtp
from paceline.heads.block import BlockDraft, build_block_engine
from paceline.heads.block_network import BlockForm, BlockNetwork, Sight
from paceline.heads.mtp import build_mtp_engine
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.features import FeatureNeed
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import EngineSettings
from tests.e2e.test_features import coordinator
from tests.engine import tiny
from tests.heads import tiny_mtp
from tests.services.harness import draft_service, eventually, target_service

SETTINGS = EngineSettings(threads=1, device="cpu", kv_bytes=1 << 20)
NAME = f"table:vocab={tiny.VOCAB}"
CHAIN = SpeculationSettings(drafter="model", num_draft_tokens=3)
TREE = SpeculationSettings(drafter="model", tree_widths=(3, 2), num_draft_tokens=2)
OFF = SpeculationSettings(off=True)


def _mtp(folder: Path) -> FeatureEngine:
    tiny_mtp.write(folder, "speculators")
    return build_mtp_engine(load_mtp(find_mtp(folder), SETTINGS), load_tokenizer(NAME), SETTINGS, "mtp")


def _block(folder: Path) -> FeatureEngine:
    shape = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": tiny.CONTEXT}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tiny.VOCAB}
    config = Qwen3Config.from_dict({**shape, **heads})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = BlockNetwork(config, tiny.VOCAB, BlockForm(4, 0, False, 2, (Sight(),)))
    network.lm_head.weight.data *= 30  # what is all but even is not worth proposing
    return build_block_engine(BlockDraft(network, FeatureNeed((0, 2))), load_tokenizer(NAME), SETTINGS, "block")


def _request(speculation: SpeculationSettings, temperature: float) -> GenerateRequest:
    return GenerateRequest(
        token_ids=tuple(range(1, 25)),
        seed=5,
        max_new_tokens=16,
        ignore_eos=True,
        sampling=SamplingParams(temperature=temperature),
        speculation=speculation,
    )


@pytest.mark.parametrize(("make", "temperature"), [(_mtp, 0.8), (_block, 0.0)])
async def test_no_text_changes(make: Callable[[Path], FeatureEngine], temperature: float, tmp_path: Path) -> None:
    engine = make(tmp_path)
    target = build_engine(tiny.random_model(tiny.llama(), seed=7), load_tokenizer(NAME), SETTINGS, "tiny")
    async with (
        target_service(target) as (_, target_address),
        draft_service(engine, drafter=ModelDrafter(engine, prefill_chunk=16)) as (_, draft_address),
        coordinator(target_address, draft_address, model=NAME) as client,
    ):
        alone = await client.generate(_request(OFF, temperature))
        for speculation in (CHAIN, TREE):
            drafted = await client.generate(_request(speculation, temperature))
            assert drafted.token_ids == alone.token_ids
            assert any(record.proposed for record in drafted.stats.records)
        await eventually(lambda: engine.kv_rows == 0, "the drafter keeps no rows of texts that have ended")
