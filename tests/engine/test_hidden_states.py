"""Hidden states that engines keep are those of the model's own forward pass, and cost no bit of the logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LongcatFlashConfig, PreTrainedConfig

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine import hidden_states
from paceline.engine.features import FeatureRows, decode_features, encode_features
from paceline.engine.interface import Logits, StepItem, StepPlan
from paceline.engine.parallel.engine import ParallelEngine
from paceline.engine.transformer import TransformerEngine
from paceline.protocol.errors import Unsupported
from paceline.protocol.features import EMBEDDING, FINAL, MAX_FEATURE_BYTES, FeatureNeed, FeatureType
from paceline.protocol.proposal import ROOT
from paceline_training.teacher import Teacher
from tests.engine import tiny
from tests.engine.families import SERVED, WINDOW, named
from tests.engine.parallel.test_parallel_engine import in_parallel

NEED = FeatureNeed((0, FINAL, EMBEDDING, 1))
TEXT = (5, 9, 2, 77, 31, 8, 40, 41, 3, 12, 60, 23, 71, 90)
"""Longer than the tiny models' windows."""
TREE = StepItem(1, 14, (11, 12, 13, 14, 15), (ROOT, ROOT, 0, 1, 0), logit_rows=(0, 1, 2, 3, 4))
OTHER = StepItem(2, 0, (50, 51, 52), logit_rows=(0, 2))
PATHS = [
    *(TEXT[: end + 1] for end in range(14)),
    *((*TEXT, *path) for path in ((11,), (12,), (11, 13), (12, 14), (11, 15))),
]
STEPS = (
    (StepItem(1, 0, TEXT[:10], logit_rows=(9,)), OTHER),
    (StepItem(1, 10, TEXT[10:], logit_rows=(3,)),),
    (StepItem(2, 3, (1,), logit_rows=(0,)), TREE),
)
Engines = TransformerEngine | ParallelEngine


def run(engine: Engines, need: FeatureNeed | None) -> tuple[list[Logits], list[FeatureRows]]:
    """Logits of all steps; features of session 1's rows, where they are wanted."""
    logits, features = [], []
    for session in (1, 2):
        engine.open(session, 40)
    if need is not None:
        engine.keep_features(1, need)
    for items in STEPS:
        logits += [rows.copy() for rows in engine.step(StepPlan(items))]
        if need is not None:
            features.append(engine.features(1).copy())
    for session in (1, 2):
        engine.close(session)
    return logits, features


def layer_count(model: Any) -> int:
    """LongCat-Flash's layers attend twice, and `num_hidden_layers` counts both."""
    config = model.config.get_text_config()
    return int(config.num_layers if isinstance(config, LongcatFlashConfig) else config.num_hidden_layers)


def inner_of(model: Any) -> tuple[Any, Any]:
    """The module that has the layers, and those, as families call them."""
    for inner in model.modules():
        for name in ("layers", "h", "blocks"):
            stack = getattr(inner, name, None)
            if isinstance(stack, torch.nn.ModuleList) and len(stack) == layer_count(model):
                return inner, stack
    raise AssertionError("layers of another name")


def own_states(model: Any, tokens: Sequence[int], need: FeatureNeed = NEED, stream: int = 0) -> FeatureRows:
    """Of the last token, as transformers tells them: entry i + 1 is layer i's output, the last one is normed.

    Of layers that carry several streams, one: [streams, batch, rows, hidden].
    """
    states: list[torch.Tensor] = []
    inner, stack = inner_of(model)
    hooks = [
        each.register_forward_hook(lambda _m, _a, out: states.append(out[0] if isinstance(out, tuple) else out))
        for each in stack
    ]
    final: list[torch.Tensor] = []
    hooks.append(inner.register_forward_hook(lambda _m, _a, out: final.append(out[0])))
    with torch.inference_mode():
        out = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    by_layer = {EMBEDDING: out.hidden_states[0], FINAL: final[0], **dict(enumerate(states))}
    for layer in range(len(states) - 1):
        torch.testing.assert_close(by_layer[layer], out.hidden_states[layer + 1])
    last = final[0] if out.hidden_states[-1].dim() == 3 else states[-1]
    torch.testing.assert_close(last, out.hidden_states[-1])
    rows = {layer: (each[stream] if each.dim() > 3 else each)[0, -1] for layer, each in by_layer.items()}
    joined: FeatureRows = torch.cat([rows[layer] for layer in need.layers]).float().numpy()
    return joined


def engine_of(config: PreTrainedConfig, **settings: Any) -> tuple[TransformerEngine, Any]:
    return tiny.transformer(tiny.random_model(config), kv_bytes=1 << 22, **settings), tiny.random_model(config).eval()


