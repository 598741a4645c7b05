"""The table of bounds in the operations page names settings and constants that exist, with their values."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.runtime.gateway_config import GatewayConfig

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
ROW = re.compile(r"^\| [^|]+ \| (\d+) \| `([\w.]+)` \| [^|]+ \|$", re.MULTILINE)
SERVICES: dict[str, Any] = {
    "coordinator": CoordinatorConfig(),
    "draft": DraftConfig(),
    "gateway": GatewayConfig(),
    "target": TargetConfig(),
}


def table() -> list[tuple[str, str]]:
    section = PAGE.read_text().partition("### What waits where, and its bound")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    found = ROW.findall(section)
    assert len(found) == len(rows) > 20, "each row has a number and a setting"
    return [(name, value) for value, name in found]


@pytest.mark.parametrize(("name", "value"), table())
def test_a_bound_is_what_the_page_says(name: str, value: str) -> None:
    first, _, rest = name.partition(".")
    if name.rpartition(".")[2].isupper():
        module, _, constant = name.rpartition(".")
        found = getattr(import_module(module), constant)
    else:
        found = reduce(getattr, rest.split("."), SERVICES[first])
    assert float(value) == found
