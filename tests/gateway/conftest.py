from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.gateways import GatewayCluster


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayCluster]:
    """One gateway before a whole cluster, for all tests that leave it as it was."""
    draft = "table:vocab=300,seed=1,noise=0.3,max_length=30000,max_kv_rows=200000"
    folder = tmp_path_factory.mktemp("gateway")
    with GatewayCluster(folder, drafters=(f"model:{draft}",)) as running:
        yield running
