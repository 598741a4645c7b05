"""Text to distil from: rows of token ids that say who wrote each token.

The target writes its own training text on the project's own engine, so there is
no corpus and no licence question. Every draw comes from the shared noise, keyed
by (seed, row, position): a shard is a function of its recipe, whatever was
written before it, and an interrupted run goes on at its first missing shard.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.errors import InvalidInput
from paceline.noise import Stream, race
from paceline.sampling import processed_scores
from paceline.tokenizer import Tokenizer
from paceline.types import ChatMessage, NoiseKey, SamplingParams, require

USER_TOP_P = 0.95
HELD_OUT_SHARE = 0.05
RECIPE_FILE = "corpus.json"
DEFAULT_MIX = ((1.0, 0.5), (0.6, 0.25), (0.0, 0.25))
_GOLDEN = 0.6180339887498949
_ADMITTED_ROWS = 512
"""Most prompt rows that new sessions add to one step."""

TokenIds = tuple[int, ...]
Report = Callable[[int], None]
"""Called with the tokens written so far."""


class Role(IntEnum):
    """Who wrote a token. Drafts learn and are measured on what the target wrote as the assistant."""

    FORCED = 0
    USER = 1
    ANSWER = 2
    THINKING = 3


@dataclass(frozen=True, eq=False)
class Row:
    """One text, with no padding; `temperature` is the assistant turn's."""

    token_ids: NDArray[np.int32]  # [length]
    roles: NDArray[np.int8]  # [length]
    temperature: float

    @property
    def learned(self) -> NDArray[np.bool_]:
        """Tokens that a draft is trained and measured on. Returns [length]."""
        return self.roles >= Role.ANSWER


