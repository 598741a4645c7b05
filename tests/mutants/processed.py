"""Whole requests under penalties and a grammar: the exact algorithm, its text by the definitions, and mutants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.protocol.target import Round
from paceline.sampling.acceptance import Decision
from paceline.sampling.distribution import processed_scores
from paceline.sampling.grammar import TokenTable, Vocabulary, Walk
from paceline.sampling.processors import Processors
from tests.mutants.rounds import MIDDLING, PROMPT, TARGET, VOCAB, Rounds, Scores
from tests.sampling import plain

END = VOCAB - 1
LANGUAGE, ENDINGS = "(ab?|b[bc])+c?", ("", "b", "c", "a", "ab")
GRAMMAR = Grammar(GrammarKind.REGEX, LANGUAGE)
START = TokenTable(Vocabulary.of(TableTokenizer(VOCAB, END))).compile(GRAMMAR)
SAMPLING = SamplingParams(
    repetition_penalty=1.6,
    presence_penalty=0.7,
    frequency_penalty=0.9,
    logit_bias=((0, 0.8),),
    grammar=GRAMMAR,
)
PENALTIES = replace(SAMPLING, grammar=None)
Path = tuple[int, ...]


class ProcessedRounds(Rounds):
    """The exact algorithm; a draft of the unprocessed distribution proposes what the grammar forbids, too."""

    k = 3
    draft = MIDDLING
    sampling = SAMPLING

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.walk = Walk(START.copy()) if self.sampling.grammar else None
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


def enumerate_processed_distribution(length: int, sampling: SamplingParams) -> dict[Path, float]:
    """The distribution of plain sampling, written from the definitions."""

    def row(text: Path) -> Sequence[float]:
        return plain.processed_row(TARGET.logits((*PROMPT, *text)).tolist(), PROMPT, text, sampling, END, ENDINGS)

    return plain.texts(row, length, END)
