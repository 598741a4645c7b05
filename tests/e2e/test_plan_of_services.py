"""A plan that running services make is that of passes on this machine, as far as services tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.engine.table.engine import load_table
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.draft import Shadow
from paceline.protocol.proposal import NGRAM
from paceline.protocol.target import RowLogprobs, Verdict
from paceline.runtime.config import PeerSettings
from paceline_lab.predict import remote, services
from paceline_lab.predict.positions import TextPositions, as_arrays
from paceline_lab.predict.positions_cache import PositionsCache
from paceline_lab.predict.reading import EnginePasses, PassSource, read_texts
from paceline_lab.predict.sample import SampleOptions, texts_at
from paceline_lab.predict.services import ServicePasses, ServicesOptions
from paceline_training.corpus import Role, Row, save_shard
from paceline_training.user_data import UserData
from paceline_training.writing import GenerationRecipe, Writer
from tests.e2e.cluster import Cluster, cluster_fixture, free_port, full

TARGET = "table:vocab=300,seed=1,sharpness=4,max_length=256"
DRAFT = "table:vocab=300,seed=1,sharpness=4,noise=0.3,noise_seed=2,max_length=256"
PROMPTS = ("one", "another")
FINISHED = 3
CANONICAL = load_table(DRAFT).info.fingerprint.model
"""As the service calls its model."""
ANSWER_TOKENS = 90
"""More than the nodes of one proposal."""
cluster = cluster_fixture(TARGET, DRAFT)


def services_of(cluster: Cluster, *drafters: str) -> ServicesOptions:
    target, draft = (PeerSettings(address=cluster.address_of(name)) for name in ("target", "draft"))
    return ServicesOptions(target, (draft,), drafters)


def finished_texts() -> list[Row]:
    """Texts of the target's at temperature 1 with noise of their own, which it would not go on with greedily."""
    recipe = GenerationRecipe(seed=9, max_length=200, temperature_mix=((1.0, 1.0),))
    prompts = tuple(tuple(range(40, 45 + number)) for number in range(FINISHED))
    rows = dict(Writer(load_table(TARGET), load_tokenizer(TARGET), recipe, prompts).write(range(FINISHED)))
    return [row for row in rows.values() if row is not None]


def read_by(source: PassSource, folder: Path, temperature: float) -> list[TextPositions]:
    """Prompts that are answered, and finished texts, one of them in two turns."""
    wanted = SampleOptions(folder, (temperature,), answer_tokens=ANSWER_TOKENS)
    tokenizer = load_tokenizer(TARGET)
    rows = finished_texts()
    rows[0].roles[30:50] = Role.USER
    data = UserData(tuple(rows), tuple(tokenizer.encode(prompt) for prompt in PROMPTS))
    texts = texts_at(wanted, temperature, data, source, tokenizer, folder)
    return read_texts(source, texts, PositionsCache(folder / "kept", {}))


def both(cluster: Cluster, folder: Path, temperature: float) -> tuple[list[TextPositions], list[TextPositions]]:
    here = read_by(EnginePasses(load_table(TARGET), {CANONICAL: load_table(DRAFT)}), folder / "here", temperature)
    with ServicePasses(services_of(cluster), load_tokenizer(TARGET)) as running:
        return here, read_by(running, folder / "running", temperature)


def check_same(here: list[TextPositions], running: list[TextPositions]) -> None:
    """Tokens and ranks are equal, figures as far as they are told."""
    assert [text.own for text in running] == [text.own for text in here] == [True] * len(PROMPTS) + [False] * FINISHED
    for one, other in zip(here, running, strict=True):
        assert (one.tokens == other.tokens).all()
        assert list(one.drafters) == list(other.drafters) == [NGRAM, CANONICAL]
        check_told(as_arrays(one.target), as_arrays(other.target))
        for expected, found in ((one.drafters[name], other.drafters[name]) for name in one.drafters):
            assert (expected.ranks == found.ranks).all() and (expected.offered == found.offered).all()
            check_told(as_arrays(expected), as_arrays(found))


