"""llama.cpp as an engine: the contract of every engine, its 256 sequences, its own failures."""

from __future__ import annotations

import _ctypes
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.engine.blocks import BLOCK_ROWS
from paceline.engine.interface import Prefix, StepItem, StepPlan
from paceline.engine.llama import checks, loading
from paceline.engine.llama.engine import LlamaEngine
from paceline.engine.llama.invariance import ALIKE, row_invariance
from paceline.engine.llama.sequences import SessionSequences, WavePlanner
from paceline.engine.llama.steps import LlamaContext
from paceline.engine.loading import load_engine
from paceline.llama_cpp import capi, library
from paceline.llama_cpp.library import LlamaLibrary, any_library
from paceline.protocol.errors import InternalError, InvalidInput, Overloaded, Unsupported
from paceline.runtime.config import EngineSettings
from paceline.runtime.process import SPIN_COUNT
from tests.engine import tiny
from tests.engine.llama_engines import llama, llama_settings, plain, tiny_file
from tests.engine.test_growth import check_growth
from tests.engine.test_transformer import run_writers
from tests.engine.tiny import chain, step
from tests.models import gguf_files


@pytest.fixture(scope="module", params=["together", "alone"])
def engine(request: pytest.FixtureRequest) -> LlamaEngine:
    return llama(reproducible=request.param == "alone")


def test_random_ragged_batches_and_trees_that_grow(engine: LlamaEngine) -> None:
    run_writers(engine, plain(), 0)
    for seed in range(2):
        check_growth(engine, plain(), seed)


def test_the_logits_are_those_of_torch(engine: LlamaEngine) -> None:
    tokens = random.Random(4).choices(range(tiny.VOCAB), k=100)
    ours = tiny.read(load_engine(str(tiny_file()), EngineSettings(engine="torch", threads=1)), tokens)
    np.testing.assert_allclose(tiny.read(engine, tokens), ours, atol=1e-3, rtol=0)


def test_leaves_without_a_sequence_are_computed_in_turn() -> None:
    engine = llama()
    engine._free = engine._free[-3:]
    for seed in range(4):
        check_growth(engine, plain(), seed)
    assert len(engine._free) == 3


def _first_at_hand(self: WavePlanner, row: int, wave: Any) -> int | None:
    return next((each for each in self._rows.tips if each not in wave.ends), None)


MUTANTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a new leaf sees nothing of its path": (LlamaContext, "copy", lambda *_: None),
    "rejected rows stay": (LlamaContext, "remove", lambda *_: None),
    "any sequence of the session does for a leaf": (WavePlanner, "_sequence_at", _first_at_hand),
    "positions by row": (SessionSequences, "position", lambda _, row: row),
}


@pytest.mark.parametrize("sessions", [256, 1])
@pytest.mark.parametrize(("kind", "name", "mutant"), MUTANTS.values(), ids=MUTANTS)
def test_the_self_check_catches(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, mutant: Callable[..., Any], sessions: int
) -> None:
    monkeypatch.setattr(kind, name, mutant)
    with pytest.raises((Unsupported, InternalError), match=r"logits of steps differ|computes no step"):
        llama(max_num_seqs=sessions)


@pytest.mark.parametrize("settings", [{"max_num_seqs": 1}, {"reproducible": True, "kv_bytes": 512 * 512}])
def test_a_limit_of_one_session_is_checked_with_one(caplog: pytest.LogCaptureFixture, settings: Any) -> None:
    with caplog.at_level(logging.INFO):
        engine = llama(**settings)
    assert "checked a session at a time: 1 se" in caplog.text
    assert engine.invariance.startswith(ALIKE if "reproducible" in settings else "other than alone: in steps of ")
    engine.open(7, 20)
    with pytest.raises(Overloaded):
        engine.open(8, 20)
    for row, history in zip(step(engine, chain(7, 0, (1, 2, 3))), ([1], [1, 2], [1, 2, 3]), strict=True):
        plain().assert_row(row, history)


def test_the_257th_session_waits_and_the_others_lose_nothing() -> None:
    engine = llama(max_num_seqs=300)
    tree = StepItem(0, 2, (5, 6, 7), (-1, -1, -1), logit_rows=(0, 1, 2))
    engine.open(0, 20, Prefix((1, 2, 3), 2, "ann"))
    step(engine, chain(0, 0, (1, 2)))
    step(engine, tree)
    for session in range(1, 256):
        engine.open(session, 20)
    with pytest.raises(Overloaded, match=r"256 sequences of llama\.cpp are in use"):
        engine.open(256, 20)
    logits = step(engine, StepItem(0, 3, (8, 9), kept_rows=(4,), logit_rows=(0, 1)))
    for row, history in zip(logits, ([1, 2, 7, 8], [1, 2, 7, 8, 9]), strict=True):
        plain().assert_row(row, history)
    engine.close(255)
    assert engine.open(256, 20) == 0
    for session in range(257):
        engine.close(session)
    assert engine.kv_rows == 0
    assert len(engine._free) == 256


