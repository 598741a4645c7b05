"""The user's own texts and prompts: JSONL, shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.generation import ChatMessage
from paceline.protocol.given_files import read_json_lines
from paceline_training.chat import ChatFrame, mark_thinking, shared_prefix
from paceline_training.corpus import Role, Row, TokenIds, read_shards


@dataclass(frozen=True)
class UserData:
    """A file's finished texts, and its prompts, which the target still has to answer."""

    rows: tuple[Row, ...]
    prompts: tuple[TokenIds, ...] = ()


def read_data(path: Path, tokenizer: Tokenizer, max_length: int) -> UserData:
    """Read a JSONL file, an `.npz` shard or a folder of shards.

    Raises:
        InvalidInput: unreadable, or a token that isn't the tokenizer's.
    """
    if path.suffix == ".jsonl":
        return read_jsonl(path, tokenizer, max_length)
    require(path.exists(), "data", str(path), "an existing file or folder")
    is_shards = path.suffix == ".npz" or path.is_dir()
    require(is_shards, "data", str(path), "a .jsonl of prompt, messages or text, an .npz shard or a folder of them")
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
    for where, value in read_json_lines("data", file):
        line_rows, line_prompts = _read_line(value, where, tokenizer)
        rows += [Row(row.token_ids[:max_length], row.roles[:max_length], row.temperature) for row in line_rows]
        prompts += line_prompts
    require(bool(rows or prompts), "data", str(file), "at least 1 line")
    for prompt in prompts:
        require(len(prompt) < max_length, "prompt length", len(prompt), f"below {max_length} tokens")
    return UserData(tuple(rows), tuple(prompts))


def _read_line(value: object, where: str, tokenizer: Tokenizer) -> tuple[list[Row], list[TokenIds]]:
    match value:
        case {"messages": [_, *_] as messages}:
            return _read_messages([_message(each, where) for each in messages], tokenizer)
        case {"prompt": str(prompt)}:
            return [], [tokenizer.render_chat([ChatMessage("user", prompt)])]
        case {"text": str(text)}:
            return [_finished_row((), tokenizer.encode(text), tokenizer)], []
    raise InvalidInput.of(where, value, "an object with prompt, messages or text")


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
            rows.append(_finished_row(tokenizer.render_chat(messages[:i]), answer, tokenizer))
    return rows, []


def _bare_tokens(text: str, tokenizer: Tokenizer) -> TokenIds:
    """A text's tokens without what the tokenizer begins every text with."""
    tokens = tokenizer.encode(text)
    return tuple(tokens[shared_prefix(tokenizer.encode(""), tokens) :])


def _end_of_turn(tokenizer: Tokenizer) -> TokenIds:
    """What the template writes after a turn, if that ends a text; else the tokenizer's own end."""
    ends = [token for token in ChatFrame.of(tokenizer).suffix[:1] if token in tokenizer.eos_token_ids]
    return tuple(ends or sorted(tokenizer.eos_token_ids)[:1])


def _finished_row(prompt: TokenIds, text: TokenIds, tokenizer: Tokenizer) -> Row:
    tokens = np.array([*prompt, *text], np.int32)
    roles = np.array([int(Role.FORCED)] * len(prompt) + [int(Role.ANSWER)] * len(text), np.int8)
    return Row(tokens, mark_thinking(tokens, roles, tokenizer), 1.0)
