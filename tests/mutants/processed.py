"""Whole requests under penalties and a grammar: the exact algorithm, its text by the definitions, and mutants."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.protocol.target import Round
from paceline.sampling.acceptance import Decision
from paceline.sampling.distribution import processed_scores
from paceline.sampling.grammar import TokenTable, Vocabulary, Walk
from paceline.sampling.processors import Processors
from tests.mutants.rounds import MIDDLING, PROMPT, TARGET, VOCAB, Rounds, Scores

END = VOCAB - 1
LANGUAGE = "(ab?|b[bc])+c?"
SAMPLING = SamplingParams(
    repetition_penalty=1.6,
    presence_penalty=0.7,
    frequency_penalty=0.9,
    logit_bias=((0, 0.8),),
    grammar=Grammar(GrammarKind.REGEX, LANGUAGE),
)
PENALTIES = replace(SAMPLING, grammar=None)
TABLE = TokenTable(Vocabulary.of(TableTokenizer(VOCAB, END)))
Path = tuple[int, ...]


class ProcessedRounds(Rounds):
    """The exact algorithm; a draft of the unprocessed distribution proposes what the grammar forbids, too."""

    k = 3
    draft = MIDDLING
    sampling = SAMPLING

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        grammar = self.sampling.grammar
        self.walk = Walk(TABLE.compile(grammar)) if grammar else None
        self.processors = Processors(self.sampling, len(PROMPT), (END,), self.walk)
        self.processors.advance(PROMPT)

    def text(self, length: int) -> Path:
        """Up to the end token, or `length` tokens."""
        while not (output := self.ids[len(PROMPT) :]) or (END not in output and len(output) < length):
            proposal = self.receive(self.propose(self.choose_k()))
            round_ = Round(1, len(self.ids) - 1, -1, (self.ids[-1],), proposal)
            decision = self.decide(round_, self.verify(round_))
            self.ids += decision.committed
            self.keep(round_, decision)
        return cut(output, length)

    def target_scores(self, round_: Round) -> Scores:
        tokens = round_.proposal.token_ids if round_.proposal else ()
        paths = [tokens[:depth] for depth in range(len(tokens) + 1)]
        logits = np.stack([TARGET.logits([*self.ids, *path]) for path in paths])
        return processed_scores(self.processors.process(logits, self.histories(paths)), self.sampling)

    # Seams.

    def histories(self, paths: Sequence[Path]) -> Sequence[Path]:
        """The drafted tokens that each row is processed with."""
        return paths

    def keep(self, round_: Round, decision: Decision) -> None:
        """What the state takes in of a round."""
        self.processors.advance(before_end(decision.committed))


class ProcessedBlockRounds(ProcessedRounds):
    """The exact algorithm with block acceptance."""

    acceptance = Acceptance.BLOCK


class HistoryOffByOneRow(ProcessedRounds):
    """Row i is processed without the token that it follows."""

    sampling = PENALTIES

    def histories(self, paths: Sequence[Path]) -> Sequence[Path]:
        return [path[:-1] for path in paths]


class PenaltiesKeptAfterRejection(ProcessedRounds):
    """Rejected tokens stay in the counts."""

    def keep(self, round_: Round, decision: Decision) -> None:
        super().keep(round_, decision)
        for token in _rejected(round_, decision):
            self.processors._counts.add(token, True)


class GrammarKeptForRejectedTokens(ProcessedRounds):
    """The grammar's state moves through rejected tokens, where it can."""

    def keep(self, round_: Round, decision: Decision) -> None:
        walk = self.walk
        assert walk is not None
        kept = before_end(decision.committed)
        for token in (*decision.accepted, *_rejected(round_, decision)):
            walk.commit([token])
        walk.commit([kept[-1] if kept else END])
        self.processors._ids += kept
        for token in kept:
            self.processors._counts.add(token, True)


def _rejected(round_: Round, decision: Decision) -> Sequence[int]:
    return round_.proposal.token_ids[len(decision.accepted) :] if round_.proposal else ()


def before_end(token_ids: Sequence[int]) -> list[int]:
    """The tokens that belong to the text."""
    return list(token_ids[: token_ids.index(END)] if END in token_ids else token_ids)


def cut(output: Sequence[int], length: int) -> Path:
    ends = output.index(END) + 1 if END in output else length
    return tuple(output[: min(ends, length)])


def plain_distribution(history: Sequence[int], sampling: SamplingParams) -> NDArray[np.float64]:
    """p [V] after a history, written from the definitions."""
    output = history[len(PROMPT) :]
    scores = TARGET.logits(history).astype(np.float64).copy()
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in range(VOCAB):
        if token in history:
            scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
        count = list(output).count(token)
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
        if sampling.grammar and not _may_come("".join(chr(97 + each) for each in output), token):
            scores[token] = -math.inf
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum(), np.float64)


def _may_come(text: str, token: int) -> bool:
    if token == END:
        return re.fullmatch(LANGUAGE, text) is not None
    return any(re.fullmatch(LANGUAGE, text + chr(97 + token) + ending) for ending in ("", "b", "c", "a", "ab"))


def enumerate_processed_distribution(length: int, sampling: SamplingParams) -> dict[Path, float]:
    """The distribution of plain sampling."""
    done: dict[Path, float] = {}
    running: dict[Path, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Path, float] = {}
        for text, mass in running.items():
            for token, p in enumerate(plain_distribution((*PROMPT, *text), sampling)):
                if p > 0:
                    (done if token == END else longer)[(*text, token)] = mass * float(p)
        running = longer
    return done | running
