"""The texts of the replay: this repository's own, a tokenizer's ids; answers of a model and questions from files."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from benchmarks.prompts.questions import load_questions
from benchmarks.suffixes.replay import ReplayText
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import require
from paceline.train.corpus import read_shards

FEWEST_TEXTS = 8
"""Of a kind: fewer say little of a median."""
LEAST_TOKENS, MOST_TOKENS = 200, 4000
"""Of a text: a shorter one has nothing to repeat."""
REPOSITORY = Path(__file__).parents[2]

Encode = Callable[[str], tuple[int, ...]]


def all_texts(
    tokenizer: Tokenizer, most: int, answers: Path | None = None, questions: Path | None = None
) -> dict[str, list[ReplayText]]:
    """Kind → up to `most` texts.

    Args:
        tokenizer: of the ids.
        most: texts of a kind.
        answers: an `.npz` shard of texts that a model wrote, in this tokenizer's ids, as `paceline train` reads it.
        questions: a file in Spec-Bench's form.

    Raises:
        InvalidInput: a file that can't be read, or fewer than `FEWEST_TEXTS` texts of a kind.
    """

    def encode(text: str) -> tuple[int, ...]:
        return tokenizer.encode(text, add_special_tokens=False)

    found: dict[str, Iterable[ReplayText]] = {
        "code": _halves("*.py", encode),
        "documentation": _halves("docs/*.md", encode),
        "edits": _versions("*.py", encode),
    }
    if answers is not None:
        found |= {f"answers, temperature {t:g}": _answers(answers, t) for t in (0.0, 0.6, 1.0)}
    if questions is not None:
        found |= dict(_questions(questions, encode))
    texts = {kind: [*islice(some, most)] for kind, some in found.items()}
    for kind, some in texts.items():
        require(len(some) >= FEWEST_TEXTS, f"texts of {kind}", len(some), f"at least {FEWEST_TEXTS}")
    return texts


def _halves(pattern: str, encode: Encode) -> Iterator[ReplayText]:
    """Second halves of files, given the first."""
    for file in _files(pattern):
        yield from _in_two(file, encode((REPOSITORY / file).read_text("utf-8")))


def _in_two(name: str, ids: tuple[int, ...]) -> Iterator[ReplayText]:
    if LEAST_TOKENS <= len(ids) <= MOST_TOKENS:
        yield ReplayText(name, ids[: len(ids) // 2], ids[len(ids) // 2 :])


def _versions(pattern: str, encode: Encode) -> Iterator[ReplayText]:
    """The last version of a file, given the one before."""
    for file in _files(pattern):
        commits = _git("log", "--format=%h", "-2", "--", file).split()
        if len(commits) == 2:
            new, old = (_git("show", f"{commit}:{file}") for commit in commits)
            ids = encode(new)
            if old and LEAST_TOKENS <= len(ids) <= MOST_TOKENS:
                yield ReplayText(file, encode(old), ids)


def _answers(shard: Path, temperature: float) -> Iterator[ReplayText]:
    """What a model wrote, given what it was asked."""
    for number, row in enumerate(read_shards(shard)):
        if row.learned.any() and abs(row.temperature - temperature) < 1e-3:
            first = int(row.learned.argmax())
            ids = tuple(row.token_ids.tolist())
            if len(ids) >= LEAST_TOKENS:
                yield ReplayText(f"row {number}", ids[:first], ids[first:])


def _questions(file: Path, encode: Encode) -> Iterator[tuple[str, list[ReplayText]]]:
    """Second halves of questions' texts, of categories whose texts are long enough."""
    for category, prompts in load_questions(file, per_category=1 << 10).items():
        some = (
            _in_two(prompt.name, encode("\n".join(message.content for chat in prompt.chats for message in chat)))
            for prompt in prompts
        )
        texts = [text for found in some for text in found]
        if len(texts) >= FEWEST_TEXTS:
            yield f"questions, {category}", texts


def _files(pattern: str) -> list[str]:
    """The repository's, in an order that is the same each time."""
    files = _git("ls-files", pattern).split()
    random.Random(pattern).shuffle(files)  # noqa: S311 - no secret
    return files


def _git(*args: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
