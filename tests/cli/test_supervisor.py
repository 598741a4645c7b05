"""The supervisor and the commands that use it, over real processes with table models."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.client import Client
from paceline.local.service_process import ServiceFailed, ServiceProcess, ServiceRefused, is_serving, write_config
from paceline.local.settings import ServeSettings, available_cores, speculative_drafter
from paceline.local.supervisor import LONGEST_DELAY_S, STEADY_S, Restarts, SupervisedServices
from paceline.runtime.config import TargetConfig
from paceline.runtime.process import SPIN_COUNT
from tests.engine import tiny
from tests.models.saving import save_with_tokenizer
from tests.warm import PACELINE

TABLE = "table:vocab=300,seed=1,eos=299"
TARGET = f"{TABLE},step_ms=10"
"""Slow enough for drafting to pay."""
DRAFT = f"model:{TABLE},noise=0.2"
FREE_PORTS = ("--port", "0", "--draft-port", "0", "--target-port", "0", "--no-http")
STOP_SECONDS = 30

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})


def settings(drafter: str = DRAFT) -> ServeSettings:
    return ServeSettings(model=TARGET, drafter=drafter, port=0, draft_port=0, target_port=0)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> Iterator[SupervisedServices]:
    with SupervisedServices(settings(), tmp_path_factory.mktemp("services"), lines.append) as running:
        yield running


def test_omp_num_threads_bounds_the_cores() -> None:
    everything = available_cores({})
    assert everything >= 1
    assert available_cores({"OMP_NUM_THREADS": "1"}) == 1
    assert available_cores({"OMP_NUM_THREADS": str(everything + 5)}) == everything
    assert available_cores({"OMP_NUM_THREADS": "2,2"}) == everything


@pytest.mark.parametrize(
    ("text", "drafter", "tokens"),
    [
        ('{"method": "draft_model", "model": "a/b"}', "model:a/b", None),
        ('{"method": "none"}', "none", None),
        ('{"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}', "model:a/b", 3),
        ('{"method": "mtp"}', "mtp", None),
        ('{"method": "suffix"}', "ngram", None),
    ],
)
def test_speculative_config_is_the_short_drafter_in_vllms_words(text: str, drafter: str, tokens: int | None) -> None:
    assert speculative_drafter(text) == (drafter, tokens)


def test_each_service_is_announced_once_healthy(services: SupervisedServices, lines: list[str]) -> None:
    assert [line.split()[0] for line in lines] == ["cores", "target", "draft", "coordinator"]
    assert lines[0].split(maxsplit=1)[1] == f"target {available_cores(os.environ)} + draft 1 shared"
    for name, line in zip(services.processes, lines[1:], strict=True):
        process = services.processes[name]
        assert process.address is not None
        assert process.address in line
        assert is_serving(process.address)


def test_a_child_has_its_threads_and_they_spin_briefly(tmp_path: Path) -> None:
    with mock.patch.object(subprocess, "Popen") as start:
        ServiceProcess("target", tmp_path, threads=3).start()
    environment = start.call_args.kwargs["env"]
    assert (environment["OMP_NUM_THREADS"], environment["GOMP_SPINCOUNT"]) == ("3", str(SPIN_COUNT))


def test_generate_streams_and_shows_the_statistics(services: SupervisedServices) -> None:
    arguments = ["generate", "--coordinator", services.address, "--chat", "hi", "--system", "be brief"]
    result = runner.invoke(app, [*arguments, "--max-new-tokens", "12", "--seed", "5", "--compare"])
    assert result.exit_code == 0, result.stderr
    assert "mean acceptance length" in result.stdout
    assert "with speculation" in result.stdout
    assert "target-only" in result.stdout
    assert "the same tokens" in result.stdout


def test_generate_json_is_what_the_client_gets(services: SupervisedServices, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    sampling = ["--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--seed", "5"]
    drafting = ["--max-new-tokens", "24", "--acceptance", "block", "--num-draft-tokens", "2"]
    arguments = ["--json", "--prompt-file", str(file), *sampling, *drafting]
    result = runner.invoke(app, ["generate", "--coordinator", services.address, *arguments])
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown["prompt_token_ids"] == list(b"from a file")
    assert len(shown["token_ids"]) == len(shown["provenance"]) <= 24
    assert set(shown["provenance"]) <= {"accepted", "recovered", "bonus", "target"}
    assert shown["seed"] == 5
    drafted = shown["stats"]["speculative_decoding"]
    assert drafted["num_spec_steps"] > 0 and drafted["num_accepted_draft_tokens"] > 0
    assert drafted["num_spec_tokens"] <= 2


def test_input_that_only_the_coordinator_can_judge_is_still_one_line(services: SupervisedServices) -> None:
    asked = ["generate", "--coordinator", services.address, "--prompt", "x", "--drafter", "oracle"]
    result = runner.invoke(app, asked)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert all(part in result.stderr for part in ("drafter", "'oracle'", "one of"))


def test_doctor_says_that_all_is_well(services: SupervisedServices) -> None:
    flags = [text for name in services.processes for text in (f"--{name}", services.processes[name].address or "")]
    result = runner.invoke(app, ["doctor", *flags])
    assert result.exit_code == 0, result.stdout
    assert result.stdout.count("is SERVING") == 3
    assert result.stdout.count("round trip") == 3
    assert "tokenizers" in result.stdout
    assert "BAD" not in result.stdout


class ServeCommand:
    """`paceline serve` as a process of its own."""

    def __init__(self, folder: Path, *flags: str, model: str = TARGET) -> None:
        argv = [*PACELINE, "serve", model, *FREE_PORTS]
        self.process = subprocess.Popen(
            [*argv, "--log-dir", str(folder), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pids: dict[str, int] = {}
        self.services: dict[str, str] = {}
        self.lines: list[str] = []

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            words = line.split()
            if "pid" in words:
                self.pids[words[0]] = int(words[words.index("pid") + 1])
                self.services[words[0]] = words[1]
            if line.startswith("ready"):
                return
        raise AssertionError(self.process.communicate(timeout=STOP_SECONDS))

    @property
    def address(self) -> str:
        return self.services["coordinator"]

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=STOP_SECONDS)
        return self.process.returncode, out, err


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[ServeCommand]:
    command = ServeCommand(folder, *flags)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.terminate()
            command.process.communicate(timeout=STOP_SECONDS)


def stop(command: ServeCommand, number: signal.Signals) -> None:
    """Stop a command as its user does; nothing of it stays."""
    command.process.send_signal(number)
    code, out, err = command.finish()
    assert (code, err) == (0, "")
    assert out.endswith("stopped\n")
    assert not any(psutil.pid_exists(pid) for pid in command.pids.values())


def test_serve_reads_its_flags_and_variables_names_those_of_its_services_and_stops_on_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SERVE_DRAFTER", DRAFT)
    monkeypatch.setenv("PACELINE_TARGET_ENGINE__MAX_NUM_SEQS", "0")
    with serving(tmp_path, "--cores", "target=1,draft=1") as command:
        command.wait_ready()
        for name in ("target", "draft"):
            assert any(re.match(rf"{name} .* 1 threads$", line) for line in command.lines)
        stop(command, signal.SIGINT)
    assert DRAFT in (tmp_path / "draft.toml").read_text()
    assert "engine.threads = 1" in (tmp_path / "target.toml").read_text()
    assert any(line.startswith("cores ") and "the setting cores" in line for line in command.lines)
    (line,) = [line for line in command.lines if line.startswith("not read")]
    assert line.endswith(": PACELINE_TARGET_ENGINE__MAX_NUM_SEQS\n")


def test_serve_starts_what_fails_again_where_it_was(tmp_path: Path) -> None:
    with serving(tmp_path, "--drafter", "none", "--max-restarts", "1") as command:
        command.wait_ready()
        assert set(command.pids) == {"target", "coordinator"}
        with Client(command.address) as client:
            before = client.generate(prompt="hello", max_new_tokens=9, seed=5)
            os.kill(command.pids["target"], signal.SIGKILL)
            ended, back = command.read_line(), command.read_line()
            assert "target" in ended
            assert "ended with signal SIGKILL; restart 1 of 1 in 0.5 s" in ended
            assert "back" in back
            assert client.generate(prompt="hello", max_new_tokens=9, seed=5).token_ids == before.token_ids
        os.kill(int(back.split()[3]), signal.SIGKILL)
        code, _, err = command.finish()
    assert code == 1
    assert err.startswith("paceline: error: target service ended with signal SIGKILL")
    assert "Traceback" not in err
    assert not any(psutil.pid_exists(pid) for pid in command.pids.values())


def test_restarts_are_bounded_and_wait_longer_each_time() -> None:
    restarts = Restarts(3)
    assert [restarts.next_delay_s(1.0) for _ in range(4)] == [0.5, 1.0, 2.0, None]
    assert restarts.next_delay_s(STEADY_S) == 0.5, "a service that ran for a while has recovered"
    patient = Restarts(1000)
    assert max(patient.next_delay_s(0.0) or 0 for _ in range(1000)) == LONGEST_DELAY_S


def test_serve_reports_what_a_service_refuses(tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken, serving(tmp_path, "--target-port", str(port)) as command:
        code, _, err = command.finish()
    assert code == 2
    refused = f"target service refused: server address = '127.0.0.1:{port}': must be a free host:port of this machine"
    assert err == f"paceline: error: {refused}\nlog: {tmp_path / 'target.log'}\n"


def test_a_model_that_the_target_refuses_is_the_first_line_alone(tmp_path: Path) -> None:
    """Of a refusal that is no bad input; `test_serve_reports_what_a_service_refuses` has one."""
    model, logs = tmp_path / "model", tmp_path / "logs"
    save_with_tokenizer(tiny.random_model(tiny.llama()), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"layer_types": ["linear_attention"] * 3}))
    arguments = ["serve", str(model), "--drafter", "none", *FREE_PORTS, "--log-dir", str(logs)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    refusal = first.removeprefix("paceline: error: ")
    assert refusal.startswith("target service refused: model type llama: layers of type linear_attention")
    assert second == f"log: {logs / 'target.log'}"
    assert refusal in (logs / "target.log").read_text()


def test_a_refusal_of_an_earlier_start_is_not_shown_again(tmp_path: Path) -> None:
    process = ServiceProcess("target", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        write_config(TargetConfig, process.config_file, {"model": TABLE, "server.port": taken.getsockname()[1]})
        process.start()
        assert process.wait(STOP_SECONDS) == 2
    assert isinstance(process.failure("ended"), ServiceRefused)
    process.start()
    process.kill()
    again = process.failure("ended")
    assert type(again) is ServiceFailed
    assert again.message.startswith(f"target service ended; last lines of {process.log_file}:\n")


def test_generate_local_starts_its_own_services_and_leaves_none() -> None:
    before = set(psutil.Process().children(recursive=True))
    arguments = ["generate", "--local", "--model", TARGET, "--drafter", DRAFT, "--num-draft-tokens", "2"]
    result = runner.invoke(app, [*arguments, "--prompt", "abc", "--max-new-tokens", "8", "--seed", "1", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["stats"]["speculative_decoding"]["num_spec_steps"] > 0
    assert set(psutil.Process().children(recursive=True)) <= before