def test_a_full_cache_costs_nobody_a_text() -> None:
    engine = llama(kv_bytes=256 * 512)
    assert engine.info.max_kv_rows == 256
    engine._ledger._info = replace(engine.info, max_kv_rows=1000)  # as if the ledger were wrong
    tokens = random.Random(3).choices(range(tiny.VOCAB), k=200)
    engine.open(1, 250)
    engine.open(2, 250)
    step(engine, chain(1, 0, tokens))
    for _ in range(2):
        with pytest.raises(Overloaded, match=r"no cells for (200|144) rows, of 256"):
            engine.step(StepPlan((chain(1, 200, (5,)), chain(2, 0, tokens[1:]))))
    plain().assert_row(step(engine, chain(1, 200, (6,)))[0], [*tokens, 6])
    engine.close(1)
    plain().assert_row(step(engine, chain(2, 0, tokens))[-1], tokens)
    engine.close(2)


def test_rows_of_a_prefix_are_shared_within_a_tenant_and_evicted() -> None:
    engine = llama(kv_bytes=600 * 512)
    text = random.Random(1).choices(range(tiny.VOCAB), k=80)
    for session, tenant, words, reused in (
        (1, "ann", text, 0),
        (2, "ann", [*text[:50], 1, 2], BLOCK_ROWS),
        (3, "bob", text, 0),
        (4, "ann", text, 79),
    ):
        assert engine.open(session, 100, Prefix(tuple(words), len(words) - 1, tenant)) == reused
        rest = tuple(words[reused:])
        plain().assert_row(step(engine, StepItem(session, reused, rest, logit_rows=(len(rest) - 1,)))[0], words)
        # A row behind the prefix, so that no two of the texts go on alike.
        plain().assert_row(step(engine, chain(session, len(words), (session,)))[0], [*words, session])
    for session in (1, 2, 3, 4):
        engine.close(session)
    assert (engine.kv_rows, engine.cached_rows > 0) == (0, True)
    engine.open(5, 600)
    assert engine.cached_rows == 0
    assert len(engine._free) == 255


def test_a_draft_or_target_loads_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from draft_service.drafters.catalogue import build_catalogue; "
        "from paceline.runtime.config import DraftConfig; "
        f"settings = dict(drafters=['model:{tiny_file()}'], target_model='{tiny_file()}', "
        "engine=dict(engine='llama', threads=1)); "
        "import target_service.servicer; "
        "assert build_catalogue(DraftConfig(**settings)).max_kv_rows; "
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PACELINE_HOME": str(tmp_path)})


@pytest.mark.skipif(sys.platform != "linux", reason="GCC's OpenMP, which says what it has read")
@pytest.mark.parametrize(
    ("own", "spins", "policy"),
    [({}, SPIN_COUNT, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, 30_000_000_000, "ACTIVE")],
)
def test_waiting_threads_spin_briefly_unless_told_otherwise(own: dict[str, str], spins: int, policy: str) -> None:
    code = (
        "from paceline.llama_cpp import capi, library; capi.open_interface(library.any_library(None).file); "
        "import sys; assert 'torch' not in sys.modules"
    )
    left = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    environment = {**left, **own, "OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    shown = dict(re.findall(r"(\w+) = '(\w*)'", done.stderr))
    assert (int(shown["GOMP_SPINCOUNT"]), shown["OMP_WAIT_POLICY"]) == (spins, policy)


def test_fingerprints_tell_engines_machines_and_settings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load_engine(str(tiny_file()), EngineSettings(engine="torch", threads=1)).info.fingerprint
    theirs = llama().info.fingerprint
    assert (ours.tokenizer, ours.vocab_size, ours.model) == (theirs.tokenizer, theirs.vocab_size, theirs.model)
    others = [llama(reproducible=True), llama(max_model_len=100), llama(llama={})]
    monkeypatch.setattr(loading, "list_devices", lambda interface: [("CPU", 1, "another processor")])
    others.append(llama())
    numbers = [each.info.fingerprint.numeric for each in others] + [ours.numeric, theirs.numeric]
    assert len(set(numbers)) == 6


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("folder", {}, "model = .*: must be a .gguf file, with engine = llama"),
        ("layers", {}, "model = .*: must be whole, with engine = llama"),
        ("gguf", {"quantization": "int8"}, "quantization = 'int8': must be none"),
        ("gguf", {"dtype": "float32"}, "dtype = 'float32': must be auto"),
        ("gguf", {"device": "cuda"}, "device = 'cuda': must be auto or cpu; llama.devices names others"),
        ("gguf", {"max_model_len": 257}, "max_model_len = 257: must be at most 256"),
        ("gguf", {"llama": {"devices": ["CUDA7"]}}, "llama.devices = 'CUDA7': must be of: CPU"),
        ("gguf", {"llama": {"library": "/nowhere"}}, "llama.library = '/nowhere': must be a file"),
        ("gguf", {"llama": {"tensor_split": "3,x"}}, "llama.tensor_split = '3,x': must be at most 16 numbers"),
        ("gguf", {"kv_bytes": 1000}, "room for at least 8 tokens, and 32 KV rows"),
        ("gguf", {"kv_bytes": 100_000, "reproducible": True}, "KV rows of kv_bytes = 195: must be at least 512"),
    ],
)
def test_what_llama_cpp_can_not_do_is_refused(tmp_path: Path, model: str, settings: Any, message: str) -> None:
    names = {"folder": str(tmp_path), "layers": f"{tiny_file()}#layers=0", "gguf": str(tiny_file())}
    with pytest.raises(InvalidInput, match=message):
        load_engine(names[model], llama_settings(**settings))


