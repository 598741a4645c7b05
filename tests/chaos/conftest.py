from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.cluster import ChaosCluster
from tests.chaos.shapes import SHAPES, SMALL


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """One cluster for a whole module, of no more processes than it takes."""
    with ChaosCluster(tmp_path_factory.mktemp("chaos"), SHAPES[SMALL]) as running:
        yield running
