"""Packed linear layers give what plain ones give."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.cpu.linear import PackedLinear, can_pack, cpu_has_bfloat16, pack_linears
from tests.engine import tiny

pytestmark = pytest.mark.skipif(not can_pack(torch.nn.Linear(2, 2)), reason="this torch has no packed products")


DTYPES = [torch.float32, *([torch.bfloat16] if cpu_has_bfloat16() else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40])
def test_products_are_the_plain_ones(rows: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    plain = torch.nn.Linear(48, 97, bias=bias).to(dtype)
    batch = torch.randn(1, rows, 48).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(batch), plain(batch), rtol=tolerance, atol=tolerance)


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
    assert not can_pack(torch.nn.Linear(2, 2).to(torch.float16))
    assert can_pack(torch.nn.Linear(2, 2).to(torch.bfloat16)) == cpu_has_bfloat16()
