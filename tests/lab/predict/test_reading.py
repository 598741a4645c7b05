"""Both passes on table models: what is kept, and that kept ranks are what a service would have seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.table.engine import load_table
from paceline.engine.wrapped import WrappedEngine
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.sampling import NoiseKey
from paceline_lab.predict.passes import SampleText
from paceline_lab.predict.positions import TextPositions
from paceline_lab.predict.positions_cache import PositionsCache
from paceline_lab.predict.reading import EnginePasses, read_texts
from paceline_lab.predict.sample import SampleOptions, read_sample, texts_at
from paceline_training.corpus import Role, Row, save_shard

TARGET = "table:vocab=300,seed=1,contexts=64,max_length=96"
DRAFT = "table:vocab=300,seed=1,contexts=64,noise=0.3,noise_seed=2,max_length=96"


def sample_file(folder: Path, *lines: object) -> Path:
    file = folder / "sample.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def sampled(folder: Path, temperature: float, *lines: object, texts: int = 16) -> list[SampleText]:
    options = SampleOptions(sample_file(folder, *lines), (temperature,), texts, answer_tokens=24)
    tokenizer = load_tokenizer(TARGET)
    data = read_sample(options, tokenizer, 96)
    return texts_at(options, temperature, data, EnginePasses(load_table(TARGET), {}), tokenizer, folder)


def predicted(folder: Path, texts: list[SampleText], target: str = TARGET, draft: str = DRAFT) -> list[TextPositions]:
    return read_texts(
        EnginePasses(load_table(target), {"draft": load_table(draft)}), texts, PositionsCache(folder / "kept", {})
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_own_texts_are_the_targets_draws_and_a_twin_is_always_right(tmp_path: Path, temperature: float) -> None:
    texts = sampled(tmp_path, temperature, {"prompt": "one"}, {"prompt": "another"})
    assert [text.own for text in texts] == [True, True]
    as_foreign = [replace(text, own=False) for text in texts]  # then draws are made anew, from the same noise
    for found in predicted(tmp_path, as_foreign, draft=TARGET):
        assert (found.target.tokens == found.target.written).all()
        twin = found.drafters["draft"]
        assert (twin.ranks == 1).all() and (twin.choices == found.target.tokens).all()
        assert twin.accepted == pytest.approx(1)
        assert twin.overlaps == pytest.approx(1)
        assert twin.divergences == pytest.approx(0, abs=1e-9)


def test_ranks_agree_with_their_chances(tmp_path: Path) -> None:
    """False-failure odds below 1e-6: 5 standard deviations."""
    texts = sampled(tmp_path, 1.0, *({"prompt": f"prompt {number}"} for number in range(12)))
    drafted = [text.drafters["draft"] for text in predicted(tmp_path, texts)]
    for rank in (1, 2, 8):
        chance = np.concatenate([each.reach[:, 0, rank - 1] for each in drafted])
        seen = np.concatenate([(each.ranks > 0) & (each.ranks <= rank) for each in drafted])
        assert abs(seen.sum() - chance.sum()) < 5 * np.sqrt((chance * (1 - chance)).sum())
        assert 0.05 < chance.mean() < 0.999


def test_greedy_ranks_are_places_in_the_drafts_own_order(tmp_path: Path) -> None:
    lines = [{"prompt": letter} for letter in "abcdefgh"]
    found = [text.drafters["draft"] for text in predicted(tmp_path, sampled(tmp_path, 0.0, *lines))]
    for drafted in found:
        for rank, reach in zip(drafted.ranks, drafted.reach[:, 0], strict=True):
            assert reach.tolist() == [float(0 < rank <= wanted) for wanted in range(1, 9)]
    assert {1, 0} < {int(rank) for drafted in found for rank in drafted.ranks}


def test_matches_are_followed_token_by_token(tmp_path: Path) -> None:
    tokens = np.array([7, 8, 9, 5, 7, 8, 9, 6, 4], np.int32)
    roles = np.array([0] * 5 + [Role.ANSWER] * 4, np.int8)
    row = Row(tokens, roles, 1.0)
    target = load_table("table:vocab=16,seed=1")
    found = read_texts(
        EnginePasses(target, {}), [SampleText(row, NoiseKey(0), own=True)], PositionsCache(tmp_path, {})
    )[0]
    match = found.drafters["ngram"]
    assert match.choices.tolist() == [8, 9, 5, -1]  # behind 7; 7 8; 7 8 9; and 6, which is new
    assert match.reach[:, 0, 0].tolist() == [1, 1, 0, 0]
    assert match.reach[1, 1, 0] == 1 and match.reach[2, 2, 0] == 0  # the first match, one and two tokens on
    assert match.offered[0] > 1 and match.offered[3] == 0


class CountedEngine(WrappedEngine):
    steps = 0

    def step(self, plan: StepPlan) -> list[Logits]:
        type(self).steps += 1
        return list(self._inner.step(plan))


def test_what_is_kept_is_not_read_again_and_another_drafter_can_be_added(tmp_path: Path) -> None:
    texts = sampled(tmp_path, 0.8, {"prompt": "one"})
    engine: Engine = CountedEngine(load_table(TARGET))
    cache = PositionsCache(tmp_path / "kept", {"target": TARGET})
    first = read_texts(EnginePasses(engine, {"a": load_table(DRAFT)}), texts, cache)[0]
    read = CountedEngine.steps
    again = read_texts(EnginePasses(engine, {"a": load_table(DRAFT)}), texts, cache)[0]
    assert CountedEngine.steps == read
    assert (again.drafters["a"].reach == first.drafters["a"].reach).all()
    more = read_texts(EnginePasses(engine, {"a": load_table(DRAFT), "b": load_table(TARGET)}), texts, cache)[0]
    assert CountedEngine.steps > read and set(more.drafters) == {"ngram", "a", "b"}
    with pytest.raises(InvalidInput, match="target"):
        PositionsCache(tmp_path / "kept", {"target": "another"})


def test_wrong_samples_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="at least 1 line"):
        sampled(tmp_path, 0.0)
    with pytest.raises(InvalidInput, match="a prompt, or a text of 2 tokens"):
        sampled(tmp_path, 0.0, {"text": "x"})
    random = np.random.Generator(np.random.Philox(1))
    row = Row(random.integers(0, 300, 60).astype(np.int32), np.full(60, Role.ANSWER, np.int8), 1.0)
    shard = tmp_path / "shard.npz"
    save_shard(shard, [row], 300)
    texts = texts_of_shard(shard, tmp_path)
    with pytest.raises(InvalidInput, match="another tokenizer's ids"):
        predicted(tmp_path, texts, "table:vocab=300,seed=1,sharpness=9,max_length=96")


def texts_of_shard(shard: Path, folder: Path) -> list[SampleText]:
    wanted = SampleOptions(shard, (1.0,), answer_tokens=48)
    tokenizer = load_tokenizer(TARGET)
    return texts_at(
        wanted, 1.0, read_sample(wanted, tokenizer, 96), EnginePasses(load_table(TARGET), {}), tokenizer, folder
    )


def test_a_sample_is_spread_over_the_file_and_cut(tmp_path: Path) -> None:
    lines = [{"text": f"{letter * 60}"} for letter in "abcdefg"]
    texts = sampled(tmp_path, 1.0, *lines, texts=3)
    assert [chr(text.row.token_ids[-1]) for text in texts] == ["a", "d", "g"]
    assert [int(text.row.loss_mask.sum()) for text in texts] == [24, 24, 24]


class _SameName(EnginePasses):
    """A target by a name that others have, too."""

    def __init__(self, target: str, numeric: str) -> None:
        super().__init__(load_table(target), {})
        self._numeric = numeric

    @property
    def fingerprint(self) -> Fingerprint:
        return replace(super().fingerprint, model="t", numeric=self._numeric)


def test_targets_of_one_name_and_other_bits_keep_their_answers_apart(tmp_path: Path) -> None:
    wanted = SampleOptions(sample_file(tmp_path, {"prompt": "one"}), (0.0,), answer_tokens=24)
    tokenizer = load_tokenizer(TARGET)
    data = read_sample(wanted, tokenizer, 96)
    first, other, again = (
        texts_at(wanted, 0.0, data, source, tokenizer, tmp_path)[0].row.token_ids.tolist()
        for source in (
            _SameName(TARGET, "float32"),
            _SameName(TARGET.replace("seed=1", "seed=2"), "bfloat16"),
            _SameName(TARGET.replace("seed=1", "seed=3"), "float32"),
        )
    )
    assert first != other
    assert first == again, "the answers of the same bits are kept"
