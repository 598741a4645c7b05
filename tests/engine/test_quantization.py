"""Targets in eight bits: the rounded model's logits, bits that nothing beside them changes, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.engine.cpu import row_products
from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.loading import load_engine
from paceline.engine.parallel.decoder import build_share
from paceline.engine.transformer import TransformerEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput, PacelineError, Unsupported
from paceline.runtime.config import EngineSettings
from tests.engine import tiny

pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no vectors of 512 bits")


def target() -> PreTrainedModel:
    return tiny.biased(tiny.random_model(tiny.qwen_coder()))


def engine_of(model: PreTrainedModel, quantization: str = "int8", **settings: Any) -> TransformerEngine:
    return tiny.transformer(copy.deepcopy(model), quantization=quantization, **({"threads": 2} | settings))


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """Each linear layer's weights as integers up to 127 times the scale of their output; nothing else."""
    made = copy.deepcopy(model)
    embedding = made.get_input_embeddings()
    for layer in made.modules():
        if isinstance(layer, torch.nn.Linear):
            weight = layer.weight.detach()
            scales = weight.abs().amax(dim=1, keepdim=True) / 127
            layer.weight = torch.nn.Parameter((weight / scales).round() * scales, requires_grad=False)
    assert made.get_input_embeddings() is embedding
    return made


def test_logits_are_those_of_the_rounded_model_and_of_a_draft_in_the_fast_dtype() -> None:
    model, text = target(), (3, 1, 4, 1, 5, 9, 20, 21)
    plain, exact = tiny.Plain(rounded(model)), tiny.Plain(model)
    engine, draft = engine_of(model), engine_of(model, "none", dtype="fast")
    logits = tiny.read(engine, text)
    for end, row in enumerate(logits, start=1):
        plain.assert_row(row, text[:end])
        assert np.abs(row - exact.logits(text[:end])).max() > 10 * tiny.TOLERANCE, "nothing was rounded"
    np.testing.assert_array_equal(tiny.read(draft, text), logits)
    own, others = engine.info.fingerprint, engine_of(model, "none").info.fingerprint
    assert (own.model, others.model) == ("tiny#int8", "tiny")
    assert own.numeric != others.numeric
    assert (own.tokenizer, own.vocab_size) == (others.tokenizer, others.vocab_size)


@pytest.mark.parametrize("part", ["scale", "bias"])
def test_a_quantised_engine_that_is_wrong_is_refused_at_start_up(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = row_products.PanelLinear.__init__

    def wrong(self: Any, linear: torch.nn.Linear, *arguments: Any) -> None:
        right(self, linear, *arguments)
        if part == "bias" and self.bias is not None:
            self.bias[0] += 1
        if part == "scale":
            self.panels[0, -4:].view(torch.float32).mul_(1.5)

    monkeypatch.setattr(row_products.PanelLinear, "__init__", wrong)
    with pytest.raises(Unsupported, match="packed logits differ from its own"):
        engine_of(target())


def test_what_is_not_built_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.decoder.load_decoder", None)
    for settings, named in (
        ({"reproducible": True}, "with reproducible = true"),
        ({"dtype": "bfloat16"}, r"with weights of torch\.bfloat16"),
        ({"device": "cuda"}, "on cuda: CPUs only"),
    ):
        with pytest.raises(Unsupported, match=f"quantization = int8 {named}"):
            load_engine(str(tmp_path), EngineSettings.model_validate({"quantization": "int8", **settings}))


def test_other_dtypes_cpus_ranks_and_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    model.model.layers[0].to(torch.bfloat16)
    with pytest.raises(Unsupported, match=r"quantization = int8 with weights of .*bfloat16"):
        engine_of(model)
    monkeypatch.setattr("paceline.engine.decoder.has_wide_vectors", lambda: False)
    with pytest.raises(Unsupported, match="quantization = int8 on this CPU"):
        engine_of(target())
    with pytest.raises(InvalidInput, match="quantization = 'int8': must be none: a table has no weights"):
        load_engine("table:vocab=9", EngineSettings(quantization="int8"))
    group: Any = type("TwoRanks", (), {"size": 2, "rank": 0})()
    settings = EngineSettings(threads=1, quantization="int8")
    with pytest.raises(PacelineError, match="quantization = int8 with tensor_parallel_size = 2"):
        build_share(target(), TableTokenizer(tiny.VOCAB, None), settings, "tiny", group, torch.device("cpu"))
