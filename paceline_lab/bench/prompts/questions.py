"""Prompts from a file of questions in Spec-Bench's form (github.com/hemingkx/Spec-Bench): one JSON object a line.

Each has a `question_id`, a `category` and `turns`: user messages, each sent once those before it are answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.generation import ChatMessage
from paceline.protocol.given_files import read_json_lines
from paceline_lab.bench.prompts import Prompt

PER_CATEGORY = 8
"""Questions of a category that are asked by default: fewer say little of a median."""


def load_questions(
    file: Path, categories: Sequence[str] = (), per_category: int = PER_CATEGORY
) -> dict[str, tuple[Prompt, ...]]:
    """Return the first questions of each category, in the file's order; categories in the order given, or the file's.

    Raises:
        InvalidInput: a file, line, field or category that can't be used.
    """
    require(per_category >= 1, "per_category", per_category, "at least 1")
    prompts: dict[str, list[Prompt]] = {}
    for prompt in _read(file):
        prompts.setdefault(prompt.kind, []).append(prompt)
    require(bool(prompts), "prompts", str(file), "a file with one question or more")
    for category in categories:
        require(category in prompts, "category", category, f"one of {', '.join(prompts)}, the categories of {file}")
    return {category: tuple(prompts[category][:per_category]) for category in categories or prompts}


def _read(file: Path) -> Iterator[Prompt]:
    for where, value in read_json_lines("prompts", file):
        yield _question(where, value)


def _question(where: str, value: Any) -> Prompt:
    require(isinstance(value, dict), where, value, "a JSON object")
    name, category, turns = (_field(where, value, name) for name in ("question_id", "category", "turns"))
    is_name = isinstance(name, int | str) and not isinstance(name, bool) and name != ""
    require(is_name, f"{where}: question_id", name, "a number or a text")
    require(isinstance(category, str) and category != "", f"{where}: category", category, "a text, not empty")
    require(isinstance(turns, list) and len(turns) > 0, f"{where}: turns", turns, "a list of one text or more")
    for place, turn in enumerate(turns):
        require(isinstance(turn, str) and turn != "", f"{where}: turns[{place}]", turn, "a text, not empty")
    chats = tuple((ChatMessage("user", turn),) for turn in turns)
    return Prompt(category, str(name), chats, ends=True, follows=True)


def _field(where: str, value: dict[str, Any], name: str) -> Any:
    if name not in value:
        raise InvalidInput.of(f"{where}: {name}", None, "given")
    return value[name]