def test_auto_takes_llama_cpp_where_the_extra_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    auto = llama_settings(engine="auto")
    assert not isinstance(load_engine("table:", llama_settings()), LlamaEngine)
    assert library.chosen_library(None) is None, "the wheel of the tests is not the extra"
    assert not isinstance(load_engine(str(tiny_file()), auto), LlamaEngine)
    there = any_library(None)
    assert library.chosen_library(there.file) == LlamaLibrary(there.file, "llama.library")
    own = auto.model_copy(update={"llama": auto.llama.model_copy(update={"library": there.file})})
    with caplog.at_level(logging.INFO):
        assert isinstance(load_engine(str(tiny_file()), own), LlamaEngine)
    assert "model tiny: computed by llama.cpp (llama.library)" in caplog.text
    rounded = own.model_copy(update={"quantization": "int8"})
    assert not isinstance(load_engine(str(tiny_file()), rounded), LlamaEngine)
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"no library of llama.cpp \(pip install 'paceline\[llama\]'\)"):
        llama()


def test_backends_beside_the_library_are_loaded_where_it_has_none() -> None:
    loads: list[bytes] = []
    for devices in (0, 1):
        build: Any = SimpleNamespace(
            ggml_backend_dev_count=lambda devices=devices: devices,
            ggml_backend_load_all_from_path=lambda folder: loads.append(folder.value),
        )
        capi._load_backends(build, Path("/builds/b9000"))
        assert loads == [b"/builds/b9000"]


def test_a_library_of_another_build_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interface = capi.open_interface(any_library(None).file)
    raw = bytes(interface.context_params)
    older = capi._difference(capi.OlderContextParams, raw, capi._CONTEXT_DEFAULTS)
    assert older is not None
    assert capi._difference(capi.ContextParams, raw + b"\1" * 64, capi._CONTEXT_DEFAULTS) is not None
    monkeypatch.setattr(capi, "ContextParams", capi.OlderContextParams)
    with pytest.raises(Unsupported, match="is of a build that is not known here: llama_context_default_params has"):
        capi.open_interface.__wrapped__(any_library(None).file)
    with pytest.raises(Unsupported, match="has no function llama_model_default_params"):
        capi.open_interface(Path(_ctypes.__file__))
    (tmp_path / "libllama.so").write_text("nothing")
    with pytest.raises(InvalidInput, match="must be a library that loads"):
        llama(llama={"library": str(tmp_path / "libllama.so")})


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    whole = tiny_file().read_bytes()
    for name, content, message in (
        ("truncated", whole[: len(whole) // 2], "beyond the file"),
        ("foreign", b"PK\3\4" + whole, "does not begin as a GGUF file"),
        ("empty", b"", "empty"),
    ):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(InvalidInput, match=message) as caught:
            llama(tmp_path / f"{name}.gguf")
        assert "\n" not in caught.value.message
    gguf_files.write(tmp_path / "missing.gguf", tensors={"blk.1.ffn_up.weight": None})
    with pytest.raises(InvalidInput, match=r"a model that llama.cpp loads \(.*blk.1.ffn_up.weight") as caught:
        llama(tmp_path / "missing.gguf")
    assert "\n" not in caught.value.message


def test_windows_are_refused_where_they_slide(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "gemma2.gguf", "gemma2", {"attention.sliding_window": 32})
    with pytest.raises(Unsupported, match="a window of 32 tokens; set max_model_len to at most that"):
        llama(file)
    assert llama(file, max_model_len=32).info.max_length == 32


def lfm2(file: Path) -> Path:
    """A hybrid: short convolutions in its first layer, attention in the other."""
    hidden, head = gguf_files.HIDDEN, (gguf_files.HIDDEN // gguf_files.HEADS,)
    shapes = {
        "blk.0.shortconv.conv.weight": (hidden, 3), "blk.0.shortconv.in_proj.weight": (3 * hidden, hidden),
        "blk.0.shortconv.out_proj.weight": (hidden, hidden), "blk.1.attn_q_norm.weight": head,
        "blk.1.attn_k_norm.weight": head, "token_embd_norm.weight": (hidden,),
    }  # fmt: skip
    usual = ["output_norm.weight", *(f"blk.0.{name}.weight" for name in ATTENTION)]
    tensors = {name: gguf_files.values(name, shape) for name, shape in shapes.items()}
    keys = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2], "vocab_size": len(gguf_files.tokens())}
    return gguf_files.write(file, "lfm2", keys, {**dict.fromkeys(usual), **tensors})


ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


def test_recurrent_and_hybrid_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="engine = llama: a model with a recurrent state"):
        llama(lfm2(tmp_path / "hybrid.gguf"))
    functions = capi.open_interface(any_library(None).file).functions
    monkeypatch.setattr(functions, "llama_model_is_recurrent", lambda model: True)
    with pytest.raises(Unsupported, match="engine = llama: a model with a recurrent state"):
        llama()


