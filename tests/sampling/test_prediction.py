"""A prediction is followed through edits, found again behind them, and never proposed beyond its end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocol.proposal import PREDICTION
from paceline.sampling.match import MAX_FOLLOWING
from paceline.sampling.prediction import MAX_ANCHORS, PredictedText

FILE = tuple(range(100, 400))
"""No token twice: every place is certain."""


@dataclass(frozen=True)
class ScriptedEdit:
    """Tokens of a file that are left out at a place, and those that stand there instead."""

    place: int
    removed: int
    added: tuple[int, ...]


def edited(file: Sequence[int], edits: Sequence[ScriptedEdit]) -> tuple[list[int], list[bool]]:
    """The file with its edits, and which of its tokens were kept."""
    text: list[int] = []
    kept: list[bool] = []
    at = 0
    for edit in edits:
        text += [*file[at : edit.place], *edit.added]
        kept += [True] * (edit.place - at) + [False] * len(edit.added)
        at = edit.place + edit.removed
    return [*text, *file[at:]], [*kept, *[True] * (len(file) - at)]


def guesses(predicted: PredictedText, text: Sequence[int]) -> list[int | None]:
    """What stood to be proposed for each token of a text that is committed token by token; None: nothing."""
    proposed: list[int | None] = []
    for token in text:
        match = predicted.match()
        proposed.append(match.following[0] if match else None)
        predicted.extend((token,))
    return proposed


def right_of(file: Sequence[int], text: Sequence[int]) -> list[bool]:
    return [guess == token for guess, token in zip(guesses(PredictedText(file), text), text, strict=True)]


def test_a_text_that_is_the_prediction_is_proposed_whole_from_its_first_token_on() -> None:
    predicted = PredictedText(FILE)
    for start in range(0, len(FILE), 50):
        match = predicted.match()
        assert match is not None
        assert match.drafter == PREDICTION
        assert match.following == FILE[start : start + MAX_FOLLOWING]
        predicted.extend(FILE[start : start + 50])
    assert predicted.match() is None, "it has ended"
    predicted.extend((1, 2, 3))
    assert predicted.match() is None


@pytest.mark.parametrize(
    ("edit", "missed"),
    [
        (ScriptedEdit(0, 0, (1, 2, 3)), 3 + 1),
        (ScriptedEdit(100, 0, (1,)), 1 + 1),
        (ScriptedEdit(100, 0, tuple(range(40))), 40 + 2),
        (ScriptedEdit(100, 1, (1,)), 1 + 1),
        (ScriptedEdit(100, 5, (1, 2)), 2 + 1),
        (ScriptedEdit(100, 5, ()), 1),
        (ScriptedEdit(100, 60, ()), 2),
        (ScriptedEdit(280, 20, ()), 0),
    ],
    ids=["preface", "insertion", "long insertion", "token", "replacement", "deletion", "long deletion", "cut off"],
)
def test_one_token_behind_an_edit_finds_the_way_back_nearby_and_two_elsewhere(
    edit: ScriptedEdit, missed: int
) -> None:
    """`missed`: the tokens that the edit added, and those that it takes to find the way back."""
    text, _ = edited(FILE, [edit])
    assert right_of(FILE, text).count(False) == missed


def test_a_block_that_was_moved_is_found_and_so_is_the_one_that_it_stood_before() -> None:
    text = [*FILE[:50], *FILE[200:250], *FILE[50:200], *FILE[250:]]
    assert right_of(FILE, text).count(False) <= 3 * 2


def test_a_name_that_is_changed_is_changed_throughout() -> None:
    name, other = (7, 8), (9, 10, 11)
    calls = [(100 + i, *name, 200 + i, 300 + i, *range(400 + 10 * i, 410 + 10 * i)) for i in range(20)]
    file = [token for call in calls for token in call]
    text = [token for call in calls for token in (*call[:1], *other, *call[3:])]
    right = right_of(file, text)
    first = len(calls[0]) + 1
    assert right[:first].count(False) <= len(other) + 1
    assert right[first:].count(False) == 0, "expected everywhere else"


def test_an_edit_that_is_not_made_again_is_not_expected_any_more() -> None:
    calls = [(7, *range(100 + 20 * i, 119 + 20 * i)) for i in range(20)]
    file = [token for call in calls for token in call]
    text = [9, *file[1:]]
    assert right_of(file, text).count(False) <= 2 + 1, "the edit, the way back, and the second call"


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 1 << 32), edits=st.integers(1, 8), vocabulary=st.sampled_from([40, 1000]))
def test_behind_an_edit_nearly_all_that_is_kept_is_proposed(seed: int, edits: int, vocabulary: int) -> None:
    """All but those that find the way back at each edit, and those that mislead in a small vocabulary."""
    rng = random.Random(seed)
    file = [rng.randrange(vocabulary) for _ in range(400)]
    places = sorted(rng.sample(range(0, 400, 40), edits))
    script = [
        ScriptedEdit(
            place, rng.randrange(0, 12), tuple(rng.randrange(vocabulary) for _ in range(rng.randrange(0, 12)))
        )
        for place in places
    ]
    text, kept = edited(file, script)
    missed = sum(was and not right for was, right in zip(kept, right_of(file, text), strict=True))
    assert missed <= (3 if vocabulary == 1000 else 12) * edits


tokens = st.lists(st.integers(0, 5), max_size=80)


@settings(max_examples=150, deadline=None)
@given(file=tokens, text=tokens, pieces=st.integers(1, 9))
def test_it_never_proposes_beyond_its_end_and_pieces_make_no_difference(
    file: list[int], text: list[int], pieces: int
) -> None:
    whole, parts = PredictedText(file), PredictedText(file)
    for start in range(0, len(text), pieces):
        parts.extend(text[start : start + pieces])
    for token in text:
        whole.extend((token,))
        match = whole.match()
        if match is not None:
            assert 0 < len(match.following) <= MAX_FOLLOWING
            assert match.continuation(1000) == match.following
    assert whole.match() == parts.match()
    assert len(parts) == len(text)


@settings(max_examples=60, deadline=None)
@given(file=tokens, seed=st.integers(0, 1000))
def test_without_edits_it_proposes_pieces_of_the_prediction_alone(file: list[int], seed: int) -> None:
    predicted, rng = PredictedText(file), random.Random(seed)
    for _ in range(60):
        match = predicted.match()
        if match is not None and not predicted._edits:
            pieces = [tuple(file[at : at + len(match.following)]) for at in range(len(file))]
            assert match.following in pieces
        predicted.extend((rng.randrange(6),))


@pytest.mark.parametrize("vocabulary", [1, 2, 50, 5000])
def test_the_work_of_a_token_is_bounded_whatever_the_prediction(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: places that are compared, and scans of the whole prediction."""
    rng = np.random.default_rng(1)
    predicted = PredictedText(rng.integers(0, vocabulary, 100_000).tolist())
    compared, scans = 0, 0
    agreement, nonzero = PredictedText._agreement, np.flatnonzero

    def counted(self: PredictedText, place: int) -> int:
        nonlocal compared
        compared += 1
        return agreement(self, place)

    def scanned(array: np.ndarray) -> np.ndarray:
        nonlocal scans
        scans += 1
        return nonzero(array)

    monkeypatch.setattr(PredictedText, "_agreement", counted)
    monkeypatch.setattr(np, "flatnonzero", scanned)
    for token in rng.integers(0, vocabulary + 1, 300).tolist():
        compared = scans = 0
        predicted.extend((token,))
        assert compared <= 2 * MAX_ANCHORS + 1
        assert scans <= 1


def test_it_is_trusted_more_the_longer_it_was_right_and_less_where_the_text_was_long_away() -> None:
    predicted = PredictedText(FILE)
    lengths = []
    for token in FILE[:30]:
        lengths.append(getattr(predicted.match(), "length", 0))
        predicted.extend((token,))
    assert lengths == sorted(lengths)
    soon, late = PredictedText(FILE), PredictedText(FILE)
    for text, away in ((soon, 3), (late, 200)):
        text.extend((*FILE[:30], *range(1000, 1000 + away), *FILE[30:32]))
    assert soon.match() is not None
    assert late.match() is not None
    assert late.match().length == 2 < soon.match().length  # type: ignore[union-attr]


@pytest.mark.parametrize("file", [(), (5,), (5, 6)])
def test_a_short_prediction_is_one_too(file: tuple[int, ...]) -> None:
    predicted = PredictedText(file)
    assert (predicted.match() is None) is (not file)
    predicted.extend((9, *file, 9, 9))
    assert predicted.match() is None
