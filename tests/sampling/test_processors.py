"""The processors before temperature against transformers' own, row by row, behind drafted chains and trees."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import ROOT, Proposal
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.sampling.distribution import processed_scores
from paceline.sampling.grammar import TokenTable, Vocabulary, Walk
from paceline.sampling.processors import Processors, check_ids
from tests.engine import tiny

VOCAB = 26
END = 25
LANGUAGE = "(ab|c[d-f])+(gh)?"
GRAMMAR = Grammar(GrammarKind.REGEX, LANGUAGE)
TABLE = TokenTable(Vocabulary.of(TableTokenizer(VOCAB, END)))
MODEL = tiny.random_model(tiny.llama())
"""Only asked for its list of processors, in its order."""


class OverOutput(LogitsProcessor):
    """OpenAI's presence and frequency penalties, which transformers lacks, in vLLM's arithmetic."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        output = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        scores = scores - torch.tensor(self.frequency) * counts  # type: ignore[assignment]
        return scores - torch.tensor(self.presence) * (counts > 0)  # type: ignore[return-value]


@cache
def viable(text: str) -> bool:
    """Whether a text can still become one of the language, by trying every ending."""
    endings = ("", "b", "d", "h", "ab", "gh")
    return any(re.fullmatch(LANGUAGE, text + ending) for ending in endings)


def allowed_after(output: Sequence[int]) -> list[int]:
    text = "".join(chr(97 + token) for token in output)
    letters = [token for token in range(END) if viable(text + chr(97 + token))]
    return letters + ([END] if re.fullmatch(LANGUAGE, text) else [])


@cache
def theirs(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """transformers' own list for these parameters, as `generate` builds it."""
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        sequence_bias=[[[token], bias] for token, bias in params.logit_bias] or None,
        repetition_penalty=params.repetition_penalty,
        bad_words_ids=[list(word) for word in params.bad_words] or None,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=END,
    )
    config._eos_token_tensor = torch.tensor([END])

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        return allowed_after(ids[prompt_length:].tolist())

    model: Any = MODEL
    made: LogitsProcessorList = model._get_logits_processor(
        config,
        input_ids_seq_length=prompt_length,
        prefix_allowed_tokens_fn=allowed if params.grammar else None,
        logits_processor=[],
        device="cpu",
    )
    penalties = OverOutput(params.presence_penalty, params.frequency_penalty, prompt_length)
    # Behind the penalty that is transformers' own: masks that come later leave the numbers alone.
    behind = sum(
        type(each).__name__ in ("SequenceBiasLogitsProcessor", "RepetitionPenaltyLogitsProcessor") for each in made
    )
    made.insert(behind, penalties)
    return made


def reference(
    params: SamplingParams, logits: np.ndarray[Any, Any], history: Sequence[int], prompt_length: int
) -> np.ndarray[Any, Any]:
    row = torch.from_numpy(logits[np.newaxis].copy())
    ids: Any = torch.tensor([list(history)])
    scores: Any = row
    processed: Any = theirs(params, prompt_length)(ids, scores)
    return np.asarray(processed[0].numpy(), np.float32)


def processors(params: SamplingParams, prompt_length: int) -> Processors:
    walk = Walk(TABLE.compile(params.grammar)) if params.grammar else None
    return Processors(params, prompt_length, (END,), walk)


def random_logits(rng: np.random.Generator, rows: int) -> np.ndarray[Any, Any]:
    return (rng.standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def paths_of(proposal: Proposal) -> list[list[int]]:
    return [[proposal.token_ids[i] for i in proposal.path(node)] for node in range(ROOT, len(proposal))]


def random_tree(rng: np.random.Generator, nodes: int) -> Proposal:
    tokens = tuple(rng.integers(0, VOCAB, nodes).tolist())
    parents = tuple(int(rng.integers(-1, node)) for node in range(nodes))
    return Proposal(1, tokens, (1.0,) * nodes, parents)


PENALTIES = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    bad_words=st.lists(
        st.lists(st.integers(0, END - 1), min_size=1, max_size=3).map(tuple), max_size=4, unique=True
    ).map(tuple),
    min_tokens=st.integers(0, 12),
)


@settings(max_examples=60, deadline=None)
@given(params=PENALTIES, seed=st.integers(0, 2**32 - 1))
def test_every_row_is_transformers_own_bit_by_bit(params: SamplingParams, seed: int) -> None:
    """Rounds of trees: some of each is accepted, the rest must leave no trace."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 6, 5).tolist()
    ours, history = processors(params, len(prompt)), list(prompt)
    ours.advance(prompt)
    for _ in range(3):
        proposal = random_tree(rng, int(rng.integers(0, 7)))
        paths = paths_of(proposal)
        logits = random_logits(rng, len(paths))
        before = logits.copy()
        rows = ours.process(logits, paths)
        for row, path in enumerate(paths):
            assert np.array_equal(rows[row], reference(params, logits[row], [*history, *path], len(prompt)))
        assert np.array_equal(logits, before)
        kept = paths[int(rng.integers(len(paths)))] + [int(rng.integers(0, 6))]
        history += kept
        ours.advance(kept)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), greedy=st.booleans())
def test_grammar_rows_are_those_of_the_language(seed: int, greedy: bool) -> None:
    """Drafts of viable and of forbidden tokens; a row below a forbidden one is left as it is."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0 if greedy else 1, grammar=GRAMMAR, repetition_penalty=1.2)
    prompt = [3, 25, 1]
    ours, output = processors(params, len(prompt)), list[int]()
    ours.advance(prompt)
    while END not in output and len(output) < 12:
        proposal = drafted(rng, output, nodes=6)
        paths = paths_of(proposal)
        logits = random_logits(rng, len(paths))
        rows = ours.process(logits, paths)
        scores = processed_scores(rows, params)
        for row, path in enumerate(paths):
            right = logits[row]
            if END not in path and all(path[i] in allowed_after(output + path[:i]) for i in range(len(path))):
                right = reference(params, logits[row], [*prompt, *output, *path], len(prompt))
                assert set(np.flatnonzero(np.isfinite(scores[row]))) <= set(allowed_after(output + path))
            assert np.array_equal(rows[row], right)
        token = int(scores[0].argmax())
        output.append(token)
        if token != END:
            ours.advance([token])


