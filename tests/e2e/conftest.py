from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster of table models for a whole module."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