@dataclass(frozen=True)
class ChatFrame:
    """The template around a user's first turn."""

    before: TokenIds
    after: TokenIds
    """From the user's end of turn to where the assistant begins."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFrame:
        """Read it off two rendered chats: what they share at both ends is the template.

        Raises:
            Unsupported: the tokenizer has no chat template.
        """
        one, other = (tokenizer.render_chat([ChatMessage("user", text)]) for text in ("q", "7"))
        start, end = _shared(one, other), _shared(one[::-1], other[::-1])
        return cls(one[:start], one[len(one) - end :])


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

    def __post_init__(self) -> None:
        require(self.max_length >= 8, "max_length", self.max_length, "at least 8")
        require(self.shard_rows >= 1 and self.batch_rows >= 1, "shard_rows", self.shard_rows, "at least 1")
        total = sum(share for _, share in self.temperature_mix)
        require(abs(total - 1) < 1e-6, "temperature_mix", self.temperature_mix, "shares that sum to 1")

    def temperature_of(self, row: int) -> float:
        """Any stretch of rows holds the mix: the golden ratio spreads rows evenly over it."""
        point, reached = (row * _GOLDEN) % 1, 0.0
        for temperature, share in self.temperature_mix:
            reached += share
            if point < reached:
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
        self.tokens = list(frame.before if prompt is None else prompt)
        self.roles = [int(Role.FORCED)] * len(self.tokens)
        self.computed = 0
        self.temperature = recipe.temperature_of(index)
        self._asking = prompt is None
        self._noise = NoiseKey(recipe.seed, index)
        self._user = SamplingParams(temperature=1.0, top_p=USER_TOP_P)
        self._assistant = SamplingParams(temperature=self.temperature)
        self.ended = len(self.tokens) >= recipe.max_length

    def next_item(self) -> StepItem:
        new = tuple(self.tokens[self.computed :])
        item = StepItem(self.index, self.computed, new, logit_rows=(len(new) - 1,))
        self.computed = len(self.tokens)
        return item

    def grow(self, logits: NDArray[np.float32], eos: frozenset[int]) -> None:
        """Append the token drawn from logits [1, V]."""
        scores = processed_scores(logits, self._user if self._asking else self._assistant)[0]
        token = race(scores, self._noise, Stream.DRAFT, len(self.tokens))
        if not self._asking:
            self._append(token, Role.ANSWER)
            self.ended |= token in eos
        elif token in eos:
            self._answer()
        else:
            self._append(token, Role.USER)
            if len(self.tokens) - len(self._frame.before) >= self._recipe.user_tokens:
                self._answer()
        self.ended |= len(self.tokens) >= self._recipe.max_length

    def _answer(self) -> None:
        self._asking = False
        for token in self._frame.after:
            self._append(token, Role.FORCED)

    def _append(self, token: int, role: Role) -> None:
        self.tokens.append(token)
        self.roles.append(int(role))

    def row(self, tokenizer: Tokenizer) -> Row:
        length = self._recipe.max_length
        roles = np.array(self.roles[:length], np.int8)
        tokens = np.array(self.tokens[:length], np.int32)
        return Row(tokens, mark_thinking(tokens, roles, tokenizer), self.temperature)


@dataclass(frozen=True)
class Writer:
    """The target as an author: writes rows by number."""

    engine: Engine
    tokenizer: Tokenizer
    recipe: GenerationRecipe
    prompts: tuple[TokenIds, ...] = ()
    """Row i answers prompt i; none: the target asks, too."""

    def write(self, rows: range) -> Iterator[tuple[int, Row | None]]:
        """Write rows in one running batch, yielding (row, None) a token and (row, text) when one ends."""
        frame = ChatFrame((), ()) if self.prompts else ChatFrame.of(self.tokenizer)
        waiting = [self._begin(index, frame) for index in rows]
        waiting.reverse()
        running: list[_Writing] = []
        try:
            while running or waiting:
                self._admit(waiting, running)
                yield from self._step(running)
                for ended in [writing for writing in running if writing.ended]:
                    self.engine.close(ended.index)
                    running.remove(ended)
                    yield ended.index, ended.row(self.tokenizer)
        finally:
            for writing in running:
                self.engine.close(writing.index)

    def _begin(self, index: int, frame: ChatFrame) -> _Writing:
        return _Writing(index, self.recipe, frame, self.prompts[index] if self.prompts else None)

    def _admit(self, waiting: list[_Writing], running: list[_Writing]) -> None:
        room = _ADMITTED_ROWS
        while waiting and len(running) < self.recipe.batch_rows and (room > 0):
            writing = waiting.pop()
            self.engine.open(writing.index, self.recipe.max_length)
            running.append(writing)
            room -= len(writing.tokens)

    def _step(self, running: list[_Writing]) -> Iterator[tuple[int, None]]:
        stepped = [writing for writing in running if not writing.ended]
        if not stepped:
            return
        plan = StepPlan(tuple(writing.next_item() for writing in stepped))
        for writing, logits in zip(stepped, self.engine.step(plan), strict=True):
            writing.grow(logits, self.tokenizer.eos_token_ids)
            yield writing.index, None


def self_generate(writer: Writer, folder: Path, tokens: int, target: str, report: Report | None = None) -> list[Row]:
    """Write shards until `tokens` learned tokens are there (or every prompt is answered).

    Args:
        writer: the target.
        folder: of shards; those that are there count and are not written again.
        tokens: wanted; at least one shard is written.
        target: digest of the target, kept with the shards.
        report: called with the tokens written so far.

    Raises:
        InvalidInput: the folder's shards come from another recipe, target or prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_recipe(folder / RECIPE_FILE, writer, target)
    report = report or (lambda _: None)
    rows: list[Row] = []
    done, first = 0, 0
    last = len(writer.prompts) or 1 << 24
    while first < last and done < tokens:
        numbers = range(first, min(first + writer.recipe.shard_rows, last))
        file = folder / f"shard-{first // writer.recipe.shard_rows:05}.npz"
        if not file.exists():
            _write_shard(writer, numbers, file, partial(_report_from, report, done))
        shard = read_shards(file)
        rows += shard
        done += count_learned(shard)
        report(done)
        first = numbers.stop
    return rows


def _report_from(report: Report, before: int, written: int) -> None:
    report(before + written)


def _write_shard(writer: Writer, numbers: range, file: Path, report: Report) -> None:
    rows: dict[int, Row] = {}
    for written, (index, row) in enumerate(writer.write(numbers)):
        if row is not None:
            rows[index] = row
        report(written)
    seed, vocab_size = writer.recipe.seed, writer.tokenizer.vocab_size
    save_shard(file, [rows[index] for index in numbers], vocab_size, seed=seed, first_row=numbers.start)


