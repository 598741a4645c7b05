"""The GPU benchmark's whole way on a CPU: its figures mean nothing there, its report must be whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline_lab.bench.gpu import __main__ as gpu
from paceline_lab.bench.gpu.models import SHAPES, random_model, weights_read

ARGUMENTS = ["--device", "cpu", "--shape", "tiny", "--dtype", "float32", "--steps", "2", "--length", "20"]


def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([*ARGUMENTS, "--sessions", "1,3", "--rows", "1,4", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "no figure for any GPU" in text
    (file,) = tmp_path.glob("gpu-*.json")
    results = json.loads(file.read_text())["results"]
    assert [(case["sessions"], case["rows"]) for case in results] == [(1, 1), (1, 4), (3, 1), (3, 4)]
    for case in results:
        assert min(case[name] for name in ("floor_ms", "graph_ms", "direct_ms", "logits_ms", "service_ms")) > 0
        assert case["overhead_ms"] < case["service_ms"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_said_in_one_line() -> None:
    with pytest.raises(SystemExit, match="no CUDA device here"):
        gpu.main([])


def test_unknown_shapes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--shape", "1b,2b"])
    assert "2b: must be among tiny, 1b, 8b, 32b" in capsys.readouterr().err


def test_the_bytes_of_a_step() -> None:
    model = random_model("tiny", torch.bfloat16, torch.device("cpu"), 64)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert weights_read(model) == 2 * (512 * 64 + 2 * layer + 64)
    assert all(shape["num_attention_heads"] % shape["num_key_value_heads"] == 0 for shape in SHAPES.values())


def test_the_floor_counts_weights_once_and_keys_for_each_session() -> None:
    loads = [gpu.ServiceLoad(3, 4, 20)]
    bench = gpu.Bench("tiny", torch.device("cpu"), torch.float32, loads, 2)
    row_bytes = 2 * 2 * 2 * 16 * 4
    assert bench.floor_ms(loads[0], 1e6) == pytest.approx((bench.weights + 3 * 24 * row_bytes) / 1e3)
