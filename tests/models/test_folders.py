"""Folders that hold more than their network, other numbers than it has, or files that lead elsewhere."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from paceline.engine.loading import load_engine
from paceline.engine.parallel.decoder import load_decoder_share
from paceline.models.config_limits import refuse_ignored, refuse_numbers
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import DamagedFile, InvalidInput, PacelineError, Unsupported
from tests.engine import tiny
from tests.engine.parallel.ranks import run_ranks
from tests.engine.tiny import THREAD
from tests.models.saving import change_json, save_with_tokenizer

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.0.self_attn."
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_with_tokenizer(tiny.random_model(tiny.llama(tie_word_embeddings=True)), folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "tiny")


def change_tensors(folder: Path, change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | dict(change(tensors)), file, {"format": "pt"})


def refusal(folder: Path) -> PacelineError:
    """Why a folder isn't served, and that it is told in a sentence, at once."""
    began = time.monotonic()
    with pytest.raises((InvalidInput, Unsupported)) as caught:
        load_engine(str(folder), THREAD)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    assert time.monotonic() - began < 20, "before work; a loaded machine takes a second for a load"
    return caught.value


SURPLUS: dict[str, Tensors] = {
    "a bias that the file does not speak of": {f"{LAYER}q_proj.bias": torch.ones(32)},
    "scales of a lost quantisation": {f"{LAYER}q_proj.weight_scale_inv": torch.ones(1, 1)},
    "a mask's name and a bias's shape": {f"{LAYER}bias": torch.ones(32)},
    "a layer more": {"model.layers.3.self_attn.q_proj.weight": torch.ones(32, 32)},
    "a norm": {f"{LAYER}q_norm.weight": torch.ones(8)},
    "a tower where the text is the whole": {"vision_tower.patch.weight": torch.ones(3)},
    "another head": {"score.weight": torch.ones(2, 32)},
}
HARMLESS: Tensors = {
    f"{LAYER}rotary_emb.inv_freq": torch.ones(4),
    "model.rotary_emb.inv_freq": torch.ones(4),
    f"{LAYER}masked_bias": torch.tensor(-1e9),
    "model.position_ids": torch.arange(8),
    "model.layers.3.eh_proj.weight": torch.ones(32, 64),
    "model.layers.3.self_attn.q_proj.weight": torch.ones(32, 32),
    "mtp.layers.0.self_attn.q_proj.weight": torch.ones(32, 32),
    "medusa_head.0.0.linear.weight": torch.ones(32, 32),
}
"""Rotations' frequencies, masks, positions, multi-token predictions, heads that draft."""


@pytest.mark.parametrize("name", SURPLUS)
def test_tensors_without_a_place_are_refused_and_named(folder: Path, name: str) -> None:
    change_tensors(folder, lambda _: SURPLUS[name])
    (tensor,) = SURPLUS[name]
    message = refusal(folder).message
    assert message.startswith(
        "model = 'tiny': must be without tensors that the network of its config.json has no place"
    )
    assert f": 1 ({tensor})" in message


@pytest.mark.parametrize("mask", [torch.float32, torch.uint8])
def test_tensors_that_say_nothing_are_left_alone(folder: Path, mask: torch.dtype) -> None:
    numeric = load_engine(str(folder), THREAD).info.fingerprint.numeric
    change_tensors(folder, lambda _: HARMLESS | {f"{LAYER}bias": torch.ones(1, 1, 8, 8, dtype=mask)})
    assert load_engine(str(folder), THREAD).info.fingerprint.numeric == numeric


def test_what_the_library_is_told_not_to_speak_of_is_refused_too(tmp_path: Path) -> None:
    """GPT-NeoX lists `attention.bias`, by which it means masks."""
    save_with_tokenizer(tiny.random_model(tiny.gpt_neox()), tmp_path)
    change_tensors(tmp_path, lambda _: {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8)})
    load_engine(str(tmp_path), THREAD)
    change_tensors(tmp_path, lambda _: {"gpt_neox.layers.0.attention.bias": torch.ones(32)})
    assert "1 (gpt_neox.layers.0.attention.bias)" in refusal(tmp_path).message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_numbers_of_few_bits_need_a_word_on_what_they_stand_for(folder: Path, dtype: torch.dtype) -> None:
    name = f"{LAYER}q_proj.weight"
    change_tensors(folder, lambda tensors: {name: tensors[name].to(dtype)})
    assert f"tensor {name} of " in refusal(folder).message
    assert "no quantization_config" in refusal(folder).message


