"""What is refused by name, what the self-check catches, and what loading promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

from paceline.config import EngineSettings
from paceline.engine.decoder import build_engine, keep_layers, numeric_fingerprint, refuse_config
from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.kv import SessionKV
from paceline.engine.loading import load_engine
from paceline.engine.transformer import TransformerEngine
from paceline.errors import InvalidInput, Unsupported
from paceline.tokenizer import TableTokenizer
from tests.engine import tiny
from tests.models.saving import save_with_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(**SHAPE, sliding_window=4096), "softcap"),
        (MistralConfig(**SHAPE, sliding_window=16), "sliding window of 16 tokens"),
        (GptOssConfig(**SHAPE, num_local_experts=2, sliding_window=4096), "s_aux"),
        (BloomConfig(vocab_size=tiny.VOCAB, hidden_size=32, n_layer=2, n_head=4), "attention interface"),
        (
            MambaConfig(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
            "linear_attention",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_packing_cannot_do_exactly_is_refused(config: PreTrainedConfig, message: str) -> None:
    settings = EngineSettings(threads=1, max_model_len=100)
    with pytest.raises(Unsupported, match=message):
        build_engine(tiny.random_model(config), TableTokenizer(tiny.VOCAB, None), settings, "refused")


@pytest.mark.parametrize(
    ("config", "message"),
    [(T5Config(), "encoder-decoder"), (Qwen3NextConfig(), "linear_attention")],
)
def test_configurations_are_refused_before_weights_load(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        refuse_config(config)


def test_rotary_frequencies_that_depend_on_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    with pytest.raises(Unsupported, match="rope type dynamic past 64 tokens"):
        tiny.engine_and_plain(tiny.llama(rope_parameters=rope))


def test_a_sliding_window_that_never_slides_is_served() -> None:
    engine, _ = tiny.engine_and_plain(MistralConfig(**SHAPE, sliding_window=16), max_model_len=16)
    assert engine.info.max_length == 16


def _sees_all(self: TransformerEngine, item: StepItem) -> torch.Tensor:
    return torch.zeros((2 * len(item.token_ids), item.base_length + len(item.token_ids)))


def _sees_kept_and_new(item: StepItem) -> list[tuple[int, list[int]]]:
    return [(item.base_length + len(item.token_ids), [])] * len(item.token_ids)


def _moves_nothing(self: SessionKV, base_length: int, kept_path: Sequence[int]) -> None:
    assert base_length <= self.capacity


def _wrong_positions(item: StepItem) -> tuple[int, ...]:
    return tuple(range(1, len(item.token_ids) + 1))


@pytest.mark.parametrize(
    ("target", "mutant", "compiled"),
    [
        ("paceline.engine.transformer.TransformerEngine._mask", _sees_all, False),
        ("paceline.engine.row_attention._seen", _sees_kept_and_new, False),
        ("paceline.engine.row_attention._seen", _sees_kept_and_new, True),
        ("paceline.engine.kv.SessionKV.keep", _moves_nothing, False),
        ("paceline.engine.kv.SessionKV.keep", _moves_nothing, True),
        ("paceline.engine.transformer.depths", _wrong_positions, False),
        ("paceline.engine.transformer.depths", _wrong_positions, True),
    ],
    ids=[
        "no tree mask",
        "tree rows that see each other",
        "tree rows that see each other, compiled",
        "no compaction",
        "no compaction, compiled",
        "tree positions by row",
        "tree positions by row, compiled",
    ],
)
def test_the_self_check_catches(
    monkeypatch: pytest.MonkeyPatch, target: str, mutant: Callable[..., Any], compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr("paceline.engine.decoder.has_wide_vectors", lambda: False)
    monkeypatch.setattr(target, mutant)
    with pytest.raises(Unsupported, match="packed logits differ"):
        tiny.engine_and_plain(tiny.llama())


def test_padding_is_cut_and_a_vocabulary_wider_than_the_logits_is_refused() -> None:
    engine, _ = tiny.engine_and_plain(tiny.qwen3_padded())
    assert engine.info.fingerprint.vocab_size == tiny.VOCAB
    with pytest.raises(Unsupported, match="tokenizer of 98 ids over logits of width 97"):
        build_engine(tiny.random_model(tiny.llama()), TableTokenizer(98, None), EngineSettings(threads=1), "tiny")


def test_kept_layers_are_the_models_own(tmp_path: Path) -> None:
    save_with_tokenizer(tiny.random_model(tiny.llama(num_hidden_layers=4)), tmp_path)
    settings = EngineSettings(threads=1)
    engine = load_engine(f"{tmp_path}#layers=0,3", settings)
    again = load_engine(str(tmp_path), settings, layers=(0, 3))
    assert engine.info.fingerprint.model.endswith("#layers=0,3")
    assert engine.info.fingerprint.numeric == again.info.fingerprint.numeric
    model = tiny.random_model(tiny.llama(num_hidden_layers=4))
    keep_layers(model, (0, 3))
    plain = tiny.Plain(model)
    engine.open(1, 4)
    (logits,) = engine.step(StepPlan((StepItem(1, 0, (1, 2, 3), logit_rows=(2,)),)))
    np.testing.assert_allclose(logits[0], plain.logits([1, 2, 3]).numpy(), atol=2e-4, rtol=0)
    with pytest.raises(InvalidInput, match=r"layers = \(0, 4\)"):
        load_engine(str(tmp_path), settings, layers=(0, 4))


def test_settings_outside_the_model_are_refused() -> None:
    with pytest.raises(InvalidInput, match="max_model_len = 257: must be at most 256"):
        tiny.engine_and_plain(tiny.llama(), max_model_len=257)
    with pytest.raises(InvalidInput, match="32 KV rows"):
        tiny.engine_and_plain(tiny.llama(), kv_bytes=1000)
    with pytest.raises(InvalidInput, match="device = 'abacus'"):
        load_engine("table-less/model", EngineSettings(threads=1, device="abacus"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a decoder that transformers loads"):
        load_engine(str(tmp_path), EngineSettings(threads=1))


def test_the_numeric_fingerprint_tells_models_and_lengths_apart() -> None:
    one, same, other = (tiny.random_model(tiny.llama(), seed) for seed in (0, 0, 1))
    assert numeric_fingerprint(one, 64) == numeric_fingerprint(same, 64)
    assert len({numeric_fingerprint(one, 64), numeric_fingerprint(one, 65), numeric_fingerprint(other, 64)}) == 3


def test_tables_load_by_the_same_door() -> None:
    engine = load_engine("table:vocab=8,max_length=9", EngineSettings())
    assert engine.info.max_length == 9