def _check_recipe(file: Path, writer: Writer, target: str) -> None:
    prompts = hashlib.sha256(json.dumps(writer.prompts).encode()).hexdigest() if writer.prompts else None
    wanted: dict[str, Any] = json.loads(
        json.dumps({**asdict(writer.recipe), "target": target, "prompts_sha256": prompts})
    )
    wanted.pop("batch_rows")  # decides speed alone
    if not file.exists():
        replace_file(file, lambda temporary: temporary.write_text(json.dumps(wanted, indent=2) + "\n"))
    found = json.loads(file.read_text())
    for key, value in wanted.items():
        require(found.get(key) == value, f"{file.name}: {key}", value, f"{found.get(key)!r}, as the shards there")


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all."""
    temporary = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        write(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def save_shard(file: Path, rows: Sequence[Row], vocab_size: int, *, seed: int = 0, first_row: int = 0) -> None:
    """Save rows as arrays [rows, longest], padded with forced zeros."""
    longest = max(len(row.token_ids) for row in rows)
    token_ids = np.zeros((len(rows), longest), np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    roles = np.zeros((len(rows), longest), np.int8)
    for i, row in enumerate(rows):
        token_ids[i, : len(row.token_ids)] = row.token_ids
        roles[i, : len(row.roles)] = row.roles
    temperatures = np.array([row.temperature for row in rows], np.float32)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as out:
            np.savez_compressed(
                out,
                token_ids=token_ids,
                role=roles,
                temperature=temperatures,
                seed=np.uint64(seed),
                first_row=np.int64(first_row),
            )

    replace_file(file, write)


def read_shards(path: Path) -> list[Row]:
    """Read one shard, or every shard of a folder in order.

    Raises:
        InvalidInput: nothing readable there.
    """
    # A killed write leaves a file whose name begins with a dot.
    files = sorted(path.glob("[!.]*.npz")) if path.is_dir() else [path]
    require(bool(files), "data", str(path), "a folder with .npz shards")
    rows: list[Row] = []
    for file in files:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                tokens, roles, temperatures = (arrays[name] for name in ("token_ids", "role", "temperature"))
        except (OSError, ValueError, KeyError) as error:
            raise InvalidInput.of("data", str(file), f"an .npz of token_ids, role, temperature ({error})") from error
        rows += map(_unpadded, tokens, roles, temperatures)
    return rows


def _unpadded(tokens: NDArray[Any], roles: NDArray[Any], temperature: float) -> Row:
    written = np.flatnonzero(roles)
    length = int(written[-1]) + 1 if written.size else 0
    return Row(tokens[:length].astype(np.int32), roles[:length].astype(np.int8), round(float(temperature), 6))


def count_learned(rows: Iterable[Row]) -> int:
    """Tokens that a draft learns from."""
    return sum(int(row.learned.sum()) for row in rows)


@dataclass(frozen=True)
class UserData:
    """What a file held: finished texts, and prompts that the target still has to answer."""

    rows: tuple[Row, ...]
    prompts: tuple[TokenIds, ...] = ()


def read_data(path: Path, tokenizer: Tokenizer, max_length: int) -> UserData:
    """Read a JSONL file, an `.npz` shard or a folder of shards.

    Raises:
        InvalidInput: unreadable, or a token that isn't the tokenizer's.
    """
    if path.suffix == ".jsonl":
        return read_jsonl(path, tokenizer, max_length)
    rows = read_shards(path)
    largest = max(int(row.token_ids.max(initial=0)) for row in rows)
    require(largest < tokenizer.vocab_size, "data token id", largest, f"below {tokenizer.vocab_size}, the target's")
    return UserData(tuple(rows))


def read_jsonl(file: Path, tokenizer: Tokenizer, max_length: int) -> UserData:
    """Read lines with `prompt` (a user message), `messages` or `text`; finished texts are cut at `max_length`.

    `messages` that end with the assistant's turn are finished texts, one row a
    turn of the assistant's; those that end otherwise are prompts.

    Raises:
        InvalidInput: naming the line.
    """
    rows: list[Row] = []
    prompts: list[TokenIds] = []
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput.of("data", str(file), f"a readable UTF-8 file ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found, wanted = _read_line(line, f"{file.name} line {number}", tokenizer)
        rows += [_cut(row, max_length) for row in found]
        prompts += wanted
    require(bool(rows or prompts), "data", str(file), "at least 1 line")
    for prompt in prompts:
        require(len(prompt) < max_length, "prompt length", len(prompt), f"below {max_length} tokens")
    return UserData(tuple(rows), tuple(prompts))


def _read_line(line: str, where: str, tokenizer: Tokenizer) -> tuple[list[Row], list[TokenIds]]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInput.of(where, line, f"a JSON object ({error})") from error
    match value:
        case {"messages": [_, *_] as messages}:
            return _read_messages([_message(each, where) for each in messages], tokenizer)
        case {"prompt": str(prompt)}:
            return [], [tokenizer.render_chat([ChatMessage("user", prompt)])]
        case {"text": str(text)}:
            return [_finished((), tokenizer.encode(text), tokenizer)], []
    raise InvalidInput.of(where, line, "an object with prompt, messages or text")


def _message(value: object, where: str) -> ChatMessage:
    match value:
        case {"role": str(role), "content": str(content)}:
            return ChatMessage(role, content)
    raise InvalidInput.of(where, value, "messages with role and content")


def _read_messages(messages: list[ChatMessage], tokenizer: Tokenizer) -> tuple[list[Row], list[TokenIds]]:
    if messages[-1].role != "assistant":
        return [], [tokenizer.render_chat(messages)]
    rows: list[Row] = []
    for i, message in enumerate(messages):
        if message.role == "assistant" and i:
            answer = (*_bare_tokens(message.content, tokenizer), *_end_of_turn(tokenizer))
            rows.append(_finished(tokenizer.render_chat(messages[:i]), answer, tokenizer))
    return rows, []


def _bare_tokens(text: str, tokenizer: Tokenizer) -> TokenIds:
    """A text's tokens without what the tokenizer begins every text with."""
    tokens = tokenizer.encode(text)
    return tuple(tokens[_shared(tokenizer.encode(""), tokens) :])


