"""The command line without services: help, examples, and bad input that costs one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.doctor import DoctorOptions, Finding, examine
from paceline.cli.main import app
from paceline.protocol.generation import GenerateRequest
from tests.warm import PACELINE

FREE_PORT = "127.0.0.1:1"
"""Nobody listens on port 1."""

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "PACELINE_HOME": ""})


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        pytest.param("draft-service", "--drafter", marks=pytest.mark.full),
        pytest.param("target-service", "--model", marks=pytest.mark.full),
        ("coordinator", "--target"),
    ],
)
def test_service_help_has_an_example_and_the_services_own_flags(command: str, flag: str) -> None:
    argv = [*PACELINE, command, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Example: paceline {command}" in done.stdout
    assert flag in done.stdout
    assert "--config" in done.stdout


BAD_INPUT = [
    (["trace"], ("inputs given", "0", "--request")),
    (["trace", "--request", "/nowhere.json"], ("request", "'/nowhere.json'", "readable")),
    (["generate", "--prompt", "x", "--rounds"], ("rounds", "True", "--json")),
    (["generate", "--prompt", "x", "--temperature", "-1"], ("temperature", "-1.0", "[0, 100]")),
    (["generate", "--prompt", "x", "--temperature", "warm"], ("--temperature", "'warm'", "number")),
    (["generate", "--prompt", "x", "--logit-bias", "7"], ("logit_bias", "'7'", "ID=BIAS")),
    (["generate", "--prompt", "x", "--bad-words", "1,two"], ("bad_words", "'1,two'", "token ids")),
    (["generate", "--prompt", "x", "--min-tokens", "200"], ("min_tokens", "200", "at most max_new_tokens = 128")),
    (["generate", "--prompt", "x", "--json-schema", "{"], ("json_schema", "'{'", "JSON")),
    (["generate", "--prompt", "x", "--lark", "@/no/such"], ("lark", "/no/such", "readable")),
    (["generate", "--prompt", "x", "--compare", "-n", "2"], ("compare", "True", "left out with --json and --n")),
    (["generate", "--prompt", "x", "--num-draft-tokens", "many"], ("num_draft_tokens", "'many'", "auto or an int")),
    (["generate", "--prompt", "x", "--acceptance", "lenient"], ("--acceptance", "'lenient'", "'coupled'")),
    (["generate", "--prompt", ""], ("prompt", "''", "at least 1 character")),
    (["generate"], ("inputs given", "0", "exactly 1 of --prompt, --prompt-file and --chat")),
    (["generate", "--prompt", "x", "--system", "y"], ("system", "'y'", "--chat only")),
    (["generate", "--prompt", "x", "--prediction", "/no/such/file"], ("prediction", "/no/such/file", "readable")),
    (["generate", "--prompt", "x", "--local", "--drafter", "oracle"], ("drafter", "'oracle'", "auto, ngram, model")),
    (["generate", "--prompt", "x", "--no-such-flag"], ("--no-such-flag",)),
    (["serve", "/no/such/model"], ("model", "/no/such/model", "a folder, a .gguf file")),
    (["serve", "table:vocab=8", "--dtype", "int3"], ("--dtype", "'int3'", "'float32'")),
    (["serve", "table:vocab=8", "--max-model-len", "-5"], ("max_model_len = -5", "or equal to 0")),
    (["serve", "table:vocab=8", "--gpu-memory-utilization", "2"], ("gpu_memory_utilization", "2.0", "by --gpu")),
    (["serve", "table:vocab=8", "--port", "70000"], ("port", "70000", "65535")),
    (["serve", "--speculative-config", "{"], ("speculative_config", "'{'", "JSON")),
    (["serve", "--speculative-config", '{"method": "jacobi"}'], ("speculative_config.method", "'jacobi'", "one of")),
    (["serve", "--speculative-config", '{"method": "draft_model"}'], ("speculative_config.model", "None", "or path")),
    (["serve", "--speculative-config", '{"method": "ngram", "k": 3}'], ("speculative_config.k", "3", "known keys")),
    (
        ["serve", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": true}'],
        ("speculative_config.num_speculative_tokens", "True", "an integer"),
    ),
    (["serve", "--drafter", "none", "--speculative-config", '{"method": "none"}'], ("drafter", "'none'", "left out")),
    (["pull", "gpt-5"], ("model", "'gpt-5'", "smollm2-135m")),
    (["reticulate"], ("reticulate",)),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "named"), BAD_INPUT, ids=[" ".join(case[0]) for case in BAD_INPUT])
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], named: tuple[str, ...]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("paceline: error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for part in named:
        assert part in result.stderr


def test_environment_sets_a_flag_and_the_flag_wins() -> None:
    by_environment = runner.invoke(app, ["generate", "--prompt", "x"], env={"PACELINE_GENERATE_TOP_P": "7"})
    assert "top_p = 7.0" in by_environment.stderr
    arguments = ["generate", "--prompt", "x", "--top-p", "8"]
    by_flag = runner.invoke(app, arguments, env={"PACELINE_GENERATE_TOP_P": "7"})
    assert "top_p = 8.0" in by_flag.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt", "x", "--coordinator", FREE_PORT, "--timeout", "2"],
        ["explain", "Hello", "--url", FREE_PORT],
    ],
)
def test_nobody_listening_is_one_line_that_names_the_peer(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert FREE_PORT in result.stderr
    assert result.stderr.count("\n") == 1


def test_doctor_finds_what_does_not_answer() -> None:
    arguments = ["doctor", "--coordinator", FREE_PORT, "--draft", "none", "--target", FREE_PORT, "--timeout", "0.2"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert f"{FREE_PORT} does not answer" in result.stdout
    assert "BAD" in result.stdout
    assert "draft" not in result.stdout.replace("drafters", "")


def test_doctor_names_versions_and_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    options = DoctorOptions(coordinator=FREE_PORT, draft="none", target=FREE_PORT, timeout=0.2)
    findings = {finding.subject: finding for finding in examine(options)}
    assert "torch" in findings["engine"].detail
    assert "cpu" in findings["devices"].detail
    assert findings["model cache"] == Finding("model cache", str(tmp_path))
    assert findings["model smollm2-135m"].detail == "not pulled (paceline pull smollm2-135m)"


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("paceline mo", ["models"]),
        ("paceline serve --gpu-mem", ["--gpu-memory-utilization"]),
        ("paceline generate --acceptance ", ["coupled", "rejection", "block"]),
        ("paceline models r", ["rm"]),
    ],
)
def test_a_shell_completes_commands_flags_and_choices(words: str, completions: list[str]) -> None:
    asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    shown = runner.invoke(app, [], prog_name="paceline", env=asked)
    assert (shown.exit_code, shown.stdout.split(), shown.stderr) == (0, completions, "")


def test_completion_is_shown_and_installed(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}

    def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.argv[0] = 'paceline'; from paceline.cli.main import main; main()"
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | home, check=False)

    shown = paceline("--show-completion", "zsh")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "#compdef paceline" in shown.stdout
    installed = paceline("--install-completion", "bash")
    assert (installed.returncode, installed.stderr) == (0, "")
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "_PACELINE_COMPLETE=complete_bash" in script.read_text()
    wrong = paceline("--show-completion", "tcsh")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("paceline: error: ")
    assert "'tcsh'" in wrong.stderr


def test_models_are_listed_and_removed(tmp_path: Path) -> None:
    home = {"PACELINE_HOME": str(tmp_path)}
    other = tmp_path / "models" / "mine"
    other.mkdir(parents=True)
    listed = runner.invoke(app, ["models", "list"], env=home)
    assert listed.exit_code == 0
    assert "smollm2-135m: not pulled (89 MiB to fetch: paceline pull smollm2-135m)" in listed.stdout
    assert f"models are kept in {tmp_path / 'models'}" in listed.stdout
    assert "draft: installed, 14 MiB in" in listed.stdout

    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir()
    (folder / "provenance.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3 << 20))
    assert f"smollm2-135m: pulled, 3 MiB in {folder}" in runner.invoke(app, ["models", "list"], env=home).stdout
    kept = runner.invoke(app, ["models", "rm", "smollm2-135m"], input="n\n", env=home)
    assert kept.exit_code == 0
    assert f"delete {folder} (3 MiB)?" in kept.stdout
    assert folder.is_dir()
    removed = runner.invoke(app, ["models", "rm", "smollm2-135m", "--yes"], env=home)
    assert removed.stdout == f"smollm2-135m: removed, 3 MiB freed in {folder}\n"
    assert [each.name for each in (tmp_path / "models").iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["smollm2-135m", "mine", "../mine"])
def test_only_what_was_pulled_is_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "provenance.json").write_text("{}")
    result = runner.invoke(app, ["models", "rm", name, "--yes"], env={"PACELINE_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert result.stderr == f"paceline: error: model = {name!r}: must be one that is pulled: none is\n"
    assert (tmp_path / "models" / "mine" / "provenance.json").exists()


SERVE = """
from paceline.cli.main import app
from paceline.local.supervisor import SupervisedServices

