"""The user's sample: prompts that the target answers first, and finished texts as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import require
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline_lab.predict.passes import SampleText
from paceline_lab.predict.reading import PassSource
from paceline_training.corpus import Role, Row, TokenIds
from paceline_training.user_data import UserData, read_data
from paceline_training.writing import GenerationRecipe, self_generate

MOST_TEXTS = 1 << 16
PROMPTS_A_BATCH = 16
"""Prompts in a step while the target writes; chosen, not tuned."""
ANSWERS_A_SHARD = 4
"""Answers that are stored together: an interruption loses no more."""
_EVERY_TOKEN = 1 << 60
Each = TypeVar("Each")


@dataclass(frozen=True)
class SampleOptions:
    """Options of a sample: the part of the file that is read, and how prompts are answered.

    Attributes:
        file: JSONL with prompt, messages or text, or shards, as `paceline_training.user_data` reads them.
        temperatures: temperatures of the target's draws; each text is read at every one.
        texts: most texts, spread evenly over the file.
        answer_tokens: most positions of a text.
        seed: seed of the noise.
    """

    file: Path
    temperatures: tuple[float, ...] = (0.0, 0.8)
    texts: int = 16
    answer_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        require(bool(self.temperatures), "temperature", self.temperatures, "at least 1")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        require(1 <= self.texts <= MOST_TEXTS, "texts", self.texts, f"in [1, {MOST_TEXTS}]")
        require(self.answer_tokens >= 2, "answer_tokens", self.answer_tokens, "at least 2")


def read_sample(options: SampleOptions, tokenizer: Tokenizer, max_length: int) -> UserData:
    """Read the chosen part of the file.

    Raises:
        InvalidInput: unreadable, empty, without a text of the assistant's, or with ids that the tokenizer lacks.
    """
    data = read_data(options.file, tokenizer, max_length)
    rows = [cut for row in data.rows if (cut := _cut(row, options.answer_tokens)).loss_mask[1:].any()]
    least = "a prompt, or a text of 2 tokens or more"
    require(bool(rows or data.prompts), "sample", str(options.file), f"a file with {least}")
    everything: list[Row | TokenIds] = _spread([*data.prompts, *rows], options.texts)
    return UserData(
        tuple(each for each in everything if isinstance(each, Row)),
        tuple(each for each in everything if not isinstance(each, Row)),
    )


def texts_at(
    options: SampleOptions,
    temperature: float,
    data: UserData,
    source: PassSource,
    tokenizer: Tokenizer,
    folder: Path,
    report: Callable[[int], None] | None = None,
) -> list[SampleText]:
    """Return the sample at one temperature; the target answers prompts, and its answers are stored in `folder`.

    Targets of one name whose numbers differ may answer differently: each has answers of its own.

    Args:
        report: called with the number of tokens that the target has written.

    Raises:
        InvalidInput: the folder has answers to other prompts.
    """
    rows = _answers(options, temperature, data.prompts, source, tokenizer, folder, report) if data.prompts else []
    own = [SampleText(row, NoiseKey(options.seed, number), own=True) for number, row in enumerate(rows)]
    user_texts = [
        SampleText(Row(row.token_ids, row.roles, temperature), NoiseKey(options.seed, len(rows) + number), own=False)
        for number, row in enumerate(data.rows)
    ]
    return [text for text in (*own, *user_texts) if text.answer_places.size]


def _answers(
    options: SampleOptions,
    temperature: float,
    prompts: tuple[TokenIds, ...],
    source: PassSource,
    tokenizer: Tokenizer,
    folder: Path,
    report: Callable[[int], None] | None,
) -> list[Row]:
    longest = min(max(map(len, prompts)) + options.answer_tokens, source.max_length)
    recipe = GenerationRecipe(
        seed=options.seed,
        max_length=max(8, longest),
        shard_rows=ANSWERS_A_SHARD,
        batch_rows=PROMPTS_A_BATCH,
        temperature_mix=((temperature, 1.0),),
        answer_tokens=options.answer_tokens,
    )
    author = source.author(tokenizer, recipe, prompts)
    target = f"{source.fingerprint.model} {source.fingerprint.numeric}"
    digest = hashlib.sha256(target.encode()).hexdigest()[:12]
    rows = self_generate(author, folder / f"answers-{temperature:g}-{digest}", _EVERY_TOKEN, target, report)
    return [_cut(row, options.answer_tokens) for row in rows]


def _cut(row: Row, answer_tokens: int) -> Row:
    """Cut a text behind so many tokens of the assistant's."""
    answer_places = np.flatnonzero(row.roles >= Role.ANSWER)
    if answer_places.size <= answer_tokens:
        return row
    end = int(answer_places[answer_tokens])
    return Row(row.token_ids[:end], row.roles[:end], row.temperature)


def _spread(values: Sequence[Each], most: int) -> list[Each]:
    """Choose at most so many of the values, evenly spaced, in their order."""
    if len(values) <= most:
        return [*values]
    return [values[int(place)] for place in np.linspace(0, len(values) - 1, most)]
