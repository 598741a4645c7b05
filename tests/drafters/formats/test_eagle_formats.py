"""What loaders of EAGLE read of published layouts, and what they refuse, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.formats.eagle import load_eagle
from paceline.drafters.formats.kinds import kind_of
from paceline.drafters.formats.speculators_eagle3 import load_speculators_eagle3
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.eagle_rows import build_eagle_rows
from paceline.drafters.heads.own_features import OwnFeaturesEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import DamagedFile, InvalidInput, PacelineError
from tests.drafters.formats import eagle_files
from tests.drafters.formats.eagle_files import DRAFT_IDS, HIDDEN, LLAMA, SETTINGS, Tensors, speculators_config
from tests.engine import tiny

EAGLE3_CONFIG = {**LLAMA, "draft_vocab_size": len(DRAFT_IDS)}
PUBLISHED: dict[str, Callable[[], tuple[dict[str, Any], Tensors]]] = {
    "EAGLE-1": lambda: (dict(LLAMA), eagle_files.eagle1_tensors()),
    "EAGLE-3": lambda: (dict(EAGLE3_CONFIG), eagle_files.eagle3_tensors()),
    "speculators": lambda: (speculators_config(), eagle_files.eagle3_tensors("layers.0")),
}
"""A configuration and the tensors of each layout."""
Change = Callable[[dict[str, Any], Tensors], object]
"""Of a configuration and its tensors, in place."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetWeights:
    return eagle_files.write_target(tmp_path_factory.mktemp("target"))


def _delete(name: str) -> Change:
    return lambda _, tensors: tensors.pop(name)


def _put(name: str, tensor: torch.Tensor) -> Change:
    return lambda _, tensors: tensors.update({name: tensor})


def _set(**settings: Any) -> Change:
    return lambda config, _: config.update(settings)


def _layer(**settings: Any) -> Change:
    return lambda config, _: config["transformer_layer_config"].update(settings)


def _method(**settings: Any) -> Change:
    return lambda config, _: config["speculators_config"]["proposal_methods"].append(settings)


def _absolute_ids(_: object, tensors: Tensors) -> None:
    """d2t as SafeAILab's code never writes it."""
    tensors["d2t"] = torch.arange(len(DRAFT_IDS))