def start(*_, **__):
    print("the first service would start now")
    raise KeyboardInterrupt

SupervisedServices.start = start
try:
    app(["serve", "table:vocab=64,seed=1"])
except SystemExit:
    pass
"""


def test_serve_loads_no_laboratory_and_no_training() -> None:
    """Of what services import the layers of the import linter say so; `paceline` finds commands by entry points."""
    code = f"{SERVE}\nimport sys, json; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, modules = done.stdout.splitlines()
    assert "the first service would start now" in lines
    packages = {name.partition(".")[0] for name in json.loads(modules)}
    assert "paceline" in packages
    assert (
        packages & {"paceline_lab", "paceline_training", "paceline_ray", "paceline_sglang", "paceline_vllm"} == set()
    )


@pytest.mark.parametrize(
    ("flags", "stated"), [([], {}), (["--temperature", "1", "--top-k", "0"], {"temperature": 1.0, "top_k": 0})]
)
def test_generate_states_what_its_flags_say_and_leaves_the_rest_to_the_model(
    flags: list[str], stated: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GenerateRequest] = []

    def asked_at(peer: object, key: object, timeout: object, wanted: Any) -> None:
        asked.append(wanted.request)

    monkeypatch.setattr("paceline.cli.generate._generate_at", asked_at)
    result = runner.invoke(app, ["generate", "--prompt", "x", *flags])
    assert result.exit_code == 0, result.output
    (request,) = asked
    assert request.sampling.stated_numbers == stated
