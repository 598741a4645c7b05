"""TOML files become checked configurations, and configurations TOML files."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.local.service_process import write_config
from paceline.local.settings import ServeSettings, coordinator_flags, draft_flags, gpu_shares, target_flags
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig, load_config


@pytest.mark.parametrize(("drafter", "shares"), [("model:x", [0.72, 0.18]), ("ngram", [0.9, 0.0])])
def test_target_and_draft_of_one_machine_divide_its_gpu(drafter: str, shares: list[float]) -> None:
    flags = gpu_shares(ServeSettings(model="m", drafter=drafter))
    assert [each["engine.gpu_memory_utilization"] for each in flags] == shares


def test_written_configs_read_back_as_the_settings(tmp_path: Path) -> None:
    settings = ServeSettings(
        model='a "quoted" \\ name é',
        drafter="model:x",
        num_draft_tokens=6,
        max_model_len=128,
        dtype="float32",
        quantization="int8",
        seed=9,
    )
    write_config(TargetConfig, tmp_path / "t", target_flags(settings, 3))
    write_config(DraftConfig, tmp_path / "d", draft_flags(settings, 1))
    write_config(CoordinatorConfig, tmp_path / "c", coordinator_flags(settings, "h:1", "h:2"))
    read = load_config(TargetConfig, tmp_path / "t", {})
    assert (read.model, read.engine.threads, read.engine.max_model_len) == (settings.model, 3, 128)
    drafting = load_config(DraftConfig, tmp_path / "d", {})
    assert drafting.drafters == ("model:x",)
    assert (read.engine.quantization, drafting.engine.quantization) == ("int8", "none")
    served = load_config(CoordinatorConfig, tmp_path / "c", {})
    assert (served.seed, served.num_draft_tokens, served.target.address) == (9, 6, ("h:1",))
    assert served.draft is not None
    assert served.draft.address == ("h:2",)