def _end_of_turn(tokenizer: Tokenizer) -> TokenIds:
    """What the template writes after a turn, if that ends a text; else the tokenizer's own end."""
    ends = [token for token in ChatFrame.of(tokenizer).after[:1] if token in tokenizer.eos_token_ids]
    return tuple(ends or sorted(tokenizer.eos_token_ids)[:1])


def _finished(prompt: TokenIds, text: TokenIds, tokenizer: Tokenizer) -> Row:
    tokens = np.array([*prompt, *text], np.int32)
    roles = np.array([int(Role.FORCED)] * len(prompt) + [int(Role.ANSWER)] * len(text), np.int8)
    return Row(tokens, mark_thinking(tokens, roles, tokenizer), 1.0)


def _cut(row: Row, length: int) -> Row:
    return Row(row.token_ids[:length], row.roles[:length], row.temperature)


OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


def mark_thinking(tokens: NDArray[np.int32], roles: NDArray[np.int8], tokenizer: Tokenizer) -> NDArray[np.int8]:
    """Roles with the answer's thinking, tags included, as `Role.THINKING`. Returns a new array [length].

    Thinking that is never closed goes on to the end; a closing tag alone ends
    thinking that the template opened.
    """
    marked = roles.copy()
    answer = np.flatnonzero(roles == Role.ANSWER)
    if not answer.size:
        return marked
    start, end = int(answer[0]), int(answer[-1]) + 1
    text = tokens[start:end].tolist()
    at, opened_before = 0, True
    while at < len(text):
        opened = _find_tag(text, at, OPEN_TAG, tokenizer)
        closed = _find_tag(text, at, CLOSE_TAG, tokenizer)
        if opened is None and (closed is None or not opened_before):
            break
        low = at if opened is None or (opened_before and closed is not None and closed[0] < opened[0]) else opened[0]
        close = _find_tag(text, low, CLOSE_TAG, tokenizer)
        high = len(text) if close is None else close[1]
        marked[start + low : start + high] = Role.THINKING
        at, opened_before = high, False
    return marked


def _find_tag(text: list[int], at: int, tag: str, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Tokens [first, last + 1) from `at` on that write a tag, wherever the tokenizer cuts it."""
    own = tokenizer.encode(tag)[-1:]
    if tag not in tokenizer.decode(own):
        whole = len(tokenizer.encode(tag)) - len(tokenizer.encode("")) == 1  # a special token, which decode skips
        own = own if whole else ()
    if own:
        found = next((i for i in range(at, len(text)) if text[i] == own[0]), None)
        return None if found is None else (found, found + 1)
    if tag not in tokenizer.decode(text[at:]):
        return None
    end = _smallest(at, len(text), lambda high: tag in tokenizer.decode(text[at:high]))
    first = _smallest(at, end, lambda low: tag not in tokenizer.decode(text[low:end])) - 1
    return first, end


def _smallest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest n in (low, high] for which a monotone condition holds; `high` if none below it does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _shared(one: TokenIds, other: TokenIds) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Split:
    """Rows to learn from and rows kept apart, every temperature in both."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]


def split_rows(rows: Sequence[Row], share: float = HELD_OUT_SHARE) -> Split:
    """Hold out the last `share` of the rows of each temperature, at least one of each.

    Raises:
        InvalidInput: a temperature has a single row, or no row has anything to learn.
    """
    useful = [row for row in rows if row.learned.any()]
    require(bool(useful), "rows with text of the assistant's", 0, "at least 2")
    train: list[Row] = []
    held_out: list[Row] = []
    for temperature in sorted({row.temperature for row in useful}):
        group = [row for row in useful if row.temperature == temperature]
        require(len(group) >= 2, f"rows at temperature {temperature:g}", len(group), "at least 2")
        cut = len(group) - max(1, round(share * len(group)))
        train += group[:cut]
        held_out += group[cut:]
    return Split(tuple(train), tuple(held_out))