def drafted(rng: np.random.Generator, output: list[int], nodes: int) -> Proposal:
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = []
    for node in range(nodes):
        parent = int(rng.integers(-1, node))
        above = [] if parent == ROOT else paths[parent]
        viable_ids = allowed_after(output + above) if END not in above else []
        wild = not viable_ids or rng.random() < 0.3
        token = int(rng.integers(VOCAB)) if wild else int(rng.choice(viable_ids))
        tokens.append(token)
        parents.append(parent)
        paths.append([*above, token])
    return Proposal(1, tuple(tokens), (1.0,) * nodes, tuple(parents))


def processed(params: SamplingParams, prompt: Sequence[int], output: Sequence[int], paths: list[list[int]]) -> Any:
    """Rows of zeros behind a prompt and some output, once for each path."""
    ours = processors(params, len(prompt))
    ours.advance([*prompt, *output])
    return ours.process(np.zeros((len(paths), VOCAB), np.float32), paths)


def test_a_bad_word_may_begin_in_the_prompt_and_run_through_the_draft() -> None:
    rows = processed(SamplingParams(bad_words=((0, 1, 2, 3),)), [0], [1], [[], [2]])
    assert np.argwhere(np.isneginf(rows)).tolist() == [[1, 3]]


def test_the_end_waits_for_min_tokens() -> None:
    ours = Processors(SamplingParams(min_tokens=3), 2, (1, 3))
    ours.advance([0, 0, 2])
    rows = ours.process(np.zeros((3, 4), np.float32), [[], [2], [2, 2]])
    assert np.isneginf(rows).tolist() == [[False, True, False, True]] * 2 + [[False] * 4]


def test_a_row_with_nothing_left_is_empty_and_one_that_cannot_be_reached_is_not() -> None:
    words = (*((1, token) for token in range(VOCAB)), (0,))
    rows = processed(SamplingParams(bad_words=words), [2], [], [[], [1], [0, 1]])
    assert np.isneginf(rows[1]).all()  # 1 may come, and then nothing may
    assert not rows[2].any()  # 0 may not come at all


def test_a_prefix_that_the_grammar_forbids_is_refused() -> None:
    with pytest.raises(InvalidInput, match="token at position 2 = 9: must be a token that the regex allows there"):
        processors(SamplingParams(grammar=GRAMMAR), 1).advance([9, 0, 9])


def test_a_finished_grammar_leaves_the_end_alone() -> None:
    rows = processed(SamplingParams(grammar=GRAMMAR), [9], [0, 1, 6, 7], [[]])
    assert np.flatnonzero(np.isfinite(rows[0])).tolist() == [END]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: SamplingParams(repetition_penalty=float("nan")), "repetition_penalty = nan"),
        (lambda: SamplingParams(frequency_penalty=-3), "frequency_penalty = -3: must be in [-2, 2]"),
        (lambda: SamplingParams(logit_bias=((3, float("nan")),)), "logit_bias of 3 = nan"),
        (lambda: SamplingParams(logit_bias=((3, 1.0), (3, 2.0))), "logit_bias ids = 2: must be distinct"),
        (lambda: SamplingParams(logit_bias=((-1, 1.0),)), "logit_bias id = -1: must be at least 0"),
        (lambda: SamplingParams(logit_bias=tuple((i, 1.0) for i in range(1025))), "logit_bias entries = 1025"),
        (lambda: SamplingParams(bad_words=((1, -2),)), "bad_words id = -2"),
        (lambda: SamplingParams(bad_words=((1,),) * 1025), "bad_words = 1025: must be at most 1024"),
        (lambda: SamplingParams(min_tokens=-1), "min_tokens = -1: must be at least 0"),
        (lambda: Grammar(GrammarKind.JSON_SCHEMA, "[]"), "json_schema = '[]': must be a JSON object"),
        (lambda: check_ids(SamplingParams(logit_bias=((9, 1.0),)), (), 9), "logit_bias id = 9: must be in [0, 9)"),
        (lambda: check_ids(SamplingParams(bad_words=((1, 9),)), (), 9), "bad_words id = 9: must be in [0, 9)"),
        (lambda: check_ids(SamplingParams(), (9,), 9), "end_token_ids = 9: must be in [0, 9)"),
    ],
)
def test_bad_values_are_named(build: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)):
        build()