STREAMS = "Gemma 3n"
OTHERS = ("Mistral 7B v0.1", "Qwen 3 MoE", "DeepSeek-V3, R1, Kimi K2", STREAMS, "Llama 4")
"""In every run: windows; experts; latent attention and experts; layers that carry four streams; another base."""
TELL_OTHERS = ("Mamba", "Mamba 2", "Falcon Mamba", "Lara Mini")
"""Those of which transformers tells the inputs of other modules than the layers."""
TELL_NONE = "Hunyuan 4"
"""Its layers carry streams that only the last one joins."""
REPRODUCIBLE = {"reproducible": True, "reproducible_rows": 8}
MODELS = [
    *(pytest.param(each(), {}, id=name) for name, each in tiny.FAMILIES.items()),
    *(pytest.param(tiny.FAMILIES[name](), REPRODUCIBLE, id=f"{name}, fixed") for name in ("llama", "gpt_neox")),
    *(
        pytest.param(each.config(), {}, id=each.name, marks=() if each.name in OTHERS else pytest.mark.full)
        for each in SERVED
        if each.name not in (*TELL_OTHERS, TELL_NONE)
    ),
]


@pytest.mark.full
def test_a_family_whose_layers_carry_streams_alone_offers_no_states() -> None:
    config = next(each.config() for each in SERVED if each.name == TELL_NONE)
    assert engine_of(config)[0].info.features is None


def compared(reference: Any, need: FeatureNeed = NEED, stream: int = 0) -> FeatureRows:
    return np.stack([own_states(reference, path, need, stream) for path in PATHS])


@pytest.mark.parametrize(("config", "settings"), MODELS)
def test_states_are_those_that_transformers_tells_and_logits_stay_as_they_are(
    config: PreTrainedConfig, settings: dict[str, Any]
) -> None:
    engine, reference = engine_of(config, **settings)
    offer, text = engine.info.features, reference.config.get_text_config()
    assert offer is not None
    assert (offer.layers, offer.hidden) == (layer_count(reference), text.hidden_size)
    without, _ = run(engine, None)
    beside, features = run(engine, NEED)
    for one, same in zip(beside, without, strict=True):
        np.testing.assert_array_equal(one, same)
    np.testing.assert_allclose(np.concatenate(features), compared(reference), rtol=1e-3, atol=1e-3)
    shifted = compared(reference, FeatureNeed((1, FINAL, EMBEDDING, 0)))
    assert not np.allclose(np.concatenate(features), shifted, rtol=1e-1, atol=1e-1), "a layer further"


def test_that_comparison_notices_a_window() -> None:
    """The same weights without one: rows behind its end have other states, those before it the same."""
    engine, _ = engine_of(named("Mistral 7B v0.1").config())
    _, features = run(engine, NEED)
    right = compared(tiny.random_model(named("Mistral Small, Nemo").config()).eval())
    same = np.isclose(np.concatenate(features), right, rtol=1e-3, atol=1e-3)
    assert same[:WINDOW].all()
    assert not same[WINDOW:].all(axis=1).any()


def test_layers_that_yield_more_than_a_vector_a_row_are_known_at_loading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams that nothing is known of: no features are offered, and none are kept in a step."""
    engine, reference = engine_of(named(STREAMS).config())
    _, features = run(engine, NEED)
    other = compared(reference, stream=1)
    assert not np.isclose(np.concatenate(features), other, rtol=1e-1, atol=1e-1).all(axis=1).any(), "another stream"
    monkeypatch.setattr(hidden_states, "_STREAM", "nobody's")
    with caplog.at_level(logging.WARNING):
        engine, reference = engine_of(named(STREAMS).config())
    assert engine.info.features is None
    assert "Gemma3nForCausalLM offers no hidden states: layer -1 yields (1, 1, 32) a row, not 32" in caplog.text
    run(engine, None)
    whole = DraftVocabulary(np.arange(tiny.VOCAB, dtype=np.int32), tiny.VOCAB)
    with pytest.raises(Unsupported, match="Gemma3nForCausalLM: its layers"):
        Teacher(reference, whole, torch.float32, NEED)


def test_ranks_that_share_a_model_have_its_states_whole() -> None:
    config = tiny.llama(num_key_value_heads=4)
    whole, _ = tiny.engine_and_plain(config)
    _, alone = run(whole, NEED)
    _, together = in_parallel(lambda: config, 2, lambda engine, _: run(engine, NEED))
    np.testing.assert_allclose(np.concatenate(together), np.concatenate(alone), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "within"), [(FeatureType.FLOAT16, 2**-11), (FeatureType.INT8, 1 / 250)])
def test_rows_are_written_in_messages_of_bounded_size_and_read_again(dtype: FeatureType, within: float) -> None:
    generator = np.random.default_rng(1)
    rows = generator.standard_normal((300, 3 * 512)).astype(np.float32)
    rows[:, :512] *= 1000
    rows[7, 512:1024] = 0
    messages = list(encode_features(4, 90, rows, 3, dtype))
    assert len(messages) > 1
    assert max(message.size for message in messages) <= MAX_FEATURE_BYTES
    assert [each.first_position for each in messages] == [90, *(each.end for each in messages[:-1])]
    back = np.concatenate([decode_features(message) for message in messages])
    largest = np.abs(rows.reshape(300, 3, 512)).max(axis=2).repeat(512, axis=1)
    assert (np.abs(back - rows) <= within * largest).all()
    (message,) = encode_features(1, 0, np.array([[np.nan, np.inf, -np.inf, 1e6]], np.float32), 1, dtype)
    cut = decode_features(message)[0]
    assert np.isfinite(cut).all(), "what cannot be written"
    assert (cut[0], cut[1] > 6e4, cut[2] < -6e4) == (0, True, True)
