"""Hidden states that engines keep are those of the model's own forward pass, and cost no bit of the logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine import hidden_states
from paceline.engine.decoder import build_engine
from paceline.engine.feature_rows import decode_features, encode_features
from paceline.engine.features import FeatureRows
from paceline.engine.interface import Logits, StepItem, StepPlan
from paceline.engine.parallel.engine import ParallelEngine
from paceline.engine.table.engine import TABLE_FEATURES, load_table, table_features
from paceline.engine.transformer import TransformerEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import Unsupported
from paceline.protocol.features import EMBEDDING, FINAL, MAX_FEATURE_BYTES, FeatureNeed, FeatureType
from paceline.protocol.proposal import ROOT
from paceline.runtime.config import EngineSettings
from paceline_training.teacher import Teacher
from tests.engine import tiny
from tests.engine.families import SERVED, WINDOW, Family
from tests.engine.parallel.test_parallel_engine import in_parallel

NEED = FeatureNeed((1, FINAL, EMBEDDING, 0, 2))
TEXT = (5, 9, 2, 77, 31, 8, 40, 41)
OTHER = StepItem(2, 0, (50, 51, 52), logit_rows=(0, 2))
TREE = StepItem(1, 6, (11, 12, 13, 14, 15), (ROOT, ROOT, 0, 1, 0), logit_rows=(0, 1, 2, 3, 4))
PATHS = ((11,), (12,), (11, 13), (12, 14), (11, 15))
STEPS = (
    (StepItem(1, 0, TEXT[:4], logit_rows=(3,)), OTHER),
    (StepItem(1, 4, TEXT[4:6], logit_rows=(0, 1)),),
    (StepItem(2, 3, (1,), logit_rows=(0,)), TREE),
)
LONG = (*TEXT, 3, 12, 60, 23, 71, 90)
"""Longer than the tiny models' windows."""
LONG_TREE = StepItem(1, 14, (11, 12, 13, 14, 15), (ROOT, ROOT, 0, 1, 0), logit_rows=(0, 1, 2, 3, 4))
LONG_STEPS = (
    (StepItem(1, 0, LONG[:10], logit_rows=(9,)), OTHER),
    (StepItem(1, 10, LONG[10:], logit_rows=(3,)),),
    (StepItem(2, 3, (1,), logit_rows=(0,)), LONG_TREE),
)
LONG_PATHS = [*(LONG[: end + 1] for end in range(14)), *((*LONG, *path) for path in PATHS)]
LONG_NEED = FeatureNeed((0, FINAL, EMBEDDING, 1))


def run(
    engine: TransformerEngine | ParallelEngine,
    need: FeatureNeed | None,
    steps: Sequence[tuple[StepItem, ...]] = STEPS,
) -> tuple[list[Logits], list[FeatureRows]]:
    """Logits of all steps; features of session 1's rows, where they are wanted."""
    logits, features = [], []
    for session in (1, 2):
        engine.open(session, 40)
    if need is not None:
        engine.keep_features(1, need)
    for items in steps:
        logits += [rows.copy() for rows in engine.step(StepPlan(items))]
        if need is not None:
            features.append(engine.features(1).copy())
    for session in (1, 2):
        engine.close(session)
    return logits, features


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_states_are_the_models_own_and_logits_stay_as_they_are(family: str, reproducible: bool) -> None:
    settings = {"reproducible": True, "reproducible_rows": 8} if reproducible else {}
    config = tiny.FAMILIES[family]()
    engine, _ = tiny.engine_and_plain(config, **settings)
    assert isinstance(engine, TransformerEngine)
    assert engine.info.features is not None
    assert (engine.info.features.layers, engine.info.features.hidden) == (3, config.hidden_size)
    without, _ = run(engine, None)
    kept, features = run(engine, NEED)
    for one, same in zip(kept, without, strict=True):
        np.testing.assert_array_equal(one, same)
    reference = tiny.random_model(config)
    paths = [*(TEXT[: end + 1] for end in range(6)), *((*TEXT[:6], *path) for path in PATHS)]
    right = [own_states(reference, path) for path in paths]
    np.testing.assert_allclose(np.concatenate(features), np.stack(right), rtol=1e-3, atol=1e-3)
    shifted = FeatureNeed((2, FINAL, EMBEDDING, 1, 0))
    wrong = [own_states(reference, path, shifted) for path in paths]
    assert not np.allclose(np.concatenate(features), np.stack(wrong), rtol=1e-1, atol=1e-1), "a layer further"


def inner_of(model: Any) -> tuple[Any, Any]:
    """The module that has the layers, and those, as families call them."""
    for inner in model.modules():
        for name in ("layers", "h"):
            stack = getattr(inner, name, None)
            if (
                isinstance(stack, torch.nn.ModuleList)
                and len(stack) == model.config.get_text_config().num_hidden_layers
            ):
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


def engine_of(family: Family) -> tuple[TransformerEngine, Any]:
    """An engine, and the same model as transformers made it."""
    tokenizer, settings = TableTokenizer(tiny.VOCAB, None), EngineSettings(threads=1, kv_bytes=1 << 22)
    engine = build_engine(tiny.random_model(family.config()), tokenizer, settings, family.name)
    assert isinstance(engine, TransformerEngine)
    return engine, tiny.random_model(family.config()).eval()


BY_NAME = {family.name: family for family in SERVED}
STREAMS = "Gemma 3n"
OTHERS = ("Mistral 7B v0.1", "Qwen 3 MoE", "DeepSeek-V3, R1, Kimi K2", STREAMS, "Llama 4")
"""In every run: windows; experts; latent attention and experts; layers that carry four streams; another base."""


