"""What is restated here is as SGLang's source has it: `PACELINE_SGLANG_SOURCE` names a folder with its package."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import random
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from paceline_sglang.trees import DraftedTrees
from tests.sglang import restated
from tests.sglang.server import Server, arguments, plain, worker_of
from tests.sglang.test_verification import Scripted

SOURCE = os.environ.get("PACELINE_SGLANG_SOURCE", "")
if not SOURCE:
    pytest.skip("PACELINE_SGLANG_SOURCE names no folder", allow_module_level=True)
SRT = "sglang/srt/"
NGRAM = f"{SRT}speculative/ngram_worker.py"
PLACES: dict[str, tuple[str, ...]] = {
    NGRAM: tuple(
        f"NGRAMWorker.{name}"
        for name in (
            *("__init__", "clear_cache_pool", "_efficient_concat_last_n", "_prepare_draft_tokens"),
            *("_update_ngram_corpus", "forward_batch_generation"),
        )
    ),
    f"{SRT}speculative/eagle_utils.py": ("eagle_sample",),
    "sglang/kernels/ops/speculative/spec_tree.py": ("verify_tree_greedy_func",),
    f"{SRT}layers/sampler.py": ("Sampler.forward", "multinomial_with_seed", "apply_custom_logit_processor"),
    f"{SRT}sampling/sampling_batch_info.py": ("SamplingBatchInfo.apply_logits_bias",),
    f"{SRT}speculative/spec_registry.py": ("CustomSpecAlgo.__init__", "CustomSpecAlgo.create_worker"),
    f"{SRT}speculative/spec_info.py": ("SpeculativeAlgorithm.register", "SpeculativeAlgorithm.create_future_map"),
    f"{SRT}distributed/parallel_state.py": ("GroupCoordinator.broadcast", "GroupCoordinator.broadcast_object"),
}
"""What is restated under the same name, but for the group."""


def text_of(path: str) -> str:
    return (Path(SOURCE) / path).read_text()


def node_of(path: str, name: str) -> Any:
    node: Any = ast.parse(text_of(path))
    for part in name.split("."):
        (node,) = (each for each in node.body if getattr(each, "name", None) == part)
    return node


def own_code(path: str, name: str) -> str:
    return textwrap.dedent(ast.unparse(node_of(path, name)))


def test_it_is_a_version_that_was_read() -> None:
    from paceline_sglang.algorithm import READ_VERSIONS

    match = re.search(r"__version__ = version = '([^']+)'", text_of("sglang/_version.py"))
    assert match is not None
    assert match[1] in READ_VERSIONS
    assert match[1] == restated.MODULES["sglang.version"]["__version__"]


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PLACES.items() for name in names])
def test_signatures_are_sglangs(path: str, name: str) -> None:
    arguments = node_of(path, name).args
    own = attrgetter(name.replace("GroupCoordinator", "Group"))(restated)
    own_arguments = inspect.getfullargspec(getattr(own, "__func__", own))
    assert [each.arg for each in arguments.args] == own_arguments.args
    assert [each.arg for each in arguments.kwonlyargs] == own_arguments.kwonlyargs


def test_every_row_of_a_request_is_spread_over_its_nodes() -> None:
    """Tensors that SGLang filters by request are those that the plugin repeats; watermarks it refuses itself."""
    from paceline_sglang.verification import OF_REQUESTS

    code = own_code(f"{SRT}sampling/sampling_batch_info.py", "SamplingBatchInfo.filter_batch")
    filtered = {*re.findall(r"'(\w+)'", code), *re.findall(r"self\.(\w+) = self\.\1\[keep_indices_device\]", code)}
    assert {each for each in filtered if not each.startswith("watermark")} <= {*OF_REQUESTS}
    declared = own_code(f"{SRT}sampling/sampling_batch_info.py", "SamplingBatchInfo")
    assert all(re.search(rf"^    {name}: ", declared, re.MULTILINE) for name in OF_REQUESTS)


def test_the_rule_is_called_as_it_is_here() -> None:
    code = own_code(NGRAM, "NGRAMWorker.forward_batch_generation")
    call = "eagle_sample(verify_input, batch, logits_output, grammar_mask, watermark_state="
    assert call in code
    assert "self.ngram_corpus.erase_match_state(list(departed_rids))" in code
    assert "from sglang.srt.speculative.eagle_utils import eagle_sample" in text_of(NGRAM)
    positions = own_code(f"{SRT}model_executor/model_runner.py", "ModelRunner.sample")
    assert "else forward_batch.seq_lens - 1" in positions, "the first token is drawn at its prompt's last position"


def test_requests_have_what_is_read_of_them() -> None:
    params = {
        each.target.id
        for each in node_of(f"{SRT}sampling/sampling_params.py", "SamplingParams").body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert {each.name for each in fields(restated.SamplingParams)} <= params
    code = own_code(f"{SRT}managers/schedule_batch.py", "Req.__init__")
    for name in ("rid", "origin_input_ids_unpadded", "output_ids", "custom_logit_processor", "sampling_params"):
        assert re.search(rf"self\.{name}\b(: [^=]+)? = ", code), name


def test_the_algorithm_has_all_that_sglang_asks_of_its_own() -> None:
    """Also what its registry's check doesn't ask for, and the scheduler calls."""
    from paceline_sglang.algorithm import DraftServiceAlgorithm

    names = {
        each.name
        for path, kind in (("spec_registry", "CustomSpecAlgo"), ("spec_info", "SpeculativeAlgorithm"))
        for each in node_of(f"{SRT}speculative/{path}.py", kind).body
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
    }
    own = node_of(f"{SRT}speculative/spec_registry.py", "CustomSpecAlgo").body
    theirs = {each.name for each in own if isinstance(each, ast.FunctionDef)}
    missing = names - theirs - {*vars(DraftServiceAlgorithm)}
    assert missing == {"from_string", "register", "get_platform_worker_cls"}, "class methods, and for platforms' own"


@pytest.fixture
def grafted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's own code in the place of what restates it, as far as it runs without a GPU."""
    names = ("_efficient_concat_last_n", "_prepare_draft_tokens", "_update_ngram_corpus")
    scope: dict[str, Any] = {"np": np, "List": list, "ScheduleBatch": Any}
    for name in names:
        exec(own_code(NGRAM, f"NGRAMWorker.{name}"), scope)
        monkeypatch.setattr(restated.NGRAMWorker, name, scope[name])
    path = Path(SOURCE) / SRT / "plugins/hook_registry.py"
    spec = importlib.util.spec_from_file_location("sglang.srt.plugins.hook_registry", path)
    assert spec is not None
    assert spec.loader is not None
    registry: ModuleType = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, registry)
    spec.loader.exec_module(registry)
    members = {"HookRegistry": registry.HookRegistry, "HookType": registry.HookType}
    monkeypatch.setitem(restated.MODULES, spec.name, members)
    restated.install(monkeypatch)
    yield
    registry.HookRegistry.reset()


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_texts_are_the_same_by_sglangs_own_code(grafted: None, is_overlapped: bool) -> None:
    params = [restated.SamplingParams(sampling_seed=each, top_k=9) for each in range(6)]
    client = Scripted(random.Random(3))
    with worker_of(arguments(disable_overlap_schedule=not is_overlapped)) as worker:
        worker.ngram_corpus.drafts.client.close()
        worker.ngram_corpus = DraftedTrees(client, restated.SPEC.speculative_num_draft_tokens)  # type: ignore[arg-type]
        server = Server(worker, is_overlapped=is_overlapped)
        for number, each in enumerate(params):
            server.admit(str(number), (number, 2), each)
        for _ in range(40):
            server.step()
    assert client.accepted > 20
    for number, (req, each) in enumerate(zip(server.reqs, params, strict=True)):
        assert req.text == plain((number, 2), each, len(req.text))
        assert client.texts[number] == req.text[: len(client.texts[number])], "the client was told the text"
