"""A target of Qwen2's shape in compiled steps, over real gRPC: transformers' own tokens, whole and in eight bits."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from transformers import PreTrainedModel

from coordinator.sessions.target_pool import TargetPeer, TargetPool
from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.decoder import build_engine
from paceline.engine.transformer import TransformerEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import PacelineError, ProtocolMismatch
from paceline.protocol.handshake import Hello
from paceline.protocol.sampling import SamplingParams
from paceline.rpc.peer_link import TargetLink
from paceline.runtime.config import EngineSettings, PeerSettings
from paceline.sampling.distribution import processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.engine import tiny
from tests.engine.test_quantization import rounded
from tests.services.harness import NOISE, linked, linked_target, target_link, target_service
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


def expected_text(model: PreTrainedModel, sampling: SamplingParams) -> list[int]:
    """Token by token from the logits of transformers' own forward pass over the whole history."""
    plain, history = tiny.Plain(model), list(PROMPT)
    for _ in range(LENGTH):
        scores = processed_scores(plain.logits(history).numpy()[np.newaxis], sampling)[0]
        history.append(race(scores, NOISE, Stream.DRAFT, len(history)))
        if history[-1] == END:
            break
    return history[len(PROMPT) :]


def target() -> PreTrainedModel:
    return tiny.biased(tiny.random_model(tiny.qwen_coder(), seed=SEED))


def engine_of(quantization: str) -> TransformerEngine:
    settings = EngineSettings.model_validate({"threads": 1, "quantization": quantization})
    engine = build_engine(target(), TableTokenizer(tiny.VOCAB, None), settings, "tiny")
    assert isinstance(engine, TransformerEngine)
    return engine


@pytest.mark.parametrize("quantization", ["none", "int8"])
async def test_chains_and_trees_write_transformers_own_tokens(quantization: str) -> None:
    model = target()
    reference = rounded(model) if quantization == "int8" else model
    texts = [expected_text(reference, sampling) for sampling in SAMPLINGS]
    engine = engine_of(quantization)
    assert engine.row_decoder is not None
    async with linked_target(engine) as events:
        for number, (sampling, text) in enumerate(zip(SAMPLINGS, texts, strict=True), start=1):
            assert len(set(text)) > 10, "a text that says nothing proves nothing"
            for tree in (False, True):
                assert await written(events, 2 * number + tree, sampling, text, tree) == text


def test_the_rounded_models_text_is_another() -> None:
    """So that the two above can't pass for each other."""
    model = target()
    texts = [[expected_text(each, sampling) for sampling in SAMPLINGS] for each in (model, rounded(model))]
    assert texts[0] != texts[1]


async def test_a_coordinator_takes_whole_targets_or_quantised_ones_but_not_both() -> None:
    whole, quantised = (engine_of(quantization) for quantization in ("none", "int8"))
    async with (
        target_service(whole) as (_, address),
        target_service(quantised) as (_, other),
        linked(target_link(address)) as first,
        linked(target_link(other)) as second,
    ):
        pool = TargetPool(
            (TargetPeer(cast(TargetLink, each.link)) for each in (first, second)), round_timeout_s=10, wait_s=10
        )
        for prefix in range(4):
            placed = pool.place((prefix,))
            assert placed is not None
            assert placed.link.address == address
            placed.attach(_Idle())  # busy, so that the other one would be chosen if it could be
        await first.link.close()
        assert pool.place((1,)) is None, "no session goes on with other weights"
        pinned = TargetLink(PeerSettings(address=other), Hello("test", whole.info.fingerprint))
        with pytest.raises(ProtocolMismatch, match="tiny#int8"):
            await started(pinned)


class _Idle:
    """A session that waits."""

    def on_event(self, event: object) -> None:
        pass

    def on_lost(self, error: PacelineError) -> None:
        pass


async def started(link: TargetLink) -> None:
    """Have a link up, if the peer takes it."""
    await link.start()
    try:
        await link.wait_up(10)
    finally:
        await link.close()
