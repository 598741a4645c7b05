from __future__ import annotations

from tests.e2e.cluster import NEAR, TARGET, cluster_fixture

cluster = cluster_fixture(TARGET, NEAR)
