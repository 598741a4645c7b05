"""Packed linear layers give what plain ones give."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.cpu.linear import PackedLinear, can_pack, cpu_has_bfloat16, outside_reads, pack_linears
from tests.engine import tiny

pytestmark = pytest.mark.skipif(not can_pack(torch.nn.Linear(2, 2)), reason="this torch has no packed products")


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if cpu_has_bfloat16() else [])])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_the_plain_ones(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    plain = torch.nn.Linear(48, 97, bias=bias).to(dtype)
    packed, tolerance = PackedLinear(plain), 1e-5 if dtype is torch.float32 else 2e-2
    for rows in (1, 2, 8, 9, 40):
        batch = torch.randn(1, rows, 48).to(dtype)
        with torch.inference_mode():
            torch.testing.assert_close(packed(batch), plain(batch), rtol=tolerance, atol=tolerance)


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


def test_layers_of_one_weight_are_laid_out_once_and_other_dtypes_stay_plain() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight
    pack_linears(model, lambda linear: torch.nn.Sequential(linear))
    assert model[2] is model[0]
    assert model[1] is not model[0]
    assert not can_pack(torch.nn.Linear(2, 2).to(torch.float16))
    assert can_pack(torch.nn.Linear(2, 2).to(torch.bfloat16)) == cpu_has_bfloat16()


class _Router(torch.nn.Module):
    """Reads its layer's weights itself, where a row is chosen; `bias` says which of the two."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.read = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.called = torch.nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = getattr(self.read[1], self.reads)
        product: torch.Tensor = self.called(rows) + chosen.sum()
        return product


@pytest.mark.parametrize("reads", ["weight", "bias"])
def test_layers_whose_weights_other_code_reads_stay_what_they_are(reads: str) -> None:
    router, rows = _Router(reads), torch.randn(2, 4)
    with torch.inference_mode():
        before = router(rows)
        with outside_reads(router) as read:
            torch.testing.assert_close(router(rows), before, rtol=0, atol=0)
        assert read == {"read.*"}
        assert all(type(linear) is torch.nn.Linear for linear in (*router.read, router.called))
        pack_linears(router, exclude=read)
        torch.testing.assert_close(router(rows), before, rtol=1e-5, atol=1e-5)
    assert all(type(linear) is torch.nn.Linear for linear in router.read), "one that was not chosen, too"
    assert isinstance(router.called, PackedLinear)
