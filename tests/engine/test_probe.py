"""How far back rows see, read off masks: right, refused, and in no more time for a longer context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.engine import probe
from paceline.engine.attention import Horizon
from paceline.protocol.errors import Unsupported


def _rule_of(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> probe.Rule:
    return lambda batch, head, row, key: (key <= row) & change(row, key)


RULES: dict[str, tuple[probe.Rule, Horizon | None]] = {
    "everything": (_rule_of(lambda row, key: key >= 0), None),
    "a window": (_rule_of(lambda row, key: row - key < 4096), Horizon(4096)),
    "chunks": (_rule_of(lambda row, key: row // 8192 == key // 8192), Horizon(8192, is_chunked=True)),
}
OTHER_RULES: dict[str, probe.Rule] = {
    "a window with a sink": _rule_of(lambda row, key: (row - key < 4096) | (key == 0)),
    "every other key": _rule_of(lambda row, key: (row - key) % 2 == 0),
    "a window that grows": _rule_of(lambda row, key: row - key < 4096 + row // 65536),
    "nothing": _rule_of(lambda row, key: key < 0),
    "later keys": lambda batch, head, row, key: key <= row + 1,
}


def test_a_mask_is_where_the_model_is() -> None:
    rule, _ = RULES["everything"]
    mask = probe._mask(batch_size=1, q_length=2, kv_length=3, mask_function=rule, device=torch.device("meta"))
    assert (mask.device.type, mask.shape) == ("meta", (1, 1, 2, 3))


@pytest.mark.parametrize("length", [10_000, 10**7, 1 << 31])
def test_a_context_of_any_length_is_probed_in_no_more_time(length: int) -> None:
    for rule, horizon in RULES.values():
        asked: list[int] = []

        def counted(*given: Any, rule: probe.Rule = rule, asked: list[int] = asked) -> torch.Tensor:
            asked.append(given[2].numel())
            return rule(*given)

        assert probe._horizon("tiny", counted, length, torch.device("cpu")) == horizon
        assert sum(asked) < 5_000_000, "keys that are compared, whatever the length"


@pytest.mark.parametrize("name", OTHER_RULES)
def test_masks_of_another_kind_are_refused(name: str) -> None:
    for length in (10**7,) if name == "a window that grows" else (10_000, 10**7):
        with pytest.raises(Unsupported, match="something other than the positions from one on up to their own"):
            probe._horizon("tiny", OTHER_RULES[name], length, torch.device("cpu"))