def test_a_rank_refuses_surplus_tensors_too(folder: Path) -> None:
    change_tensors(folder, lambda _: SURPLUS["a norm"])
    with pytest.raises(InvalidInput, match="has no place for: 1"):
        run_ranks(1, lambda group: load_decoder_share(str(folder), THREAD, group, CPU), print)


NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 0}, "num_attention_heads = 0: must be a whole number in [1, "),
    ({"hidden_size": "32"}, "hidden_size = '32': must be"),
    ({"num_hidden_layers": 3.0}, "num_hidden_layers = 3.0: must be"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers = 10000000: must be a whole number in [1, 512]"),
    ({"vocab_size": 10**7}, "weights of config.json's network = "),
    ({"intermediate_size": None}, "intermediate_size"),
    ({"max_position_embeddings": 10**15}, "max_position_embeddings = 1000000000000000: must be"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be a number in [0, 1]"),
    ({"rms_norm_eps": -1}, "rms_norm_eps = -1: must be"),
    ({"attention_dropout": float("inf")}, "attention_dropout = inf: must be a finite number"),
    ({"hidden_act": "abacus"}, "KeyError: 'abacus'"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"text_config": {"num_attention_heads": 0}}, "text_config.num_attention_heads = 0: must be"),
    ({"transformers_weights": "../other.safetensors"}, "transformers_weights: weights have their usual names"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0: model type llama has no such setting"),
    ({"rope_theta": 5e5}, "rope_theta = 500000.0: must be 10000.0, as in rope_parameters"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "must be 'default', as in rope_parameters"),
]
ROTATIONS: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "abacus"}, "rope_type = 'abacus': must be one of default, linear,"),
    ({"factor": 2.0}, "factor = 2.0: must be absent: rope type default reads no such setting"),
    ({"rope_type": "linear", "facto": 2.0}, "Missing required keys"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fst": 3}, "beta_fst = 3: must be absent: rope type linear"),
    ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "type = 'linear': must be 'yarn', its rope_type"),
    ({"rope_type": "yarn", "factor": 0}, "factor = 0: must be a finite number above 0"),
    ({"rope_type": "yarn", "factor": "2"}, "factor = '2': must be a finite number above 0"),
]


NUMBERS += [({"rope_parameters": None, "rope_scaling": rope}, message) for rope, message in ROTATIONS]


@pytest.mark.parametrize(("changes", "message"), NUMBERS)
def test_settings_that_no_model_has_are_refused_before_one_is_made(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_json(folder / "config.json", **changes)
    assert message in refusal(folder).message


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../x", "C:\\x", "", 3])
def test_an_index_names_files_of_its_own_folder(folder: Path, path: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": path}}))
    message = refusal(folder).message
    assert message.startswith(
        f"file '{folder / INDEX}': weight_map['model.norm.weight'] = {path!r}: must be the name"
    )


def test_an_index_of_files_that_are_not_there_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    assert "weight_map = 'model-1.safetensors': must be the name of a file that is there" in refusal(folder).message


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json: an adapter; merge it" in refusal(folder).message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[" * 100_000),
        ("generation_config.json", "[]"),
        ("tokenizer.json", "\udcff"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "{"),
    ],
    ids=["cut", "deep", "a list", "no text", "deep tokenizer", "cut tokenizer"],
)
def test_a_file_that_is_no_json_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    error = refusal(folder)
    assert isinstance(error, DamagedFile)
    assert error.message.startswith(f"file '{folder / name}': damaged or truncated (")
    with pytest.raises(DamagedFile):
        load_tokenizer(str(folder))


def test_a_tokenizer_with_a_bad_expression_is_named(folder: Path) -> None:
    splits = {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}
    change_json(folder / "tokenizer.json", pre_tokenizer=splits)
    assert "tokenizer.json': damaged or truncated (Oniguruma error: premature end" in refusal(folder).message


@pytest.mark.full
def test_no_setting_that_a_model_type_has_is_taken_for_one_that_it_has_not(tmp_path: Path) -> None:
    checked = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            kind().save_pretrained(tmp_path)
            config = AutoConfig.from_pretrained(tmp_path)
            config.get_text_config()
        except (ValueError, StrictDataclassError):  # some need arguments, or hold several texts
            continue
        raw = json.loads((tmp_path / "config.json").read_text())
        refuse_numbers("saved", raw)
        refuse_ignored("saved", raw, config)
        checked += 1
    assert checked > 180