def marked(family: Family) -> Any:
    return pytest.param(family, id=family.name, marks=() if family.name in OTHERS else pytest.mark.full)


@pytest.mark.parametrize("family", [*map(marked, SERVED)])
def test_states_of_every_family_are_those_that_transformers_tells(family: Family) -> None:
    engine, reference = engine_of(family)
    offer, text = engine.info.features, reference.config.get_text_config()
    assert offer is not None
    assert (offer.layers, offer.hidden) == (text.num_hidden_layers, text.hidden_size)
    without, _ = run(engine, None, LONG_STEPS)
    kept, features = run(engine, LONG_NEED, LONG_STEPS)
    for one, same in zip(kept, without, strict=True):
        np.testing.assert_array_equal(one, same)
    found = np.concatenate(features)
    right = np.stack([own_states(reference, path, LONG_NEED) for path in LONG_PATHS])
    np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)
    shifted = FeatureNeed((1, FINAL, EMBEDDING, 0))
    wrong = np.stack([own_states(reference, path, shifted) for path in LONG_PATHS])
    assert not np.allclose(found, wrong, rtol=1e-1, atol=1e-1), "a layer further"


def test_that_comparison_notices_a_window() -> None:
    """The same weights without one: rows behind its end have other states, those before it the same."""
    engine, _ = engine_of(BY_NAME["Mistral 7B v0.1"])
    _, features = run(engine, LONG_NEED, LONG_STEPS)
    whole = tiny.random_model(BY_NAME["Mistral Small, Nemo"].config()).eval()
    right = np.stack([own_states(whole, path, LONG_NEED) for path in LONG_PATHS])
    same = np.isclose(np.concatenate(features), right, rtol=1e-3, atol=1e-3)
    assert same[:WINDOW].all()
    assert not same[WINDOW:].all(axis=1).any()


def test_that_comparison_notices_another_stream() -> None:
    engine, reference = engine_of(BY_NAME[STREAMS])
    _, features = run(engine, LONG_NEED, LONG_STEPS)
    other = np.stack([own_states(reference, path, LONG_NEED, stream=1) for path in LONG_PATHS])
    assert not np.isclose(np.concatenate(features), other, rtol=1e-1, atol=1e-1).all(axis=1).any()


def test_layers_that_yield_more_than_a_vector_a_row_are_known_at_loading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams that nothing is known of: no features are offered, and none are kept in a step."""
    monkeypatch.setattr(hidden_states, "_STREAM", "nobody's")
    with caplog.at_level(logging.WARNING):
        engine, reference = engine_of(BY_NAME[STREAMS])
    assert engine.info.features is None
    assert "Gemma3nForCausalLM offers no hidden states: layer -1 yields (1, 1, 32) a row, not 32" in caplog.text
    run(engine, None, LONG_STEPS)
    whole = DraftVocabulary(np.arange(tiny.VOCAB, dtype=np.int32), tiny.VOCAB)
    with pytest.raises(Unsupported, match="Gemma3nForCausalLM: its layers"):
        Teacher(reference, whole, torch.float32, LONG_NEED)


def test_compiled_steps_give_the_bits_that_the_layers_give() -> None:
    engine, _ = tiny.engine_and_plain(tiny.FAMILIES["llama"]())
    assert isinstance(engine, TransformerEngine)
    if engine.row_decoder is None:
        pytest.skip("this CPU has no vectors of 512 bits")
    _, compiled = run(engine, NEED)
    engine.row_decoder = None
    _, layered = run(engine, NEED)
    for one, same in zip(compiled, layered, strict=True):
        np.testing.assert_array_equal(one, same)


def test_ranks_that_share_a_model_have_its_states_whole() -> None:
    config = tiny.llama(num_key_value_heads=4)
    whole, _ = tiny.engine_and_plain(config)
    assert isinstance(whole, TransformerEngine)
    _, alone = run(whole, NEED)
    _, together = in_parallel(lambda: config, 2, lambda engine, _: run(engine, NEED))
    np.testing.assert_allclose(np.concatenate(together), np.concatenate(alone), rtol=1e-3, atol=1e-3)


def test_a_table_models_features_are_a_function_of_the_tokens_so_far() -> None:
    engine = load_table("table:vocab=97,seed=1")
    need = FeatureNeed((EMBEDDING, 3, FINAL))
    assert engine.info.features == TABLE_FEATURES
    for session in (1, 2):
        engine.open(session, 40)
    engine.keep_features(1, need)  # type: ignore[attr-defined]
    found = []
    for items in STEPS:
        engine.step(StepPlan(items))
        found.append(engine.features(1))  # type: ignore[attr-defined]
    paths = [*(TEXT[: end + 1] for end in range(6)), *((*TEXT[:6], *path) for path in PATHS)]
    np.testing.assert_array_equal(np.concatenate(found), [table_features(path, need) for path in paths])
    assert len({table_features(path, need).tobytes() for path in paths}) == len(paths)
    assert len({tuple(table_features(TEXT, FeatureNeed((layer,)))) for layer in range(FINAL, 4)}) == 6


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


@pytest.mark.parametrize("dtype", list(FeatureType))
def test_values_that_cannot_be_written_are_cut(dtype: FeatureType) -> None:
    (message,) = encode_features(1, 0, np.array([[np.nan, np.inf, -np.inf, 1e6]], np.float32), 1, dtype)
    back = decode_features(message)[0]
    assert np.isfinite(back).all()
    assert (back[0], back[1] > 6e4, back[2] < -6e4) == (0, True, True)
