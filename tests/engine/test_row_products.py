"""Products in panels give what plain ones give, and for a row the same bits whatever is beside it."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.cpu.row_products import HUGE_PAGE, PanelLinear, has_wide_vectors, panels_of, pieces
from paceline.engine.cpu.thread_pool import ThreadPool
from paceline.engine.cpu.tiles import LANES, MOST_ROWS, PANELS

pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no vectors of 512 bits")

ROWS = (*range(1, MOST_ROWS + 2), 2 * MOST_ROWS + 1, 40)
OUTPUTS = (1, 16, 97, 16 * PANELS, 16 * PANELS + 16, 16 * PANELS + 33, 200)


def made(
    inputs: int, outputs: int, *, bias: bool, stored: torch.dtype = torch.float32
) -> tuple[torch.nn.Linear, PanelLinear]:
    torch.manual_seed(outputs)
    plain = torch.nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    return plain, PanelLinear(plain, ThreadPool(2), stored)


@pytest.mark.parametrize(("outputs", "bias"), [*((outputs, True) for outputs in OUTPUTS), (97, False)])
def test_products_are_the_plain_ones(outputs: int, bias: bool) -> None:
    """For a row the same bits whatever is beside it."""
    plain, panels = made(48, outputs, bias=bias)
    for rows in ROWS:
        batch = torch.randn(1, rows, 48)
        together = panels(batch)
        torch.testing.assert_close(together, plain(batch), rtol=1e-5, atol=1e-5)
        for row in range(rows):
            assert torch.equal(panels(batch[:, row : row + 1]), together[:, row : row + 1])


def test_integers_with_a_scale_for_each_output_are_near_the_weights() -> None:
    plain, panels = made(64, 97, bias=True, stored=torch.int8)
    scales = plain.weight.abs().amax(dim=1, keepdim=True) / 127
    rounded = torch.nn.Linear(64, 97)
    rounded.weight = torch.nn.Parameter((plain.weight / scales).round() * scales, requires_grad=False)
    rounded.bias = plain.bias
    for rows in ROWS:
        batch = torch.randn(1, rows, 64)
        torch.testing.assert_close(panels(batch), rounded(batch), rtol=1e-5, atol=1e-5)
        assert (panels(batch) - plain(batch)).abs().max() < 0.05


def test_weights_begin_where_a_large_page_may() -> None:
    for stored in (torch.float32, torch.int8):
        assert made(48, 97, bias=False, stored=stored)[1].panels.data_ptr() % HUGE_PAGE == 0


def test_an_output_without_weights_stays_its_bias() -> None:
    plain = torch.nn.Linear(16, 20).requires_grad_(False)
    plain.weight[3] = 0
    panels = PanelLinear(plain, ThreadPool(1), torch.int8)
    assert panels(torch.randn(1, 2, 16))[0, :, 3].tolist() == [plain.bias[3].item()] * 2


def test_pieces_cover_every_panel_once_and_the_last_are_small() -> None:
    for panels in range(1, 4 * PANELS + 2):
        spans = [panels_of(piece, panels * LANES) for piece in range(pieces(panels * LANES))]
        assert [first + index for first, count in spans for index in range(count)] == list(range(panels))
        assert all(count in (1, 2, PANELS) for _, count in spans), "there are tiles for these alone"
        assert spans[-1][1] <= PANELS // 2
