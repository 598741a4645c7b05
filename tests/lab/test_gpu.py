"""The GPU benchmark's whole way on a CPU: its figures mean nothing there, its report must be whole."""

from __future__ import annotations

import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.engine.cuda.static_engine import StaticEngine
from paceline.llama_cpp.capi import open_interface
from paceline.llama_cpp.library import any_library
from paceline.models.gguf_header import read_header
from paceline.protocol.errors import Unsupported
from paceline.runtime.llama_settings import LlamaSettings
from paceline_lab.bench.gpu import __main__ as gpu
from paceline_lab.bench.gpu import ggml_copy, llama_steps, pair
from paceline_lab.bench.gpu.cases import ServiceLoad
from paceline_lab.bench.gpu.findings import FINDINGS
from paceline_lab.bench.gpu.models import SHAPES, random_model, weights_read
from paceline_lab.bench.gpu.torch_steps import Bench
from tests.engine.llama_engines import tiny_file
from tests.models import gguf_files

ARGUMENTS = ["--device", "cpu", "--shape", "tiny", "--dtype", "float32", "--steps", "2", "--length", "20"]


def test_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    threads: set[str] = set()
    pools: list[weakref.ref[torch.Tensor]] = []
    make, step = Bench.engine, StaticEngine._step

    def make_engine(self: Bench, **settings: Any) -> StaticEngine:
        assert all(pool() is None for pool in pools), "one engine at a time has memory"
        engine = make(self, **settings)
        pools.append(weakref.ref(engine._pool.rows))
        threads.add(threading.current_thread().name)
        return engine

    def note_step(self: StaticEngine, *arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return step(self, *arguments)

    monkeypatch.setattr(Bench, "engine", make_engine)
    monkeypatch.setattr(StaticEngine, "_step", note_step)
    gpu.main([*ARGUMENTS, "--sessions", "1,3", "--rows", "1,4", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "no figure for any GPU" in text
    assert len(pools) == 3
    assert threads == {"gpu-benchmark"}, "the executor's, on which engines are made, too"
    for number, claim, _ in FINDINGS:
        assert f"| {number} | {claim} |" in text
    assert text.count("| no GPU |") == len(FINDINGS) == 12
    (file,) = tmp_path.glob("gpu-*.json")
    results = json.loads(file.read_text())["results"]
    assert [(case["sessions"], case["rows"]) for case in results] == [(1, 1), (1, 4), (3, 1), (3, 4)]
    for case in results:
        assert min(case[name] for name in ("floor_ms", "step_ms", "direct_ms", "logits_ms", "service_ms")) > 0
        assert case["overhead_ms"] < case["service_ms"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_said_in_one_line() -> None:
    with pytest.raises(SystemExit, match="no CUDA device here"):
        gpu.main([])


def test_the_bytes_of_a_step() -> None:
    model = random_model("tiny", torch.bfloat16, torch.device("cpu"), 64)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert weights_read(model) == 2 * (512 * 64 + 2 * layer + 64)
    assert all(shape["num_attention_heads"] % shape["num_key_value_heads"] == 0 for shape in SHAPES.values())


def test_the_floor_counts_weights_once_and_keys_for_each_session() -> None:
    loads = [ServiceLoad(3, 4, 20)]
    bench = Bench("tiny", torch.device("cpu"), torch.float32, loads, 2)
    row_bytes = 2 * 2 * 2 * 16 * 4
    assert bench.floor_ms(loads[0], 1e6) == pytest.approx((bench.weights + 3 * 24 * row_bytes) / 1e3)


LLAMA = ["--engine", "llama", "--steps", "2", "--length", "20", "--threads", "1", "--bandwidth", "1"]


def test_the_whole_way_of_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    loads = ["--sessions", "1,3", "--rows", "1,4", "--gpu-layers", "0"]
    kinds = ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    gpu.main([*LLAMA, *loads, *kinds, "--model", str(tiny_file()), "--out", str(tmp_path)])
    text = capsys.readouterr().out
    for fact in (
        "- library: xllamacpp",
        "devices: CPU (",
        "gpu_layers 0, split_mode layer, main_gpu 0, tensor_split unset, devices unset, flash_attn auto, ",
        "cache_type_k f32, cache_type_v f32",
        "- file: tiny.gguf, llama, ",
        "- copy bandwidth: as --bandwidth says 1.0 GB/s",
        "- rows: other than alone: ",
    ):
        assert fact in text
    (file,) = tmp_path.glob("gpu-llama-*.json")
    results = json.loads(file.read_text())["results"]
    assert [(case["sessions"], case["rows"]) for case in results] == [(1, 1), (1, 4), (3, 1), (3, 4)]
    for case in results:
        assert min(case["step_ms"], case["service_ms"]) > 0
        assert case["overhead_ms"] < case["service_ms"]
        speed = f"{case['sessions'] / case['service_ms'] * 1e3:.3f}" if case["rows"] == 1 else "–"
        assert f"{case['overhead_ms']:.3f} | {speed} |" in text
    floors = {(case["sessions"], case["rows"]): case["floor_ms"] for case in results}
    load, llama = ServiceLoad(3, 4, 20), LlamaSettings(cache_type_k="f32", cache_type_v="f32")
    assert floors[3, 4] == llama_steps.floor_ms(read_header(tiny_file()), llama, load, 1e9) > floors[1, 1]


def test_the_floor_of_a_file_has_its_own_formats(tmp_path: Path) -> None:
    header, load = read_header(tiny_file()), ServiceLoad(3, 4, 20)
    kv = gguf_files.LAYERS * gguf_files.KV_HEADS * gguf_files.HIDDEN // gguf_files.HEADS
    weights = sum(each.data.nbytes for each in header.tensors.values())
    assert llama_steps.weights_read(header) == weights, "the embedding is the head, too"
    floor = llama_steps.floor_ms(header, LlamaSettings(cache_type_k="f32"), load, 1e3)
    assert floor == pytest.approx(weights + 3 * 24 * kv * (4 + 2))
    experts = read_header(gguf_files.write(tmp_path / "experts.gguf", "qwen2moe"))
    whole = sum(each.data.nbytes for each in experts.tensors.values())
    some = [each.data.nbytes for name, each in experts.tensors.items() if "_exps." in name]
    used, count = (experts.metadata[f"qwen2moe.expert_{key}"] for key in ("used_count", "count"))
    looked_up = experts.tensors["token_embd.weight"].data.nbytes
    assert used < count and "output.weight" in experts.tensors
    assert llama_steps.weights_read(experts) == whole - looked_up - sum(some) * (1 - used / count)


@pytest.mark.full
def test_a_pair_agrees_as_often_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tokenizer / name).write_text("{}")
    out = tmp_path / "pair"
    pair.main([str(out), "--shape", "tiny", "--layers", "1", "--agreement", ".6", "--device", "cpu",
               "--tokenizer", str(tokenizer)])  # fmt: skip
    agreement = float(capsys.readouterr().out.split(" at ")[1].split()[0])
    assert abs(agreement - 0.6) < 0.05
    target: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.randint(512, (8, 128), generator=torch.Generator().manual_seed(1))
    greedy = target(tokens).logits.argmax(-1)
    target.model.layers = target.model.layers[:1]
    assert abs(float((target(tokens).logits.argmax(-1) == greedy).float().mean()) - agreement) < 0.1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokenizer", "table:"], "tokenizer = 'table:': must be a model with tokenizer.json"),
        (["--tokenizer", "HERE", "--layers", "2"], r"layers = 2: must be in \[1, 1\]"),
    ],
)
def test_a_pair_that_can_not_be_made_is_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit, match=message):
        pair.main([str(tmp_path / "pair"), "--shape", "tiny", "--device", "cpu",
                   *(flag.replace("HERE", str(tmp_path)) for flag in flags)])  # fmt: skip
    assert not (tmp_path / "pair").exists()


