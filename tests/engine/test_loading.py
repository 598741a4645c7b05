"""What is refused by name, what the self-check catches, and what loading promises."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, Llama4TextConfig, MistralConfig, MixtralConfig, T5Config

from paceline.engine.attention import Horizon
from paceline.engine.checks import refuse_config
from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.decoder import build_engine
from paceline.engine.fingerprint import numeric_fingerprint
from paceline.engine.interface import StepItem
from paceline.engine.loading import load_engine
from paceline.engine.parallel.decoder import load_decoder_share
from paceline.engine.weights import keep_layers
from paceline.models.gguf import convert_gguf
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput, Overloaded, Unsupported
from paceline.runtime.config import EngineSettings
from tests.engine import families, tiny
from tests.engine.parallel.ranks import run_ranks
from tests.engine.tiny import THREAD
from tests.models import gguf_files
from tests.models.saving import save_with_tokenizer

LAYER = "model.layers.1."
CPU = torch.device("cpu")
SHAPE = {name: value for name, value in families._SHAPE.items() if not name.endswith("_id")}


def test_configurations_are_refused_before_weights_load() -> None:
    for config, message in ((T5Config(), "encoder-decoder"), (DeepseekV4Config(), "compressed_attention")):
        with pytest.raises(Unsupported, match=message):
            refuse_config(config)


def test_positions_that_depend_on_the_step_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    with pytest.raises(Unsupported, match="rope type dynamic past 64 tokens"):
        tiny.engine_and_plain(tiny.llama(rope_parameters=rope))
    scaled = Llama4TextConfig(**SHAPE, num_local_experts=2, intermediate_size_mlp=48, floor_scale=100)
    with pytest.raises(Unsupported, match="scaled by their place in the step from 100 on"):
        tiny.engine_and_plain(scaled)


def test_a_sliding_window_that_never_slides_is_none() -> None:
    engine, _ = tiny.engine_and_plain(MistralConfig(**SHAPE, sliding_window=16), max_model_len=16)
    assert not engine.attention.has_windows
    assert engine.row_decoder is not None or not has_wide_vectors()


def _end(item: StepItem) -> int:
    return item.base_length + len(item.token_ids)


def _sees_all(item: StepItem, horizon: Horizon | None, first: int) -> NDArray[np.bool_]:
    return np.ones((len(item.token_ids), _end(item) - first), np.bool_)


@pytest.mark.parametrize(
    ("target", "mutant"),
    [
        ("attention.visible_keys", _sees_all),
        ("cpu.row_attention._visible_slots", lambda item, _: [(0, _end(item), [])] * len(item.token_ids)),
        ("kv.SessionKV.keep", lambda *_: None),
        ("transformer.depths", lambda item: tuple(range(1, len(item.token_ids) + 1))),
    ],
    ids=["no tree mask", "tree rows that see each other", "no compaction", "tree positions by row"],
)
def test_the_self_check_catches(monkeypatch: pytest.MonkeyPatch, target: str, mutant: Callable[..., Any]) -> None:
    monkeypatch.setattr(f"paceline.engine.{target}", mutant)
    for compiled in (False,) if mutant is _sees_all else (True, False):  # compiled steps have no mask
        if not compiled:
            monkeypatch.setattr("paceline.engine.decoder.has_wide_vectors", lambda: False)
        for sessions in (256, 1):
            with pytest.raises(Unsupported, match="packed logits differ"):
                tiny.engine_and_plain(tiny.llama(), max_num_seqs=sessions)


@pytest.mark.parametrize("settings", [{}, {"reproducible": True}, {"static": True}])
def test_a_limit_of_one_session_is_checked_with_one(caplog: pytest.LogCaptureFixture, settings: Any) -> None:
    model = tiny.random_model(tiny.llama())
    plain = tiny.Plain(model)
    with caplog.at_level(logging.INFO):
        engine = tiny.build(model, max_num_seqs=1, **settings)
    assert "checked a session at a time: 1 sessions are open" in caplog.text
    plain.assert_row(tiny.read(engine, (1, 2, 3))[-1], (1, 2, 3))
    engine.open(1, 20)
    with pytest.raises(Overloaded, match="1 sessions are open"):
        engine.open(2, 20)


def test_the_numeric_fingerprint_tells_models_and_lengths_apart() -> None:
    one, same, other = (tiny.random_model(tiny.llama(), seed) for seed in (0, 0, 1))
    assert numeric_fingerprint(one, 64) == numeric_fingerprint(same, 64)
    assert len({numeric_fingerprint(one, 64), numeric_fingerprint(one, 65), numeric_fingerprint(other, 64)}) == 3


def test_padding_is_cut_and_a_vocabulary_wider_than_the_logits_is_refused() -> None:
    engine, _ = tiny.engine_and_plain(tiny.qwen3_padded())
    assert engine.info.fingerprint.vocab_size == tiny.VOCAB
    with pytest.raises(Unsupported, match="tokenizer of 98 ids over logits of width 97"):
        build_engine(tiny.random_model(tiny.llama()), TableTokenizer(98, None), THREAD, "tiny")


def test_kept_layers_are_the_models_own(tmp_path: Path) -> None:
    save_with_tokenizer(tiny.random_model(tiny.llama(num_hidden_layers=4)), tmp_path)
    engine = load_engine(f"{tmp_path}#layers=0,3", THREAD)
    assert engine.info.fingerprint.model.endswith("#layers=0,3")
    model = tiny.random_model(tiny.llama(num_hidden_layers=4))
    keep_layers(model, (0, 3))
    plain = tiny.Plain(model)
    plain.assert_row(tiny.read(engine, (1, 2, 3))[2], [1, 2, 3])
    with pytest.raises(InvalidInput, match=r"layers = \(0, 4\)"):
        load_engine(f"{tmp_path}#layers=0,4", THREAD)


def test_settings_outside_the_model_are_refused() -> None:
    with pytest.raises(InvalidInput, match="max_model_len = 257: must be at most 256"):
        tiny.engine_and_plain(tiny.llama(), max_model_len=257)
    with pytest.raises(InvalidInput, match="32 KV rows"):
        tiny.engine_and_plain(tiny.llama(), kv_bytes=1000)
    with pytest.raises(InvalidInput, match="device = 'abacus'"):
        load_engine("table-less/model", EngineSettings(threads=1, device="abacus"))


@pytest.mark.parametrize(
    ("config", "gist"),
    [
        ({"model_type": "abacus"}, "model type `abacus` but Transformers does not recognize this architecture"),
        ({"model_type": "vit"}, "model type vit is none"),
        ({}, "Should have a `model_type` key in its config.json."),
        ({"model_type": "abacus", "auto_map": {"AutoConfig": "a.A"}}, "runs only with trust_remote_code = true"),
    ],
    ids=["unknown", "no decoder", "none", "code"],
)
def test_an_unsupported_model_type_is_refused_in_one_sentence(tmp_path: Path, config: Any, gist: str) -> None:
    with pytest.raises(InvalidInput, match="a decoder that transformers loads"):
        load_engine(str(tmp_path), THREAD)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput) as caught:
        load_engine(str(tmp_path), THREAD)
    message = caught.value.message
    assert message.startswith(f"model = {tmp_path.name!r}: must be a decoder that transformers loads (")
    assert message.endswith(f"{gist})")
    assert "\n" not in message
    assert len(message) < 300


def saved(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> str:
    save_with_tokenizer(tiny.random_model(tiny.llama(**config)), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return str(folder)


def load_share(folder: str, settings: EngineSettings) -> Any:
    return run_ranks(1, lambda group: load_decoder_share(folder, settings, group, CPU), print)


def test_tensors_that_are_not_the_networks_are_refused_and_named(tmp_path: Path) -> None:
    def lose_a_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(LAYER)]:
            del tensors[name]

    def other_shapes(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}mlp.up_proj.weight"] = torch.zeros(3, 4)
        del tensors["model.norm.weight"]

    first = ", ".join(f"{LAYER}{name}.weight" for name in ("input_layernorm", "mlp.down_proj", "mlp.gate_proj"))
    shapes = "tensors of another shape: 1 (model.layers.1.mlp.up_proj.weight [3, 4], not [48, 32])"
    for name, change, message in (
        ("missing", lose_a_layer, f"tensors missing: 9 ({first}, …)"),
        ("shapes", other_shapes, f"tensors missing: 1 (model.norm.weight); {shapes}"),
    ):
        folder = saved(tmp_path / name, change)
        for load in (load_engine, load_share):
            with pytest.raises(InvalidInput) as caught:
                load(folder, THREAD)
            assert caught.value.message == f"model = {name!r}: must be whole; {message}"


def test_a_tied_tensor_is_not_missing_where_its_other_half_is_there(tmp_path: Path) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"

    def move(tensors: dict[str, torch.Tensor]) -> None:
        tensors[head] = tensors.pop(embedding)

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[embedding]

    numbers = {
        load_engine(saved(tmp_path / name, change, tie_word_embeddings=True), THREAD).info.fingerprint.numeric
        for name, change in (("embedding", lambda tensors: None), ("head", move))
    }
    assert len(numbers) == 1
    with pytest.raises(InvalidInput, match=rf"tensors missing: 2 \({head}, {embedding}\)"):
        load_engine(saved(tmp_path / "neither", lose, tie_word_embeddings=True), THREAD)
    with pytest.raises(InvalidInput, match=rf"tensors missing: 1 \({embedding}\)"):
        load_engine(saved(tmp_path / "untied", lose), THREAD)


def test_missing_tensors_of_a_gguf_are_refused_and_named(tmp_path: Path) -> None:
    changed = {"blk.1.attn_norm.weight": None, "blk.1.ffn_up.weight": np.zeros((7, gguf_files.HIDDEN), np.float32)}
    gguf_files.write(tmp_path / "tiny.gguf", tensors=changed)
    message = (
        r"tensors missing: 1 \(model.layers.1.input_layernorm.weight\); "
        r"tensors of another shape: 1 \(model.layers.1.mlp.up_proj.weight \[7, 64\], not \[96, 64\]\)"
    )
    with pytest.raises(InvalidInput, match=message):
        load_engine(str(tmp_path / "tiny.gguf"), THREAD)
    with pytest.raises(InvalidInput, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")


def test_an_expert_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    save_with_tokenizer(tiny.random_model(MixtralConfig(**SHAPE, num_local_experts=2)), tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    expert = tensors.pop(name)
    missing = r"another shape: 1 \(model.layers.0.mlp.experts.down_proj \[1, 32, 48\], not \[2, 32, 48\]\)"
    for more, message in (({}, missing), ({name: expert.new_zeros(3, 4)}, "a decoder that transformers loads")):
        save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(InvalidInput, match=message):
            load_engine(str(tmp_path), THREAD)
