"""Packed linear layers give what plain ones give."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.linear import PackedLinear, can_pack, pack_linears
from tests.engine import tiny

pytestmark = pytest.mark.skipif(not can_pack(torch.nn.Linear(2, 2)), reason="this torch has no packed products")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40])
def test_products_are_the_plain_ones(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = torch.nn.Linear(48, 97, bias=bias)
    batch = torch.randn(1, rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(batch), plain(batch), rtol=1e-5, atol=1e-5)


def test_every_plain_layer_is_replaced_and_a_tied_embedding_kept() -> None:
    model = tiny.random_model(tiny.llama(tie_word_embeddings=True))
    tokens = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before = model(input_ids=tokens).logits
        pack_linears(model)
        after = model(input_ids=tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 3 * 7 + 1
    assert [name for name, weight in model.named_parameters() if weight.ndim == 2] == ["model.embed_tokens.weight"]


def test_other_dtypes_stay_plain() -> None:
    assert not can_pack(torch.nn.Linear(2, 2).to(torch.bfloat16))