def check_told(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """`reach` has single draws in place of chances, except greedily; other figures are right or absent."""
    for name, values in found.items():
        if name == "reach":
            continue
        told = values != -1 if name in ("choices", "tops") else ~np.isnan(values)
        assert values[told] == pytest.approx(expected[name][told], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("temperature", [0.8, full(0.0)])
def test_ranks_of_running_services_are_those_of_passes_here(
    cluster: Cluster, tmp_path: Path, temperature: float
) -> None:
    here, running = both(cluster, tmp_path, temperature)
    check_same(here, running)
    drafted = [text.drafters[CANONICAL] for text in running]
    ranks = np.concatenate([each.ranks for each in drafted])
    assert {0, 1, 2} <= set(ranks.tolist()) and ranks.size > 200
    others = sum(int((text.target.tokens != text.target.written).sum()) for text in running)
    assert others > 20, "the target draws other tokens than finished texts have"
    for one, other in zip(here, drafted, strict=True):
        confident = other.confidence == pytest.approx(one.drafters[CANONICAL].confidence, rel=1e-4)
        assert confident and np.isnan(other.overlaps).all()
        if not temperature:
            assert (other.reach == one.drafters[CANONICAL].reach).all()
    cluster.wait_idle()


def shifted_verdict(event: Any) -> Any:
    if not isinstance(event, Verdict) or not event.logprobs:
        return event
    logprobs = event.logprobs[1:] + event.logprobs[:1]
    # The first row tells of the text's first token, too: what is wrong is the place alone.
    told = [
        RowLogprobs((*row.token_ids, *other.token_ids), (*row.logprobs, *other.logprobs))
        for row, other in zip(logprobs, event.logprobs, strict=True)
    ]
    return replace(event, token_ids=event.token_ids[1:] + event.token_ids[:1], logprobs=tuple(told))


def shifted_shadow(event: Any) -> Any:
    if not isinstance(event, Shadow):
        return event
    return replace(event, ranks=event.ranks[1:] + event.ranks[:1])


@pytest.mark.full
@pytest.mark.parametrize("shifted", [shifted_verdict, shifted_shadow])
def test_positions_that_are_shifted_by_one_are_found(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shifted: Callable[[Any], Any]
) -> None:
    following = remote.Exchange.next

    async def mutated(session: Any) -> Any:
        return shifted(await following(session))

    monkeypatch.setattr(remote.Exchange, "next", mutated)
    here, running = both(cluster, tmp_path, 0.0)
    with pytest.raises(AssertionError):
        check_same(here, running)


def plan(sample: Path, *options: str, target: str = TARGET, out: str = "out") -> Any:
    arguments = ["plan", target, "--sample", str(sample), "--out", str(sample.parent / out), "--temperature", "0"]
    return CliRunner().invoke(app, [*arguments, "--answer-tokens", "24", "--k", "1,2,3:2", *options])


def urls(cluster: Cluster) -> tuple[str, ...]:
    return "--target-url", cluster.address_of("target"), "--draft-url", cluster.address_of("draft")


def without_names(report: Any, part: str) -> list[dict[str, Any]]:
    """A part's table without its drafters' names: the service's has all its settings in it."""
    return [{name: value for name, value in row.items() if name != "drafter"} for row in report["parts"][part][-1]]


@pytest.mark.full
def test_the_report_is_the_same_but_for_what_is_absent(cluster: Cluster, tmp_path: Path) -> None:
    sample = tmp_path / "texts.npz"
    save_shard(sample, finished_texts(), 300)
    made = plan(sample, *urls(cluster))
    assert made.exit_code == 0, made.stderr
    lines = ("--target-line", "1:20", "--draft-line", "1:1")
    assert plan(sample, "--drafter", DRAFT, *lines, out="here").exit_code == 0
    found, expected = (json.loads((tmp_path / out / "plan.json").read_text()) for out in ("out", "here"))
    assert without_names(found, "Tokens a round") == without_names(expected, "Tokens a round")
    assert "as the running services say" in found["facts"]["target step"]
    assert cluster.address_of("draft") in found["facts"]["read by"]
    rows, wanted = (without_names(each, "What the drafters say") for each in (found, expected))
    assert [list(row) for row in rows] == [list(row) for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        assert row["H(target)"] == "absent" and row["first"] == other["first"]


@pytest.mark.full
def test_what_services_can_not_do_is_named(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "CONNECT_S", 1.0)
    sample = tmp_path / "sample.jsonl"
    sample.write_text('{"prompt": "one"}\n')
    target, draft = urls(cluster)[:2], urls(cluster)[2:]
    nobody = f"127.0.0.1:{free_port()}"
    for options, model, named in (
        ((*target, *draft, "--drafter", "another"), TARGET, "drafter = 'another': must be one that the draft"),
        ((*target, *draft), "table:vocab=64,seed=1", "tokenizer of the target at"),
        (draft, TARGET, "left out without --target-url"),
        ((*target, "--drafter", "x"), TARGET, "left out without --draft-url"),
        (("--target-url", draft[1]), TARGET, f"target at {draft[1]}"),
        ((*target, "--draft-url", nobody), TARGET, f"draft at {nobody}"),
    ):
        found = plan(sample, *options, target=model)
        assert found.exit_code in (1, 2) and named in found.stderr, (options, found.stderr)
