"""The target as an author: prompts answered and chats written, in shards that can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.given_files import read_json
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.runtime.files import replace_file
from paceline.sampling.distribution import processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from paceline_training.chat import ChatFrame, mark_thinking
from paceline_training.corpus import Role, Row, TokenIds, count_learned_tokens, read_shards, save_shard

USER_TOP_P = 0.95
"""Top-p of the user's turns."""
RECIPE_FILE = "corpus.json"
DEFAULT_MIX = ((1.0, 0.5), (0.6, 0.25), (0.0, 0.25))
"""Temperatures of answers and their shares; with the limits here chosen, not tuned."""
_GOLDEN = 0.6180339887498949
_ADMITTED_ROWS = 512
"""Most prompt rows that new sessions add to one step."""
Report = Callable[[int], None]
"""Called with the tokens written so far."""


@dataclass(frozen=True)
class GenerationRecipe:
    """What decides self-generated text, beside the target."""

    seed: int = 0
    max_length: int = 448
    user_tokens: int = 80
    shard_rows: int = 64
    batch_rows: int = 64
    temperature_mix: tuple[tuple[float, float], ...] = DEFAULT_MIX
    """(temperature of the assistant's turn, share of the rows)."""
    answer_tokens: int = 0
    """Most tokens of an answer to a prompt; 0: as many as `max_length` leaves."""

    def __post_init__(self) -> None:
        require(self.max_length >= 8, "max_length", self.max_length, "at least 8")
        require(self.shard_rows >= 1 and self.batch_rows >= 1, "shard_rows", self.shard_rows, "at least 1")
        total = sum(share for _, share in self.temperature_mix)
        require(abs(total - 1) < 1e-6, "temperature_mix", self.temperature_mix, "shares that sum to 1")

    def longest(self, prompt: TokenIds) -> int:
        """Most tokens of a row that answers a prompt."""
        return min(self.max_length, len(prompt) + self.answer_tokens) if self.answer_tokens else self.max_length

    def temperature_of(self, row: int) -> float:
        """Any stretch of rows holds the mix: the golden ratio spreads rows evenly over it."""
        point, share_sum = (row * _GOLDEN) % 1, 0.0
        for temperature, share in self.temperature_mix:
            share_sum += share
            if point < share_sum:
                return temperature
        return self.temperature_mix[-1][0]


def parse_temperature_mix(text: str) -> tuple[tuple[float, float], ...]:
    """`1:0.5,0.6:0.25,0:0.25` → pairs of temperature and share.

    Raises:
        InvalidInput: not of that form.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        mix = tuple((float(temperature), float(share)) for temperature, share in pairs)
    except ValueError as error:
        raise InvalidInput.of("temperature_mix", text, "TEMPERATURE:SHARE,… such as 1:0.5,0:0.5") from error
    for temperature, _ in mix:
        SamplingParams(temperature=temperature)
    return mix


class _Writing:
    """A row being written by the target: the user's turn, then the assistant's."""

    def __init__(self, index: int, recipe: GenerationRecipe, frame: ChatFrame, prompt: TokenIds | None) -> None:
        self.index = index
        self._recipe = recipe
        self._frame = frame
        self.tokens = list(frame.prefix if prompt is None else prompt)
        self.roles = [int(Role.FORCED)] * len(self.tokens)
        self.computed_tokens = 0
        self.temperature = recipe.temperature_of(index)
        self._asking = prompt is None
        self._noise = NoiseKey(recipe.seed, index)
        self._user = SamplingParams(temperature=1.0, top_p=USER_TOP_P)
        self._assistant = SamplingParams(temperature=self.temperature)
        self._longest = recipe.max_length if prompt is None else recipe.longest(prompt)
        self.is_finished = len(self.tokens) >= self._longest

    def next_item(self) -> StepItem:
        new = tuple(self.tokens[self.computed_tokens :])
        item = StepItem(self.index, self.computed_tokens, new, logit_rows=(len(new) - 1,))
        self.computed_tokens = len(self.tokens)
        return item

    def grow(self, logits: NDArray[np.float32], eos: frozenset[int]) -> None:
        """Append the token drawn from logits [1, V]."""
        scores = processed_scores(logits, self._user if self._asking else self._assistant)[0]
        token = race(scores, self._noise, Stream.DRAFT, len(self.tokens))
        if not self._asking:
            self._append(token, Role.ANSWER)
            self.is_finished |= token in eos
        elif token in eos:
            self._answer()
        else:
            self._append(token, Role.USER)
            if len(self.tokens) - len(self._frame.prefix) >= self._recipe.user_tokens:
                self._answer()
        self.is_finished |= len(self.tokens) >= self._longest

    def _answer(self) -> None:
        self._asking = False
        for token in self._frame.suffix:
            self._append(token, Role.FORCED)

    def _append(self, token: int, role: Role) -> None:
        self.tokens.append(token)
        self.roles.append(int(role))

    def row(self, tokenizer: Tokenizer) -> Row:
        roles = np.array(self.roles[: self._longest], np.int8)
        tokens = np.array(self.tokens[: self._longest], np.int32)
        return Row(tokens, mark_thinking(tokens, roles, tokenizer), self.temperature)


class Author(Protocol):
    """A target that writes rows by number: row i answers prompt i."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""

    @property
    def recipe(self) -> GenerationRecipe:
        """What decides its text."""

    @property
    def prompts(self) -> tuple[TokenIds, ...]:
        """Those that are answered; none: the target asks, too."""

    def write(self, rows: range) -> Iterator[tuple[int, Row | None]]:
        """Write rows at once, yielding (row, None) a token and (row, text) when one ends."""


