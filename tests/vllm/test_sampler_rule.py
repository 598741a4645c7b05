"""The restated rule: that it keeps a distribution, and what it commits of rows that hold one token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.vllm.sampler_rule import FILES, READ, check_source, commit, digest

V, K = 12, 4


def one_token_rows(drawn: list[int]) -> np.ndarray:
    rows = np.full((len(drawn), V), -np.inf, np.float32)
    rows[np.arange(len(drawn)), drawn] = 0
    return rows


@pytest.mark.parametrize(
    ("certain", "block"),
    [
        (True, False),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.full),
        pytest.param(False, False, marks=pytest.mark.full),
    ],
)
def test_ten_thousand_rows_of_one_token_are_one_text_with_any_drafts(certain: bool, block: bool) -> None:
    """Right ones, wrong ones, none, and those of a draft that gives its own logits."""
    draws = np.random.default_rng(3)
    text = draws.integers(0, V, 10_000).tolist()
    at, rounds, accepted = 0, 0, 0
    while at < len(text):
        count = min(int(draws.integers(0, K + 1)), len(text) - at - 1)
        right = [*text[at : at + count]]
        drafted = [int(draws.choice([each, draws.integers(0, V), -1], p=[0.7, 0.2, 0.1])) for each in right]
        drafts = None if certain else draws.normal(0, 3, (count, V)).astype(np.float32)
        new = commit(one_token_rows(text[at : at + count + 1]), drafted, draws, drafts, block=block)
        assert new == text[at : at + len(new)]
        same = [a == b for a, b in zip(drafted, right, strict=True)]
        assert len(new) == 1 + ([*same, False]).index(False)
        at, rounds, accepted = at + len(new), rounds + 1, accepted + len(new) - 1
    assert accepted > rounds / 2


OF_COMPAT = [(True, True), (False, False), (False, True)]
"""What `tests/compat` alone asks the rule for."""


@pytest.mark.parametrize(
    ("certain", "block"), [(True, False), *(pytest.param(*each, marks=pytest.mark.full) for each in OF_COMPAT)]
)
def test_the_rule_keeps_the_first_tokens_distribution(certain: bool, block: bool) -> None:
    draws, count = np.random.default_rng(4), 20_000
    rows, drafts = draws.normal(0, 1.5, (3, V)), draws.normal(0, 1.5, (2, V))
    q = np.exp(drafts) / np.exp(drafts).sum(axis=1, keepdims=True)
    own = [int(each.argmax()) for each in q]
    first = np.zeros(V)
    for _ in range(count):
        drafted = own if certain else [int(draws.choice(V, p=each)) for each in q]
        first[commit(rows, drafted, draws, None if certain else drafts, block=block)[0]] += 1
    p = np.exp(rows[0]) / np.exp(rows[0]).sum()
    assert stats.chisquare(first, p * count).pvalue > 1e-3


def test_source_that_was_not_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in FILES:
        place = tmp_path / "v1/worker/gpu" / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(file)
    monkeypatch.setitem(READ, "9.9.0", digest(tmp_path))
    assert check_source(tmp_path, "9.9.0").startswith("vLLM 9.9.0")
    with pytest.raises(AssertionError, match=r"vLLM 9\.9\.1 was not read"):
        check_source(tmp_path, "9.9.1")
    (tmp_path / "v1/worker/gpu" / FILES[-1]).write_text("another")
    with pytest.raises(AssertionError, match=r"9\.9\.0 has other files"):
        check_source(tmp_path, "9.9.0")
