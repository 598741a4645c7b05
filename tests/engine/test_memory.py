"""Memory is divided before the first session, and what can't fit is refused with the arithmetic."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from paceline.engine import memory
from paceline.engine.memory import DEFAULT_CPU_KV_BYTES, available_ram, refuse_weights_beyond
from paceline.protocol.errors import InvalidInput
from tests.engine import tiny
from tests.engine.tiny import ROW_BYTES

MIB = 1 << 20


def with_ram(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(memory, "available_ram", lambda: available)


def test_the_budget_is_what_is_left_up_to_the_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_ram(monkeypatch, 1 << 40)
    engine, _ = tiny.engine_and_plain(tiny.llama())
    assert engine.info.max_kv_rows == DEFAULT_CPU_KV_BYTES // ROW_BYTES
    with_ram(monkeypatch, 10 * MIB)
    with caplog.at_level(logging.INFO):
        engine, _ = tiny.engine_and_plain(tiny.llama(), max_step_rows=128)
    assert all(word in caplog.text for word in ("weights", "workspace", f" rows of {ROW_BYTES} bytes)"))
    assert 5 * MIB < engine.info.max_kv_rows * ROW_BYTES < 10 * MIB


def test_what_cannot_fit_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ram(monkeypatch, 10 * MIB)
    with pytest.raises(
        InvalidInput, match=r"kv_bytes = 20971520: must be at most \d+: .* workspace .* 10 MiB available"
    ):
        tiny.engine_and_plain(tiny.llama(), kv_bytes=20 * MIB)
    with_ram(monkeypatch, 1 * MIB)
    with pytest.raises(InvalidInput, match="kv_bytes = 0: must be at most 0"):
        tiny.engine_and_plain(tiny.llama())


def test_weights_are_refused_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * MIB))
    refuse_weights_beyond(str(tmp_path), 3 * MIB)
    refuse_weights_beyond("some/hub-id", 0)
    with pytest.raises(InvalidInput, match="3 MiB of weights, 2 MiB available"):
        refuse_weights_beyond(str(tmp_path), 2 * MIB)


def test_a_control_group_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    machine = available_ram()
    assert machine > MIB
    for name, text in (("max", "100"), ("current", "70"), ("stat", "anon 60\ninactive_file 8\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_ram() == 38
    (tmp_path / "memory.max").write_text("max\n")
    assert available_ram() > MIB
