"""Text to learn from: who wrote what, and shards that can be made again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol.errors import InvalidInput
from paceline_training.chat import ChatFrame, mark_thinking
from paceline_training.corpus import Role, Row, count_learned_tokens, read_shards, save_shard, split_rows
from paceline_training.user_data import read_data, read_jsonl
from paceline_training.writing import GenerationRecipe, parse_temperature_mix, self_generate
from tests.gateway.templates import OPENED
from tests.models.saving import byte_level_tokenizer, templated
from tests.training.tiny_target import GENERATION, same_rows, writer, written

TOKENIZER = TransformersTokenizer(byte_level_tokenizer())


def reasoning_tokenizer() -> TransformersTokenizer:
    """The same with marks of reasoning, which are no special tokens, as models have them."""
    inner = byte_level_tokenizer()
    inner.add_tokens(["<think>", "</think>"])
    return TransformersTokenizer(inner)


REASONING = reasoning_tokenizer()
SPELLING = templated(OPENED)
"""The same without such tokens, and a template that knows the marks: each is a token a byte."""
END = 1


def test_rows_hold_a_user_turn_and_an_answer_in_the_template(target_folder: Path) -> None:
    frame = ChatFrame.of(TOKENIZER)
    for row in written(writer(target_folder), range(12)):
        tokens, roles = row.token_ids.tolist(), row.roles.tolist()
        asked = roles.count(Role.USER)
        start = len(frame.prefix) + asked
        assert tuple(tokens[: len(frame.prefix)]) == frame.prefix
        assert tuple(tokens[start : start + len(frame.suffix)]) == frame.suffix
        assert asked <= GENERATION.user_tokens
        assert END not in tokens[len(frame.prefix) : start]
        answer = tokens[start + len(frame.suffix) :]
        assert answer
        assert len(tokens) == GENERATION.max_length or answer[-1] == END
        assert END not in answer[:-1]


def test_a_row_depends_on_its_number_and_not_on_its_batch(target_folder: Path) -> None:
    together = written(writer(target_folder), range(6))
    small = writer(target_folder, replace(GENERATION, batch_rows=2))
    assert same_rows(together[2:5], written(small, range(2, 5)))
    other_seed = writer(target_folder, replace(GENERATION, seed=6))
    assert not same_rows(together, written(other_seed, range(6)))


def test_greedy_rows_are_greedy_and_the_mix_is_even(target_folder: Path) -> None:
    recipe = GenerationRecipe(temperature_mix=((1.0, 0.5), (0.6, 0.25), (0.0, 0.25)))
    temperatures = [recipe.temperature_of(row) for row in range(400)]
    for temperature, share in recipe.temperature_mix:
        assert temperatures.count(temperature) == pytest.approx(400 * share, abs=2)
    greedy = replace(GENERATION, temperature_mix=((0.0, 1.0),))
    prompt = (0, *TOKENIZER.encode("same"))
    one, other = written(writer(target_folder, greedy, (prompt, prompt)), range(2))
    assert one.token_ids.tolist() == other.token_ids.tolist()


def test_an_interrupted_run_goes_on_at_its_first_missing_shard(target_folder: Path, tmp_path: Path) -> None:
    whole = self_generate(writer(target_folder), tmp_path / "whole", 1500, "digest")
    interrupted = tmp_path / "interrupted"
    self_generate(writer(target_folder), interrupted, 1, "digest")
    first = (interrupted / "shard-00000.npz").read_bytes()
    assert len(list(interrupted.glob("*.npz"))) == 1
    resumed = self_generate(writer(target_folder), interrupted, 1500, "digest")
    assert same_rows(whole, resumed)
    assert (interrupted / "shard-00000.npz").read_bytes() == first
    assert count_learned_tokens(whole) >= 1500
    with np.load(interrupted / "shard-00001.npz") as arrays:
        assert (int(arrays["seed"]), int(arrays["first_row"])) == (5, 16)


def test_shards_of_another_recipe_target_or_prompts_are_refused(target_folder: Path, tmp_path: Path) -> None:
    prompts = tuple((0, *TOKENIZER.encode(text)) for text in ("one", "two"))
    self_generate(writer(target_folder, prompts=prompts), tmp_path, 1, "digest")
    for other, digest, named in (
        (writer(target_folder, replace(GENERATION, seed=6), prompts), "digest", "seed"),
        (writer(target_folder, prompts=prompts), "another", "target"),
        (writer(target_folder, prompts=prompts[::-1]), "digest", "prompts"),
    ):
        with pytest.raises(InvalidInput, match=named):
            self_generate(other, tmp_path, 1, digest)


def test_shards_survive_the_disk(tmp_path: Path) -> None:
    rows = [
        Row(np.array([3, 4, 5], np.int32), np.array([0, 2, 2], np.int8), 0.6),
        Row(np.array([7, 300], np.int32), np.array([1, 3], np.int8), 0.0),
    ]
    save_shard(tmp_path / "a.npz", rows, 70_000)
    (tmp_path / ".1-b.npz").write_bytes(b"half a shard of a killed run")
    assert same_rows(rows, read_shards(tmp_path))
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["token_ids"].dtype == np.uint32
    save_shard(tmp_path / "a.npz", rows, 65_536)
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["token_ids"].dtype == np.uint16


def thinking_of(text: str, tokenizer: TransformersTokenizer) -> str:
    """What is marked as reasoning."""
    tokens = np.array(tokenizer.encode(text), np.int32)
    roles = mark_thinking(tokens, np.full(tokens.size, Role.ANSWER, np.int8), tokenizer)
    return tokenizer.decode(tokens[roles == Role.THINKING].tolist())


@pytest.mark.parametrize("tokenizer", [REASONING, SPELLING], ids=["one token", "several"])
@pytest.mark.parametrize(
    ("text", "thinking"),
    [
        ("plain answer", ""),
        ("<think>why</think>so", "<think>why</think>"),
        ("first <think>a</think> then <think></think> end", "<think>a</think><think></think>"),
        ("<think>never closed", "<think>never closed"),
        ("opened by the template</think>so", "opened by the template</think>"),
        ("<thinking>not the tag", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, thinking: str, tokenizer: TransformersTokenizer) -> None:
    assert thinking_of(text, tokenizer) == thinking


def test_a_model_without_marks_has_no_reasoning() -> None:
    assert thinking_of("<think>why</think>so", TOKENIZER) == ""


def test_a_template_opens_reasoning_in_several_tokens() -> None:
    prompt = SPELLING.render_turns([{"role": "user", "content": "</think>"}])
    tokens = np.array([*prompt, *SPELLING.encode("why")], np.int32)
    roles = np.array([Role.FORCED] * len(prompt) + [Role.ANSWER] * 3, np.int8)
    assert mark_thinking(tokens, roles, SPELLING).tolist() == [Role.FORCED] * len(prompt) + [Role.THINKING] * 3


def test_jsonl_gives_prompts_and_finished_texts(tmp_path: Path) -> None:
    finished = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>hm</think>yo"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "no"},
    ]
    lines: list[dict[str, object]] = [
        {"prompt": "ask"},
        {"messages": finished[:3]},  # what the assistant wrote before is context here, not to be learned
        {"messages": finished},
        {"text": "all of it"},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    data = read_jsonl(file, REASONING, 512)
    assert [REASONING.decode(prompt) for prompt in data.prompts] == [
        "user:askassistant:",
        "user:hiassistant:<think>hm</think>youser:moreassistant:",
    ]
    turn, last, text = data.rows
    assert REASONING.decode(turn.token_ids[turn.roles == Role.THINKING].tolist()) == "<think>hm</think>"
    assert turn.token_ids[turn.roles == Role.ANSWER].tolist() == [*REASONING.encode("yo"), END]
    assert last.token_ids[last.loss_mask].tolist() == [*REASONING.encode("no"), END]
    assert REASONING.decode(text.token_ids.tolist()) == "all of it"
    assert text.loss_mask.all()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("not json", "line 1"),
        ("{}", "prompt, messages or text"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        ("", "at least 1"),
    ],
)
def test_bad_lines_are_named(line: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(line)
    with pytest.raises(InvalidInput, match=named):
        read_jsonl(file, TOKENIZER, 64)


def test_every_temperature_is_held_out() -> None:
    learned = np.full(4, Role.ANSWER, np.int8)
    rows = [Row(np.full(4, i, np.int32), learned, (0.0, 1.0)[i % 2]) for i in range(40)]
    split = split_rows(rows)
    assert sorted(row.temperature for row in split.held_out) == [0.0, 1.0]
    assert len(split.train) + len(split.held_out) == 40
    held_out = {int(row.token_ids[0]) for row in split.held_out}
    assert held_out.isdisjoint(int(row.token_ids[0]) for row in split.train)


def test_mixes_are_parsed() -> None:
    assert parse_temperature_mix("1:0.5,0:0.5") == ((1.0, 0.5), (0.0, 0.5))
    with pytest.raises(InvalidInput, match="temperature_mix"):
        parse_temperature_mix("1,0")
    with pytest.raises(InvalidInput, match="sum to 1"):
        GenerationRecipe(temperature_mix=((1.0, 0.5),))


def test_a_file_that_is_not_there_or_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello")
    limits = {"none.txt": "an existing file or folder", "none.jsonl": "none.jsonl", "text.txt": "a .jsonl of prompt"}
    for name, limit in limits.items():
        with pytest.raises(InvalidInput, match=limit):
            read_data(tmp_path / name, TOKENIZER, 64)
