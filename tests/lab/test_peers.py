"""`bench peers`: workers that crash, hang or babble cost themselves only, and the report compares like with like."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.local.settings import draft_flags, local_settings, target_flags
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.generation import ChatMessage
from paceline_lab.bench.peers import command
from paceline_lab.bench.peers import install as peer_install
from paceline_lab.bench.peers import models as peer_models
from paceline_lab.bench.peers import run as peers
from paceline_lab.bench.peers.command import Lineup
from paceline_lab.bench.peers.install import PEERS, install_peer, is_installed
from paceline_lab.bench.peers.models import assistant_folder, gguf_of, is_model, write_float32
from paceline_lab.bench.peers.process import PeerFailed, PeerProcess
from paceline_lab.bench.peers.report import duels, peer_rows, peers_json, peers_markdown
from paceline_lab.bench.peers.run import Contest, ContestPlan, OurContestant, PeerContestant, run_contest
from paceline_lab.bench.peers.starting import PeerRunSettings, modes_of, start_peers
from paceline_lab.bench.prompts import Prompt
from paceline_lab.bench.speed.groups import MeasuredServices, cpu_seconds
from paceline_lab.bench.worker_process import WorkerFailed
from paceline_lab.reporting.progress import stderr_console
from tests.lab.fakes import FakeRunner, prompt

TARGET = "table:vocab=300,seed=1"
WORKER = Path(__file__).parent / "fake_worker.py"
PASSES = 3

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "PACELINE_HOME": ""})


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def worker(behaviour: str, folder: Path, *, ready_s: float = 30, answer_s: float = 30) -> PeerProcess:
    command, log = [sys.executable, str(WORKER), behaviour], folder / f"{behaviour}.log"
    return PeerProcess(behaviour, command, dict(os.environ), log, ready_s=ready_s, answer_s=answer_s)


def write_all(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def contestant(behaviour: str, stack: ExitStack, folder: Path, **limits: float) -> PeerContestant:
    mode = "plain" if behaviour == "plain" else f"lookup {behaviour}"
    return PeerContestant("other", mode, stack.enter_context(worker(behaviour, folder, **limits)))


def hold(contestants: list[peers.Contestant], users: tuple[int, ...] = (1,)) -> Contest:
    contest = Contest()
    plan = ContestPlan({"chat": (prompt("a"), prompt("b"))}, PASSES, tokens=16, users=users)
    run_contest(plan, contestants, load_tokenizer(TARGET), contest)
    return contest


def test_a_crash_and_a_hang_are_reported_and_the_others_go_on(stack: ExitStack, tmp_path: Path) -> None:
    contestants: list[peers.Contestant] = [
        contestant("crashes", stack, tmp_path),
        contestant("hangs", stack, tmp_path, answer_s=1),
        contestant("refuses", stack, tmp_path),
        contestant("plain", stack, tmp_path),
    ]
    contest = hold(contestants)
    counts = {mode: sum(run.mode == mode for run in contest.runs) for mode in ("plain", "lookup crashes")}
    assert counts == {"plain": PASSES, "lookup crashes": 1}  # its first request was the warm-up
    assert "ended with exit code 3" in contest.failures["other lookup crashes"]
    assert "out of memory" in contest.failures["other lookup crashes"]
    assert "gave no answer in 1 s" in contest.failures["other lookup hangs"]
    assert "no such prompt" in contest.failures["other lookup refuses"]
    hung = contestants[1].processes[0]
    assert not psutil.pid_exists(hung)
    text = peers_markdown(contest)
    assert "## Not measured, or not to the end" in text
    assert "- other lookup hangs: hangs gave no answer in 1 s" in text


@pytest.mark.parametrize(("behaviour", "said"), [("mute", "gave no answer in 1 s"), ("noise", "'INFO loading")])
def test_a_worker_that_never_gets_ready_is_ended(behaviour: str, said: str, tmp_path: Path) -> None:
    process = worker(behaviour, tmp_path, ready_s=1)
    with pytest.raises(WorkerFailed, match=said), process:
        pass
    assert not psutil.pid_exists(process.processes[0])


def test_contestants_take_turns_and_begin_with_another_each_pass(stack: ExitStack, tmp_path: Path) -> None:
    contest = hold([contestant("plain", stack, tmp_path), contestant("speculates", stack, tmp_path)])
    assert [(run.number, run.prompt, run.mode == "plain") for run in contest.runs] == [
        *((0, "a", True), (0, "a", False)),
        *((1, "b", False), (1, "b", True)),
        *((2, "a", True), (2, "a", False)),
    ]


def test_figures_and_the_text_check_that_can_fail(stack: ExitStack, tmp_path: Path) -> None:
    ours: list[peers.Contestant] = [OurContestant(FakeRunner("none")), OurContestant(FakeRunner("ngram"))]
    theirs = [contestant(name, stack, tmp_path) for name in ("plain", "speculates", "changes")]
    contest = hold([*ours, *theirs])
    rows = {(row.system, row.mode): row for row in peer_rows(contest)}
    speculates, changes = rows["other", "lookup speculates"], rows["other", "lookup changes"]
    assert (speculates.over_plain.median, speculates.tokens_per_step) == (2.0, 4.0)
    assert (speculates.same_as_plain, speculates.plain_compared, speculates.first_difference) == (3, 3, None)
    assert (changes.same_as_plain, changes.plain_compared, changes.first_difference) == (0, 3, 3)
    assert rows["paceline", "ngram"].same_as_ours == 3
    assert speculates.same_as_ours == 0
    pairs = {(duel.ours, duel.peer): duel for duel in duels(contest, list(rows.values()))}
    modes, opponents = ("paceline plain", "paceline ngram"), ("other plain", "other lookup speculates")
    assert set(pairs) == set(product(modes, opponents)), "each of ours beside their plain and their best"
    assert all(duel.ratio.median > 1 and duel.lower > 1 for duel in pairs.values())  # the fakes answer at once
    text = peers_markdown(contest)
    assert "0 of 3 (first from token 3)" in text
    json.dumps(peers_json(contest))


def test_users_ask_at_once_and_their_tokens_count_together(stack: ExitStack, tmp_path: Path) -> None:
    fake = FakeRunner("none")
    ours = [OurContestant(fake), OurContestant(FakeRunner("none"), system=peers.REPRODUCIBLE)]
    contest = hold([*ours, contestant("plain", stack, tmp_path)], users=(1, 2))
    waves = [(run.users, run.number, run.prompt) for run in contest.runs if run.system == "other"]
    assert waves == [(1, 0, "a"), (2, 0, "a"), (1, 1, "b"), (1, 2, "a"), (2, 1, "a")]
    rows = {(row.users, row.system): row for row in peer_rows(contest)}
    alone, together = rows[1, "other"], rows[2, "other"]
    assert (alone.runs, alone.speed.median) == (3, 16.0)
    assert (together.runs, together.speed.median, together.tokens_per_step) == (2, 32.0, 1.0)
    texts = {run.prompt: run.token_ids for run in contest.runs if (run.system, run.users) == ("other", 1)}
    pair = next(run for run in contest.runs if (run.system, run.users) == ("other", 2))
    assert pair.token_ids == (*texts["a"], *texts["b"])
    assert len(fake.calls) == 1 + 3 + 4, "a warm-up, three waves of one and two of two"
    assert rows[2, "paceline"].same_as_plain == rows[2, peers.REPRODUCIBLE].same_as_ours == 2
    duelled = {(duel.users, duel.ours, duel.peer) for duel in duels(contest, list(rows.values()))}
    assert duelled == set(product((1, 2), ("paceline plain", "paceline reproducible plain"), ("other plain",)))


def test_memory_and_start_of_each_contestant_are_reported(stack: ExitStack, tmp_path: Path) -> None:
    process = worker("plain", tmp_path)
    peer = PeerContestant("other", "plain", stack.enter_context(process), start_s=2.25)
    contest = hold([OurContestant(FakeRunner("none", processes=(os.getpid(),)), start_s=0.5), peer])
    ours, theirs = peers_json(contest)["processes"]
    assert (ours["start s"], theirs["start s"]) == ("0.5", "2.2")
    assert ours["MiB"] > theirs["MiB"] > 0, "a process that has imported numpy beside one that has not"


def test_stop_ids_end_answers_and_are_not_counted(stack: ExitStack, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("table:vocab=300,seed=1,eos=7")
    fake = FakeRunner("none")
    ends = Prompt("json", "short", ((ChatMessage("user", "1"),), (ChatMessage("user", "2"),)), ends=True)
    contest = Contest()
    run_contest(ContestPlan({"json": (ends,)}, 1, 16), [OurContestant(fake)], tokenizer, contest)
    assert not any(request.ignore_eos for _, request in fake.calls)
    assert len(contest.runs[0].token_ids) == 2 * 15


def test_a_peer_that_is_not_installed_is_named_with_what_to_do(tmp_path: Path) -> None:
    contest = Contest()
    settings = PeerRunSettings(TARGET, tmp_path, tmp_path, 1)
    modes = modes_of(["llama-cpp", "transformers"], settings)
    with start_peers(modes, settings, contest) as started:
        assert started == []
    peer_modes = {*product(("llama-cpp", "transformers"), ("plain", "lookup")), ("llama-cpp", "cache")}
    assert set(contest.failures) == {f"{peer} {mode}" for peer, mode in peer_modes}
    assert all("bench peers --install" in why for why in contest.failures.values())


def test_an_installation_that_fails_says_why_and_is_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, command: list[str], log: Path) -> None:
        log.write_text("collecting\nERROR: no matching distribution\n")
        raise PeerFailed(f"{name}: install failed: ERROR: no matching distribution")

    monkeypatch.setattr(peer_install, "_run", refuse)
    with pytest.raises(PeerFailed, match="no matching distribution"):
        install_peer("llama-cpp", tmp_path)
    assert not is_installed("llama-cpp", tmp_path)


def test_a_float32_gguf_has_the_quantised_files_values_and_settings(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    write_all(writer)
    write_float32(tmp_path / "q.gguf", tmp_path / "f.gguf")
    reader = gguf.GGUFReader(tmp_path / "f.gguf")
    assert reader.fields["llama.context_length"].contents() == 77
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    (tensor,) = reader.tensors
    assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
    assert np.array_equal(tensor.data, gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1))


def test_eight_bits_are_the_float32_files_values_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    writer.add_tensor("token_embd.weight", values)
    writer.add_tensor("output_norm.weight", values[0])
    write_all(writer)
    monkeypatch.setattr(peer_models, "float32_gguf", lambda model, home: tmp_path / "f.gguf")
    (tmp_path / "models").mkdir()
    written = gguf_of("m", "q8_0", tmp_path)
    matrix, norm = gguf.GGUFReader(written).tensors
    assert matrix.tensor_type == gguf.GGMLQuantizationType.Q8_0
    eight = gguf.quants.dequantize(matrix.data, matrix.tensor_type)
    assert eight.shape == values.shape and np.abs(eight - values).max() < np.abs(values).max() / 127
    assert norm.tensor_type == gguf.GGMLQuantizationType.F32 and np.array_equal(norm.data, values[0])
    assert gguf_of("m", "q8_0", tmp_path) == written
    with pytest.raises(PeerFailed, match="no q4_k_m file is known"):
        gguf_of("m", "q4_k_m", tmp_path)


def test_a_draft_that_is_a_model_is_what_other_systems_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert is_model(str(tmp_path)) and is_model("qwen2.5-coder-0.5b") and not is_model("default")
    assert assistant_folder(str(tmp_path), "t", tmp_path / "out") == tmp_path
    (tmp_path / "manifest.json").write_text("{}")
    assert not is_model(str(tmp_path)), "ours needs its head written out"


def test_modes_of_a_draft_need_one(tmp_path: Path) -> None:
    plain = PeerRunSettings(TARGET, tmp_path, tmp_path, 1)
    drafted = PeerRunSettings(TARGET, tmp_path, tmp_path, 1, draft="d")
    more = set(modes_of([*PEERS], drafted)) - set(modes_of([*PEERS], plain))
    assert more == {("transformers", "assisted"), ("llama-cpp", "draft"), ("llama-cpp", "draft+lookup")}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gguf", "q2"], ("gguf", "'q2'", "float32, q8_0, q4_k_m, own")),
        (["--engine", "vllm"], ("engine", "'vllm'", "auto, torch, llama")),
        (["--users", "1,0"], ("users", "0", "[1, 64]")),
        (["--users", ""], ("users", "one number or more")),
        (["--peers", "oracle"], ("peer", "'oracle'", "transformers")),
        (["--cores", "4096"], ("cores", "4096", "[0, ")),
        (["--passes", "0"], ("passes", "0", "at least 1")),
        (["--peer-draft-tokens", "0"], ("peer_draft_tokens", "0", "[1, 64]")),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: tuple[str, ...]) -> None:
    result = runner.invoke(app, ["bench", "peers", TARGET, *arguments])
    assert result.exit_code == 2, result.output
    assert all(part in result.stderr for part in named), result.stderr


def test_the_command_reports_ours_alone_where_no_peer_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def fake_groups(*_: object) -> Iterator[dict[str, FakeRunner]]:
        yield {name: FakeRunner(name, processes=(os.getpid(),)) for name in ("none", "ngram")}

    monkeypatch.setattr(command, "running_groups", fake_groups)
    arguments = ["--peers", "llama-cpp", "--peers-home", str(tmp_path), "--passes", "1", "--tokens", "8"]
    wanted = ["bench", "peers", TARGET, *arguments, "--kind", "copy", "--out", str(tmp_path)]
    result = runner.invoke(app, wanted)
    assert result.exit_code == 0, result.output
    values = json.loads(next(tmp_path.glob("peers-*.json")).read_text())
    rows = [[row[key] for key in ("system", "mode", "same_as_plain", "tokens_per_step")] for row in values["results"]]
    assert rows == [["paceline", "plain", 1, 1], ["paceline", "ngram", 1, 4]]
    assert "llama-cpp is not installed" in next(tmp_path.glob("peers-*.md")).read_text()


def test_ours_on_llama_read_the_peers_file_with_its_library_and_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[MeasuredServices] = []

    @contextmanager
    def fake_groups(services: MeasuredServices, drafters: object, *_: object) -> Iterator[dict[str, FakeRunner]]:
        started.append(services)
        assert drafters == ("none", f"auto:{draft}")
        yield {name: FakeRunner(name) for name in ("none", f"auto:{draft}")}

    monkeypatch.setattr(command, "running_groups", fake_groups)
    library = tmp_path / "llama-cpp" / "lib" / "python3.11" / "site-packages" / "xllamacpp" / "xllamacpp.abi3.so"
    library.parent.mkdir(parents=True)
    library.touch()
    target, draft = (write_tiny(tmp_path / name) for name in ("t.gguf", "d.gguf"))
    settings = PeerRunSettings(target, tmp_path, tmp_path, 1, draft, precision="own", users=3)
    lineup = Lineup(["auto"], None, (), engine="llama", reproducible=True)
    with command._start_ours(settings, lineup, stderr_console()) as ours:
        assert {one.name for one in ours} == {
            f"{system} {mode}" for system in (peers.OURS, peers.REPRODUCIBLE) for mode in ("plain", "auto:d.gguf")
        }
    default, reproducible = started
    assert reproducible.options == {**default.options, "reproducible": True}
    assert default.model == reproducible.model == target
    serve = local_settings(target, f"auto:{draft}", **reproducible.options)
    for flags in (target_flags(serve, 1), draft_flags(serve, 1)):
        assert (flags["engine.engine"], flags["engine.llama.library"]) == ("llama", library)
    assert target_flags(serve, 1)["engine.reproducible"]
    rows = 3 * (2048 + 256)
    row_bytes = 2 * 2 * 16 * 3  # keys and values in two bytes, of 16 numbers, in 3 layers
    assert default.environment["PACELINE_DRAFT_ENGINE__KV_BYTES"] == str(rows * row_bytes)
    assert default.environment["PACELINE_TARGET_ENGINE__PREFIX_REUSE"] == "false"


def write_tiny(file: Path) -> str:
    """A GGUF file's header, of 3 layers with a head of 16."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(3)
    writer.add_head_count(1)
    writer.add_embedding_length(16)
    write_all(writer)
    return str(file)


def test_own_takes_a_gguf_file_as_it_is(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "t.gguf")
    assert gguf_of(file, "own", tmp_path) == Path(file)
    with pytest.raises(PeerFailed, match=r"no \.gguf file, which --gguf own takes"):
        gguf_of(TARGET, "own", tmp_path)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b"),
        ("files/Qwen2.5-Coder-1.5B.Q4_K_M.gguf", "Qwen2.5-Coder-1.5B.Q4_K_M"),
    ],
)
def test_a_name_with_dots_stays_whole(tmp_path: Path, model: str, name: str) -> None:
    (tmp_path / "models").mkdir()
    for precision, end in (("float32", "f32"), ("q8_0", "q8_0"), ("q4_k_m", "q4_k_m")):
        file = tmp_path / "models" / f"{name}-{end}.gguf"
        file.touch()
        assert gguf_of(model, precision, tmp_path) == file


def test_cpu_time_of_processes_is_read_and_of_those_that_have_ended_is_none(tmp_path: Path) -> None:
    process = worker("plain", tmp_path)
    with process:
        assert cpu_seconds([os.getpid(), *process.processes]) > cpu_seconds(process.processes) >= 0
    assert cpu_seconds(process.processes) == 0
