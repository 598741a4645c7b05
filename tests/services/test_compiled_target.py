"""A target of Qwen2's shape in compiled steps, over real gRPC: transformers' own tokens, whole and in eight bits."""

from __future__ import annotations

import functools
from typing import cast
from unittest.mock import Mock

import pytest
from transformers import PreTrainedModel

from coordinator.sessions.target_pool import TargetPeer, TargetPool
from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.decoder import build_engine
from paceline.engine.transformer import TransformerEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import ProtocolMismatch
from paceline.protocol.handshake import Hello
from paceline.protocol.sampling import SamplingParams
from paceline.rpc.peer_link import TargetLink
from paceline.runtime.config import EngineSettings, PeerSettings
from tests.engine import tiny
from tests.engine.test_quantization import rounded
from tests.services.expected import own_tokens
from tests.services.harness import NOISE, linked, linked_target
from tests.services.test_target_processed import END, PROMPT, written

pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no vectors of 512 bits")

LENGTH = 30
SEED = 4
"""Of a model whose texts are long."""
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
)


def target() -> PreTrainedModel:
    return tiny.biased(tiny.random_model(tiny.qwen_coder(), seed=SEED))


@functools.cache
def expected_texts(quantization: str) -> list[list[int]]:
    """Token by token from the logits of transformers' own forward pass over the whole history."""
    plain = tiny.Plain(rounded(target()) if quantization == "int8" else target())
    return [own_tokens(PROMPT, LENGTH, NOISE, sampling, plain.logits, END) for sampling in SAMPLINGS]


def engine_of(quantization: str) -> TransformerEngine:
    settings = EngineSettings.model_validate({"threads": 1, "quantization": quantization})
    engine = build_engine(target(), TableTokenizer(tiny.VOCAB, None), settings, "tiny")
    assert isinstance(engine, TransformerEngine)
    return engine


@pytest.mark.parametrize("quantization", ["none", "int8"])
async def test_chains_and_trees_write_transformers_own_tokens(quantization: str) -> None:
    engine = engine_of(quantization)
    assert engine.row_decoder is not None
    async with linked_target(engine) as events:
        for number, (sampling, text) in enumerate(zip(SAMPLINGS, expected_texts(quantization), strict=True), start=1):
            assert len(set(text)) > 10, "a text that says nothing proves nothing"
            for tree in (False, True):
                assert await written(events, 2 * number + tree, sampling, text, tree) == text


def test_the_rounded_models_text_is_another() -> None:
    """So that the two above can't pass for each other."""
    assert expected_texts("none") != expected_texts("int8")


async def test_a_coordinator_takes_whole_targets_or_quantised_ones_but_not_both() -> None:
    whole, quantised = (engine_of(quantization) for quantization in ("none", "int8"))
    async with linked_target(whole) as first, linked_target(quantised) as second:
        pool = TargetPool(
            (TargetPeer(cast(TargetLink, each.link)) for each in (first, second)), round_timeout_s=10, wait_s=10
        )
        for prefix in range(4):
            placed = pool.place((prefix,))
            assert placed is not None
            assert placed.link.address == first.link.address
            placed.attach(Mock())  # busy, so that the other one would be chosen if it could be
        await first.link.close()
        assert pool.place((1,)) is None, "no session goes on with other weights"
        pinned = TargetLink(PeerSettings(address=second.link.address), Hello("test", whole.info.fingerprint))
        with pytest.raises(ProtocolMismatch, match="tiny#int8"):
            async with linked(pinned):
                pass
