"""What is read for the study: answers by all drafters, and the prompts themselves by the draft as it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.predictors.drafters import AS_IT_IS, disturbed_drafters
from benchmarks.prompts import load_prompts
from paceline.engine.interface import Engine
from paceline.models.tokenizer import Tokenizer
from paceline.predict.branching import row_of
from paceline.predict.kept import KeptPositions
from paceline.predict.passes import SampleText
from paceline.predict.positions import TextPositions
from paceline.predict.reading import EnginePasses, read_texts
from paceline.predict.sample import SampleWanted, texts_at
from paceline.protocol.errors import require
from paceline.protocol.sampling import NoiseKey
from paceline.train.corpus import Role, Row, TokenIds
from paceline.train.text_kinds import TextKinds
from paceline.train.user_data import UserData

Advance = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class StudiedText:
    """One prompt and its answer.

    Attributes:
        kind: of `benchmarks.prompts`.
        number: of the prompt among its kind's.
        answer: read by every drafter, and by matches.
        prompt: read by the draft as it is, and by matches.
        cells: `PART/KIND` of the answer's positions.
        drafted_cells: the same of what the draft chose there.
        prompt_cells: the same of the prompt's positions.
    """

    kind: str
    number: int
    answer: TextPositions
    prompt: TextPositions
    cells: tuple[str, ...]
    drafted_cells: tuple[str, ...]
    prompt_cells: tuple[str, ...]


@dataclass(frozen=True)
class StudyWanted:
    """What is read.

    Attributes:
        kinds: of prompts.
        prompts: of each kind.
        answer_tokens: of each.
        seed: of the draws.
    """

    kinds: tuple[str, ...]
    prompts: int
    answer_tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.prompts >= 2, "prompts", self.prompts, "at least 2 of each kind: one known, one new")


def read_study(
    target: Engine,
    draft: Engine,
    tokenizer: Tokenizer,
    wanted: StudyWanted,
    temperature: float,
    folder: Path,
    advance: Advance = lambda done: None,
) -> list[StudiedText]:
    """Have the target answer, and all read; what `folder` has is not done again."""
    labels, prompts = _prompts(wanted, tokenizer)
    sample = SampleWanted(folder, (temperature,), len(prompts), wanted.answer_tokens, wanted.seed)
    written = texts_at(sample, temperature, UserData((), prompts), EnginePasses(target, {}), tokenizer, folder)
    require(len(written) == len(prompts), "answers", len(written), f"{len(prompts)}, none of them empty")
    facts = {
        "target": target.info.fingerprint.model,
        "draft": draft.info.fingerprint.model,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "answer_tokens": wanted.answer_tokens,
        "seed": wanted.seed,
    }
    kept = {part: KeptPositions(folder / part, facts) for part in ("answers", "prompts")}
    answers = read_texts(EnginePasses(target, disturbed_drafters(draft)), written, kept["answers"], advance)
    asked = [_as_text(prompt, temperature, wanted.seed, number) for number, prompt in enumerate(prompts)]
    read = read_texts(EnginePasses(target, {AS_IT_IS: draft}), asked, kept["prompts"], advance)
    kinds = TextKinds(tokenizer)
    return [
        StudiedText(*label, answer, prompt, *_cells(kinds, answer), _own_cells(kinds, prompt))
        for label, answer, prompt in zip(labels, answers, read, strict=True)
    ]


def _prompts(wanted: StudyWanted, tokenizer: Tokenizer) -> tuple[list[tuple[str, int]], tuple[TokenIds, ...]]:
    """Labels, and token ids of each first chat."""
    found: Mapping[str, Sequence[TokenIds]] = {
        kind: [tokenizer.render_chat(each.chats[0]) for each in prompts[: wanted.prompts]]
        for kind, prompts in load_prompts(wanted.kinds).items()
    }
    labels = [(kind, number) for kind, prompts in found.items() for number in range(len(prompts))]
    return labels, tuple(prompt for prompts in found.values() for prompt in prompts)


def _as_text(prompt: TokenIds, temperature: float, seed: int, number: int) -> SampleText:
    """A prompt all of whose tokens are positions."""
    tokens = np.array(prompt, np.int32)
    row = Row(tokens, np.full(tokens.size, Role.ANSWER, np.int8), temperature)
    return SampleText(row, NoiseKey(seed, number), own=False)


def _cells(kinds: TextKinds, text: TextPositions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the positions' tokens, and of what the draft chose instead."""
    own = _own_cells(kinds, text)
    choices = text.drafters[AS_IT_IS].choices
    drafted = [
        kinds.cell_of_choice(int(choice), int(text.tokens[place - 1]), cell)
        for choice, place, cell in zip(choices, text.target.places, own, strict=True)
    ]
    return own, tuple(drafted)


def _own_cells(kinds: TextKinds, text: TextPositions) -> tuple[str, ...]:
    return tuple(kinds.cells(row_of(text)))
