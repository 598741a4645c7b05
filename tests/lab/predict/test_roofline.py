"""Modelled step times against hand-computed ones and published speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.protocol.errors import InvalidInput, Unsupported
from paceline_lab.predict.published import PUBLISHED_SPEEDS, SIZES, PublishedSpeed
from paceline_lab.predict.roofline import GPUS, LAYER_MS, ModelPlacement, ModelSize


@pytest.mark.parametrize(
    "speed", [each for each in PUBLISHED_SPEEDS if each.decode_alone], ids=lambda each: each.model
)
def test_published_decode_speeds_are_met(speed: PublishedSpeed) -> None:
    assert abs(speed.off) < (0.15 if speed.weights == "bf16" else 0.2)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-8b", 8.03), ("llama-2-70b", 68.98), ("qwen3-0.6b", 0.596)]
)
def test_sizes_have_their_models_weights(name: str, billions: float) -> None:
    """As the models' cards have them: 8.03, 68.98, 32.8 and .6 billion."""
    assert SIZES[name].parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_step_by_hand() -> None:
    size = ModelSize(hidden=1000, layers=10, vocab=1000, attention=4_000_000, kv_values=20_000, mlp=5_000_000)
    place = ModelPlacement(size, "h100")
    read_bytes = 2 * (10 * 9_000_000 + 1_000_000)
    weights_ms = read_bytes / (3350e6 * 0.8)
    assert place.step_ms(1) == pytest.approx(weights_ms + 10 * LAYER_MS)
    kv_ms = 2 * 20_000 * 3 * 500 / (3350e6 * 0.8)
    assert place.step_ms(1, sessions=3, context=500) == pytest.approx(weights_ms + kv_ms + 10 * LAYER_MS)
    compute_ms = 2 * 91_000_000 * 4096 / (989e9 * 0.6)
    assert place.step_ms(4096) == pytest.approx(compute_ms + 10 * LAYER_MS)
    sent = 2 * 3 / 4 * 8 * 1000 * 2
    assert replace(place, tensor_parallel=4).all_reduce_ms(8) == pytest.approx(0.01 + sent / 450e6)


def test_experts_are_read_as_far_as_rows_reach_them() -> None:
    dense = ModelSize(hidden=8, layers=1, vocab=8, attention=100, kv_values=4, mlp=1000)
    sparse = replace(dense, experts=8, experts_per_token=2)
    assert sparse.read(1) == pytest.approx(100 + 2000 + 64)
    assert sparse.read(2) == pytest.approx(100 + 8000 * (1 - 0.75**2) + 64)
    assert sparse.read(1e6) == pytest.approx(100 + 8000 + 64)
    assert sparse.active == 100 + 2000 + 64


def test_lines_rise_and_memory_bounds_the_context() -> None:
    place = ModelPlacement(SIZES["llama-3.1-8b"], "h100")
    line = place.line()
    assert line.ms(5) == pytest.approx(place.step_ms(5))
    assert line.ms(5) + 2 * place.kv_ms(1000) == pytest.approx(place.step_ms(5, 2, 1000))
    assert line.ms(64) < 2 * line.ms(1) < line.ms(4096)
    # 72 GB less 16.06 of weights, at 131,072 bytes a token
    assert place.kv_tokens == pytest.approx((72e9 - 16.06e9) / 131_072, rel=1e-3)
    with pytest.raises(InvalidInput, match="weights GB"):
        ModelPlacement(SIZES["llama-3.3-70b"], "h100").check_fits()


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(InvalidInput, match="b200"):
        ModelPlacement(SIZES["qwen3-8b"], "h300")
    with pytest.raises(InvalidInput, match="intermediate_size"):
        ModelSize.of_config({"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 8, "num_attention_heads": 1})
    with pytest.raises(Unsupported, match="kv_lora_rank"):
        ModelSize.of_config({"kv_lora_rank": 512})
    assert all(gpu.tflops > 0 for gpu in GPUS.values())
