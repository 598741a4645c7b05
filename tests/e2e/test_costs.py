"""Services in processes of their own say what their steps take before anybody has asked them for one."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.rpc.link_kinds import service_costs
from tests.e2e.cluster import Cluster

TARGET = "table:vocab=64,seed=1,step_ms=6,row_ms=1"
NEAR = "table:vocab=64,seed=1,noise=0.2,step_ms=2,row_ms=0.5"


def test_lines_are_measured_at_load_and_shown(tmp_path: Path) -> None:
    with Cluster(tmp_path, TARGET, (f"model:{NEAR}",), coordinator_flags={"fan_out": 2}) as cluster:
        target, draft = cluster.address_of("target"), cluster.address_of("draft")
        loaded, drafts = service_costs("target", target), service_costs("draft", draft)
        assert isinstance(loaded, TargetCosts)
        assert isinstance(drafts, DraftCosts)
        for rows in (1, 8):
            assert loaded.alone.ms(rows) >= 6.0 + rows
            assert drafts.line.ms(rows) >= 2.0 + 0.5 * rows
        assert loaded.beside == loaded.alone, "no draft has worked beside it"
        with cluster.client() as client:
            speculation = SpeculationSettings(num_draft_tokens=3)
            client.generate(GenerateRequest(token_ids=(1, 2), seed=4, max_new_tokens=40, speculation=speculation))
        drafted, proposed = service_costs("target", target), service_costs("draft", draft)
        assert drafted.rows >= 1
        assert proposed.rows >= 1
        flags = ["--target", target, "--draft", draft, "--coordinator", cluster.address]
        shown = CliRunner().invoke(app, ["doctor", *flags])
        assert "target steps" in shown.stdout
        assert "draft steps" in shown.stdout
        assert "ms of 1, " in shown.stdout