def test_reproducible_mode_pads_where_rows_differ_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llama(reproducible=True)
    assert engine.shape.least == 2, "with float32 a single row has other bits than one of many"
    assert row_invariance(engine, (5, 6, 7)) == ALIKE
    engine.shape = replace(engine.shape, least=1)
    assert "in steps of 2, 3, 4, 6, 8, 12, 16 rows behind 24 tokens" in row_invariance(engine, (5, 6, 7))
    monkeypatch.setattr(LlamaEngine, "_padding", lambda self, rows: 0)
    with pytest.raises(Unsupported, match="padded rows are other than alone: in steps of 2,"):
        llama(reproducible=True)


def test_a_second_start_reads_what_the_first_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    file = gguf_files.write(tmp_path / "tiny.gguf", keys={"context_length": tiny.CONTEXT})
    measured, read = "(measured)", "(read from the record of an earlier start)"

    def start(origin: str, **settings: Any) -> LlamaEngine:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            engine = load_engine(str(file), llama_settings(**settings))
        assert [each.message.endswith(origin) for each in caplog.records if "rows are" in each.message] == [True]
        assert isinstance(engine, LlamaEngine)
        return engine

    first = start(measured, reproducible=True)
    again = start(read, reproducible=True)
    assert (again.info, again.shape) == (first.info, first.shape)
    assert again.shape.least == 2
    start(measured, reproducible=True, kv_bytes=1 << 20)
    os.utime(file, ns=(1, 1))
    start(measured, reproducible=True)
    facts = checks.CheckRecord({}).file
    monkeypatch.setattr(checks, "_code_digest", lambda: "changed")
    assert checks.CheckRecord({}).file != facts


def test_a_damaged_record_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    record, other = checks.CheckRecord({"threads": 1}), checks.CheckRecord({"threads": 2})
    for each in (record, other):
        assert each.read() is None
        each.write(2, "alike")
        assert each.read() == (2, "alike")
    content = record.file.read_bytes()
    altered = content.replace(b'"least": 2', b'"least": 1')
    for damaged in (content[:-1], altered, b"\xff\x00{}", other.file.read_bytes(), b""):
        assert damaged != content
        record.file.write_bytes(damaged)
        assert record.read() is None
        record.write(16, "alike")
        assert record.read() == (16, "alike")


def test_records_are_few_and_no_folder_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(checks, "_MOST_RECORDS", 1)
    first, second = (checks.CheckRecord({"number": number}) for number in range(2))
    for number, record in enumerate((first, second)):
        record.write(1, "alike")
        os.utime(record.file, ns=(number, number))
    assert [each.read() is None for each in (first, second)] == [True, False]
    monkeypatch.setenv("PACELINE_HOME", str(second.file))
    checks.CheckRecord({}).write(1, "alike")
    assert checks.CheckRecord({}).read() is None


def test_what_a_gpu_computes_is_measured_at_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    own = loading.list_devices
    monkeypatch.setattr(loading, "list_devices", lambda interface: [*own(interface), ("CUDA0", 1, "a GPU")])
    load_engine(str(tiny_file()), llama_settings())
    assert not list(tmp_path.rglob("*.json"))
    load_engine(str(tiny_file()), llama_settings(device="cpu"))
    assert list(tmp_path.rglob("*.json"))