@dataclass(frozen=True)
class Writer:
    """The target as an author, on an engine of ours."""

    engine: Engine
    tokenizer: Tokenizer
    recipe: GenerationRecipe
    prompts: tuple[TokenIds, ...] = ()
    """Row i answers prompt i; none: the target asks, too."""

    def write(self, rows: range) -> Iterator[tuple[int, Row | None]]:
        """As `Author`, in one running batch."""
        frame = ChatFrame((), ()) if self.prompts else ChatFrame.of(self.tokenizer)
        prompts = self.prompts
        waiting = [_Writing(i, self.recipe, frame, prompts[i] if prompts else None) for i in rows]
        waiting.reverse()
        running: list[_Writing] = []
        try:
            while running or waiting:
                self._admit(waiting, running)
                yield from self._step(running)
                for writing in [writing for writing in running if writing.is_finished]:
                    self.engine.close(writing.index)
                    running.remove(writing)
                    yield writing.index, writing.row(self.tokenizer)
        finally:
            for writing in running:
                self.engine.close(writing.index)

    def _admit(self, waiting: list[_Writing], running: list[_Writing]) -> None:
        room = _ADMITTED_ROWS
        while waiting and len(running) < self.recipe.batch_rows and (room > 0):
            writing = waiting.pop()
            self.engine.open(writing.index, self.recipe.max_length)
            running.append(writing)
            room -= len(writing.tokens)

    def _step(self, running: list[_Writing]) -> Iterator[tuple[int, None]]:
        active = [writing for writing in running if not writing.is_finished]
        if not active:
            return
        plan = StepPlan(tuple(writing.next_item() for writing in active))
        for writing, logits in zip(active, self.engine.step(plan), strict=True):
            writing.grow(logits, self.tokenizer.eos_token_ids)
            yield writing.index, None


def self_generate(writer: Author, folder: Path, tokens: int, target: str, report: Report | None = None) -> list[Row]:
    """Write shards until they have `tokens` learned tokens, or every prompt is answered.

    Args:
        writer: the target.
        folder: folder of the shards; shards in it count and are not written again.
        tokens: learned tokens to reach; at least one shard is written.
        target: digest of the target, kept with the shards.
        report: called with the tokens written so far.

    Raises:
        InvalidInput: the folder's shards come from another recipe, target or prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_recipe(folder / RECIPE_FILE, writer, target)
    report = report or (lambda _: None)
    rows: list[Row] = []
    token_count, first = 0, 0
    last = len(writer.prompts) or 1 << 24
    while first < last and token_count < tokens:
        numbers = range(first, min(first + writer.recipe.shard_rows, last))
        file = folder / f"shard-{first // writer.recipe.shard_rows:05}.npz"
        if not file.exists():
            _write_shard(writer, numbers, file, report, token_count)
        shard = read_shards(file)
        rows += shard
        token_count += count_learned_tokens(shard)
        report(token_count)
        first = numbers.stop
    return rows


def _write_shard(writer: Author, numbers: range, file: Path, report: Report, tokens_before: int) -> None:
    rows: dict[int, Row] = {}
    for new_tokens, (index, row) in enumerate(writer.write(numbers)):
        if row is not None:
            rows[index] = row
        report(tokens_before + new_tokens)
    seed, vocab_size = writer.recipe.seed, writer.tokenizer.vocab_size
    save_shard(file, [rows[index] for index in numbers], vocab_size, seed=seed, first_row=numbers.start)


def _check_recipe(file: Path, writer: Author, target: str) -> None:
    prompts = hashlib.sha256(json.dumps(writer.prompts).encode()).hexdigest() if writer.prompts else None
    recipe: dict[str, Any] = json.loads(
        json.dumps({**asdict(writer.recipe), "target": target, "prompts_sha256": prompts})
    )
    recipe.pop("batch_rows")  # decides speed alone
    if not writer.recipe.answer_tokens:
        recipe.pop("answer_tokens")  # as if it were not there
    if not file.exists():
        replace_file(file, lambda temporary: temporary.write_text(json.dumps(recipe, indent=2) + "\n"))
    folder_recipe = read_json("recipe", file)
    for key, value in recipe.items():
        limit = f"{folder_recipe.get(key)!r}, as for the shards in the folder"
        require(folder_recipe.get(key) == value, f"{file.name}: {key}", value, limit)