EAGLE1: dict[str, tuple[Change, str]] = {
    "fc.bias is there unless bias is false": (_delete("fc.bias"), r"tensors missing: 1 \(fc\.bias\)"),
    "no bias": (_set(bias=False), r"EAGLE1 with tensors fc\.bias"),
    "no number": (_set(bias="no"), "bias = 'no': must be true or false"),
    "other ids": (_set(vocab_size=98), "vocab_size = 98: must be 97"),
    "quantised": (_put("fc.bias", torch.ones(HIDDEN, dtype=torch.int8)), r"fc\.bias of torch\.int8"),
}
EAGLE3: dict[str, tuple[Change, str]] = {
    "no map": (_delete("d2t"), "with a tensor d2t"),
    "a map of ids": (_absolute_ids, "t2d = 32: must be true at d [+] d2t"),
    "a short map": (_put("d2t", torch.zeros(3, dtype=torch.long)), r"d2t = \(3,\): must be \[32\]"),
    "a map that falls": (_put("d2t", -torch.arange(32)), "ascending ids in"),
    "another shape": (_put("fc.weight", torch.ones(HIDDEN, HIDDEN)), r"fc\.weight \[32, 32\], not \[32, 96\]"),
    "more layers": (_set(num_hidden_layers=2), "num_hidden_layers = 2: must be 1"),
    "no features": (_set(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state = false"),
    "a layer that isn't there": (
        _set(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}),
        r"feature layers by input = \(2, 4, 9\)",
    ),
}
SPECULATORS: dict[str, tuple[Change, str]] = {
    "top k": (_method(verifier_accept_k=5), "verifier_accept_k = 5: must be at most 1"),
    "parallel": (_set(speculators_model_type="peagle"), "speculators_model_type = peagle"),
    "two norms": (_set(norm_before_fc=True, fc_norm=True), "norm_before_fc and fc_norm"),
    "windows": (
        _layer(model_type="qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=0),
        "sliding_attention",
    ),
    "other layers": (_layer(model_type="gpt_neox"), "model type gpt_neox"),
    "no layers": (_set(transformer_layer_config={}), "transformer_layer_config"),
    "another width": (_set(target_hidden_size=48), "width of a feature = 48: must be 32"),
    "the same layer twice": (_set(eagle_aux_hidden_state_layer_ids=[2, 2, 4]), "different ones of"),
}


REFUSED = {
    f"{layout}: {case}": (layout, *change)
    for layout, changes in (("EAGLE-1", EAGLE1), ("EAGLE-3", EAGLE3), ("speculators", SPECULATORS))
    for case, change in changes.items()
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_as_published_is_refused(case: str, target: TargetWeights, tmp_path: Path) -> None:
    layout, change, message = REFUSED[case]
    config, tensors = PUBLISHED[layout]()
    change(config, tensors)
    eagle_files.write_draft(tmp_path, config, tensors)
    load = load_speculators_eagle3 if layout == "speculators" else load_eagle
    with pytest.raises(PacelineError, match=message):
        load(tmp_path, target, SETTINGS)


@pytest.fixture
def drafts(tmp_path: Path) -> dict[str, Path]:
    """A folder of each layout."""
    return {name: eagle_files.write_draft(tmp_path / name, *made()) for name, made in PUBLISHED.items()}


def test_folders_are_told_apart_and_loaded_as_their_kind(target: TargetWeights, drafts: dict[str, Path]) -> None:
    eagle_files.write_draft(drafts["EAGLE-1"] / "pickled", *PUBLISHED["EAGLE-1"](), pickled=True)
    folders = {**drafts, "pickled": drafts["EAGLE-1"] / "pickled", "target": Path(target.source.location)}
    kinds = {name: kind_of(folder) for name, folder in folders.items()}
    names = {name: kind and kind.name for name, kind in kinds.items()}
    eagle = dict.fromkeys(("EAGLE-1", "EAGLE-3", "pickled"), "EAGLE")
    assert names == {**eagle, "speculators": "speculators", "target": None}
    for name in ("EAGLE-3", "speculators"):
        kind = kinds[name]
        assert kind is not None
        engine = kind.load(drafts[name], target, SETTINGS)
        assert engine.need.layers == (1, 3, 4)
        assert engine.info.fingerprint.model == name
        assert engine.info.fingerprint.tokenizer == target.tokenizer.fingerprint


def test_equal_vocabularies_need_no_maps_and_ignore_them(target: TargetWeights, tmp_path: Path) -> None:
    every = tuple(range(tiny.VOCAB))
    tensors = eagle_files.eagle3_tensors(draft_ids=every)
    tensors |= {"d2t": torch.full((tiny.VOCAB,), 3), "t2d": torch.ones(tiny.VOCAB, dtype=torch.bool)}
    eagle_files.write_draft(tmp_path, {**LLAMA, "draft_vocab_size": tiny.VOCAB}, tensors)
    assert load_eagle(tmp_path, target, SETTINGS).target_ids is None


def test_rotations_are_those_of_the_configuration(target: TargetWeights, tmp_path: Path) -> None:
    config = {**EAGLE3_CONFIG, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    folder = eagle_files.write_draft(tmp_path, config, eagle_files.eagle3_tensors())
    frequencies = load_eagle(folder, target, SETTINGS).network.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, 5e5 ** -(torch.arange(4) / 4) / 2)


def test_a_draft_narrower_than_its_target_brings_its_own_embedding(target: TargetWeights, tmp_path: Path) -> None:
    wide = replace(target, config=eagle_files.target_config(hidden_size=48))
    tensors = eagle_files.eagle3_tensors("layers.0", target_hidden=48)
    folder = eagle_files.write_draft(tmp_path, speculators_config(target_hidden_size=48), tensors)
    assert load_speculators_eagle3(folder, wide, SETTINGS).network.feature_width == 3 * 48
    del tensors["embed_tokens.weight"]
    folder = eagle_files.write_draft(tmp_path / "bare", speculators_config(target_hidden_size=48), tensors)
    wide = eagle_files.write_target(tmp_path / "wide", hidden_size=48)
    with pytest.raises(InvalidInput, match=r"embed_tokens\.weight \[97, 48\], not \[97, 32\]"):
        load_speculators_eagle3(folder, wide, SETTINGS)


def test_a_shallow_target_needs_listed_layers(tmp_path: Path) -> None:
    shallow = eagle_files.write_target(tmp_path / "target", num_hidden_layers=4)
    folder = eagle_files.write_draft(tmp_path / "draft", EAGLE3_CONFIG, eagle_files.eagle3_tensors())
    with pytest.raises(InvalidInput, match="layers = 4: must be at least 7"):
        load_eagle(folder, shallow, SETTINGS)


def test_ids_that_no_token_has_are_never_drafted(target: TargetWeights, tmp_path: Path) -> None:
    folder = eagle_files.write_draft(tmp_path, EAGLE3_CONFIG, eagle_files.eagle3_tensors())
    draft = load_eagle(folder, target, SETTINGS)
    engine = OwnFeaturesEngine(build_eagle_rows(draft, TableTokenizer(60, None), SETTINGS, "tiny"))
    engine.open(1, 8)
    engine.give(1, 0, np.ones((1, 3 * HIDDEN), np.float32))
    logits = tiny.step(engine, tiny.chain(1, 0, (1, 2)))
    assert logits.shape == (2, 60)
    assert set(np.flatnonzero(np.isfinite(logits[1]))) == {each for each in DRAFT_IDS if each < 60}


class _Code:
    """What a pickle may run when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


def test_a_pickle_of_more_than_tensors_is_refused_unread(
    target: TargetWeights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = eagle_files.write_draft(tmp_path, LLAMA, {})
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": _Code()}, folder / "pytorch_model.bin")
    with pytest.raises(DamagedFile, match=r"pytorch_model\.bin"):
        load_eagle(folder, target, SETTINGS)
    assert "run" not in capsys.readouterr().out
