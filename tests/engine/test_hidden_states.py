"""Hidden states that engines keep are those of the model's own forward pass, and cost no bit of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.decoder import build_engine
from paceline.engine.feature_rows import decoded, encoded
from paceline.engine.features import FeatureRows
from paceline.engine.interface import Logits, StepItem, StepPlan
from paceline.engine.parallel.engine import ParallelEngine
from paceline.engine.table.engine import TABLE_FEATURES, load_table, table_features
from paceline.engine.transformer import TransformerEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.features import EMBEDDING, FINAL, MAX_FEATURE_BYTES, FeatureNeed, FeatureType
from paceline.protocol.proposal import ROOT
from paceline.runtime.config import EngineSettings
from tests.engine import tiny
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


def run(
    engine: TransformerEngine | ParallelEngine, need: FeatureNeed | None
) -> tuple[list[Logits], list[FeatureRows]]:
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


def own_states(model: Any, tokens: Sequence[int], need: FeatureNeed = NEED) -> FeatureRows:
    """Of the last token, as transformers tells them: entry i + 1 is layer i's output, the last one is normed."""
    states: list[torch.Tensor] = []
    stack: Any = model.base_model.layers
    hooks = [
        each.register_forward_hook(lambda _m, _a, out: states.append((out[0] if isinstance(out, tuple) else out)[0]))
        for each in stack
    ]
    with torch.inference_mode():
        out = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    by_layer = {EMBEDDING: out.hidden_states[0][0], FINAL: out.hidden_states[-1][0], **dict(enumerate(states))}
    for layer in range(len(states) - 1):
        torch.testing.assert_close(by_layer[layer], out.hidden_states[layer + 1][0])
    joined: FeatureRows = torch.cat([by_layer[layer][-1] for layer in need.layers]).float().numpy()
    return joined


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


def test_static_engines_offer_none() -> None:
    model, tokenizer = tiny.random_model(tiny.llama()), TableTokenizer(tiny.VOCAB, None)
    assert build_engine(model, tokenizer, EngineSettings(threads=1), "tiny", static=True).info.features is None


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
    messages = list(encoded(4, 90, rows, 3, dtype))
    assert len(messages) > 1
    assert max(message.size for message in messages) <= MAX_FEATURE_BYTES
    assert [each.first_position for each in messages] == [90, *(each.end for each in messages[:-1])]
    back = np.concatenate([decoded(message) for message in messages])
    largest = np.abs(rows.reshape(300, 3, 512)).max(axis=2).repeat(512, axis=1)
    assert (np.abs(back - rows) <= within * largest).all()


@pytest.mark.parametrize("dtype", list(FeatureType))
def test_values_that_cannot_be_written_are_cut(dtype: FeatureType) -> None:
    (message,) = encoded(1, 0, np.array([[np.nan, np.inf, -np.inf, 1e6]], np.float32), 1, dtype)
    back = decoded(message)[0]
    assert np.isfinite(back).all()
    assert (back[0], back[1] > 6e4, back[2] < -6e4) == (0, True, True)