def test_a_copy_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = open_interface(any_library(None).file)
    monkeypatch.setattr(ggml_copy, "_CPU_COPY_BYTES", 1 << 20)
    assert list(ggml_copy.copy_bandwidths(interface, ())) == ["CPU"]
    assert ggml_copy.copy_bandwidths(interface, ("CPU",))["CPU"] > 1e6
    assert ggml_copy.copy_bandwidths(interface, ("CUDA0",)) == {}
    monkeypatch.setattr(ggml_copy, "_CPU_COPY_BYTES", 1 << 58)
    with pytest.raises(Unsupported, match=r"device CPU: no room for a copy of \d+ bytes; --bandwidth"):
        ggml_copy.copy_bandwidths(interface, ())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "table:"], "--model = 'table:': must be a .gguf file, with --engine llama"),
        (["--model", "FILE", "--devices", "CUDA7"], "llama.devices = 'CUDA7': must be of: CPU"),
        (["--model", "FILE", "--cache-type-k", "q7"], "cache_type_k = 'q7': must be valid"),
        (["--model", "FILE", "--length", "9999"], "max_model_len = 10"),
    ],
)
def test_what_llama_cpp_can_not_measure_is_refused_in_a_sentence(flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        gpu.main([*LLAMA, *(flag.replace("FILE", str(tiny_file())) for flag in flags)])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engine", "llama"], "--engine llama needs --model FILE.gguf"),
        (["--shape", "1b,2b"], "2b: must be among tiny, 1b, 8b, 32b"),
    ],
)
def test_what_is_missing_or_unknown_is_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(flags)
    assert said in capsys.readouterr().err
