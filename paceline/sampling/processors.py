"""Processing of logits before temperature: everything that depends on earlier tokens.

The order is transformers' own (`GenerationMixin._get_logits_processor`): logit bias, repetition
penalty, frequency and presence penalty (vLLM's place and arithmetic), bad words, min tokens, grammar.
`docs/sampling.md` states the semantics of each. All arithmetic is float32, one operation after the other, as there.

A row is processed with its own history: prompt, committed tokens, and the drafted tokens on its
path (docs/exactness.md §5). State is kept for committed tokens alone; what a row needs beyond it is
computed from its path and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.errors import require_ids
from paceline.protocol.sampling import SamplingParams
from paceline.sampling.grammar import token_refusal

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]

_FIRST_CAPACITY = 64
"""Distinct tokens for which there is room at first; the room doubles."""


class Follower(Protocol):
    """A grammar's state behind the committed output."""

    def commit(self, token_ids: Sequence[int]) -> int:
        """Append committed tokens; returns how many precede the first one that the grammar forbids.

        Raises:
            InvalidInput: the grammar is too complex to follow.
        """

    def masks(self, paths: Sequence[Sequence[int]]) -> Sequence[bytes | None]:
        """The tokens that may follow each path of drafted tokens; None: the grammar forbids a token of the path.

        One bit for each token from the lowest on; end tokens where the text may end.

        Raises:
            InvalidInput: the grammar is too complex to follow.
        """


class Processors:
    """One session's processors; every call comes from one thread.

    Args:
        sampling: the chain.
        prompt_length: tokens that are the prompt; what follows them was generated.
        end_token_ids: tokens that end the text.
        follower: of the sampling's grammar, at its start; used by these processors alone.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_length: int,
        end_token_ids: Sequence[int] = (),
        follower: Follower | None = None,
    ) -> None:
        assert (follower is None) == (sampling.grammar is None), "a grammar comes with its follower"
        self._sampling = sampling
        self._prompt_length = prompt_length
        self._ends = np.array(end_token_ids, np.intp)
        self._bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], np.intp)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._bad_words = _BadWords(sampling.bad_words)
        self._counts = _Counts()
        self._ids: list[int] = []
        self._follower = follower

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens; the first call brings the whole prefix, prompt included.

        Raises:
            InvalidInput: the grammar forbids a token behind the prompt.
        """
        sampling = self._sampling
        output_from = max(len(self._ids), self._prompt_length)
        for token in token_ids:
            is_output = len(self._ids) >= self._prompt_length
            self._ids.append(token)
            if sampling.penalises and (is_output or sampling.repetition_penalty != 1):
                self._counts.add(token, is_output)
        if self._follower is not None and sampling.grammar is not None:
            output = self._ids[output_from:]
            count = self._follower.commit(output)
            if count < len(output):
                raise token_refusal(sampling.grammar, output[count], output_from + count)

    def process(self, logits: Logits, paths: Sequence[Sequence[int]]) -> Logits:
        """Logits as temperature gets them.

        Args:
            logits: [rows, V]; not modified.
            paths: for each row the tokens behind the committed ones, down to the one that the row follows.

        Returns:
            [rows, V], a new array. An unreachable row, a token of whose path is forbidden, is left as it
            is; a row in which every token is forbidden is all -inf.
        """
        rows = logits.copy()
        rows[:, self._bias_ids] += self._biases  # transformers' SequenceBias of single tokens
        if self._sampling.penalises:
            self._penalise(rows, paths)
        if self._sampling.forbids:
            self._forbid(rows, logits, paths)
        return rows

    def _penalise(self, rows: Logits, paths: Sequence[Sequence[int]]) -> None:
        """Penalise committed tokens in all rows at once, then the tokens of each row's path by their own counts."""
        path_counts = [self._counts.with_path(path) for path in paths]
        old_rows = [row[ids] for row, (ids, _) in zip(rows, path_counts, strict=True)]
        ids, counts = self._counts.ids, self._counts.output_counts
        rows[:, ids] = self._apply_penalties(rows[:, ids], counts)
        for row, values, (ids, counts) in zip(rows, old_rows, path_counts, strict=True):
            row[ids] = self._apply_penalties(values, counts)

    def _apply_penalties(self, values: Logits, counts: NDArray[np.float32]) -> Logits:
        """Values [.., n] of earlier tokens with their penalties; `counts` [n]: how often each is in the output."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            penalty = np.float32(sampling.repetition_penalty)
            values = np.where(values < 0, values * penalty, values / penalty)
        values = values - np.float32(sampling.frequency_penalty) * counts
        return values - np.float32(sampling.presence_penalty) * (counts > 0).astype(np.float32)

    def _forbid(self, rows: Logits, logits: Logits, paths: Sequence[Sequence[int]]) -> None:
        rows[:, self._bad_words.single] = -np.inf
        masks = self._follower.masks(paths) if self._follower is not None else None
        reachable = [True] * len(paths) if masks is None else [mask is not None for mask in masks]
        for place, path in enumerate(paths):
            rows[place, self._bad_words.completed_by((*self._tail(), *path))] = -np.inf
            if self._is_too_early(len(path)):
                rows[place, self._ends] = -np.inf
            mask = masks[place] if masks is not None else None
            if mask is not None:
                rows[place, ~_unpack(mask, rows.shape[1])] = -np.inf
        for place in np.flatnonzero(np.isneginf(rows.max(axis=1))).tolist():
            reachable[place] = reachable[place] and self._can_reach(paths[place])
        for place, can in enumerate(reachable):
            if not can:
                rows[place] = logits[place]

    def _can_reach(self, path: Sequence[int]) -> bool:
        """Whether bad words and min tokens allow a path; the grammar has been checked."""
        for depth, token in enumerate(path):
            history = (*self._tail(), *path[:depth])
            too_early = self._is_too_early(depth) and token in self._ends
            if too_early or token in self._bad_words.single or token in self._bad_words.completed_by(history):
                return False
        return True

    def _is_too_early(self, depth: int) -> bool:
        return len(self._ids) + depth - self._prompt_length < self._sampling.min_tokens

    def _tail(self) -> list[int]:
        """The committed tokens that a bad word may begin with."""
        return self._ids[-self._bad_words.longest_prefix :] if self._bad_words.longest_prefix else []


def check_ids(sampling: SamplingParams, end_token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidInput: naming the field and the id.
    """
    fields = [("end_token_ids", end_token_ids), ("logit_bias id", [token_id for token_id, _ in sampling.logit_bias])]
    fields += [("bad_words id", word) for word in sampling.bad_words]
    for name, ids in fields:
        require_ids(name, ids, vocab_size)


def _unpack(mask: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """A follower's mask as [V]."""
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


class _BadWords:
    """Token sequences that may not be completed, over prompt and output (transformers' NoBadWords)."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.single = np.unique(np.array([word[0] for word in words if len(word) == 1], np.intp))
        self.longest_prefix = max((len(word) for word in words), default=1) - 1
        self._by_end: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_end.setdefault(word[-2], []).append((tuple(word[:-1]), word[-1]))

    def completed_by(self, history: Sequence[int]) -> list[int]:
        """Tokens that would complete a sequence of two or more."""
        if not history:
            return []
        words = self._by_end.get(history[-1], ())
        return [last for prefix, last in words if tuple(history[-len(prefix) :]) == prefix]


class _Counts:
    """The distinct tokens so far, and how often each is in the output; grows by one token at a time."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.empty(_FIRST_CAPACITY, np.intp)
        self._output_counts = np.zeros(_FIRST_CAPACITY, np.float32)  # counts are exact up to 2^24

    @property
    def ids(self) -> Ids:
        """[distinct]; a view."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """[distinct]; 0 for tokens of the prompt alone; a view."""
        return self._output_counts[: len(self._slots)]

    def add(self, token: int, is_output: bool) -> None:
        """Count one token."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == self._ids.size:
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._output_counts = np.concatenate([self._output_counts, np.zeros_like(self._output_counts)])
            self._ids[slot] = token
        self._output_counts[slot] += is_output

    def with_path(self, path: Sequence[int]) -> tuple[Ids, NDArray[np.float32]]:
        """The path's distinct tokens and their counts, those of the path included."""
        counts: dict[int, float] = {}
        for token in path:
            if token not in counts:
                slot = self._slots.get(token)
                counts[token] = 0.0 if slot is None else float(self._output_counts[slot])
            counts[token] += 1
        return np.array([*counts], np.intp), np.array([*counts.values()], np.float32)
