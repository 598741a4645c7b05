"""Made traffic: seeded, without repeats, and telling what its answers need."""

from __future__ import annotations

import random
from pathlib import Path

from paceline.models.tokenizer import TransformersTokenizer
from paceline_lab.bench.narrow_traffic import TEMPLATES, describe, draw_product, prompts, write_prompts
from paceline_training.user_data import read_jsonl
from tests.models.saving import byte_level_tokenizer


def test_traffic_is_a_function_of_its_seed_without_repeats(tmp_path: Path) -> None:
    one, same, other = (list(prompts(seed, 400)) for seed in (3, 3, 4))
    assert one == same != other
    asked = {messages[-1]["content"] for messages in one}
    assert len(asked) == 400
    assert len(asked & {messages[-1]["content"] for messages in other}) < 4
    write_prompts(tmp_path / "prompts.jsonl", 3, 20)
    data = read_jsonl(tmp_path / "prompts.jsonl", TransformersTokenizer(byte_level_tokenizer()), 2000)
    assert (len(data.prompts), len(data.rows)) == (20, 0)  # the example in the prompt is not an answer to learn


def test_descriptions_hold_what_is_asked_for() -> None:
    generator = random.Random(1)
    for _ in range(50 * len(TEMPLATES)):
        product = draw_product(generator)
        text = describe(product, generator).lower()
        for part in (product.product, product.brand, product.color, product.material, product.price):
            assert part.lower() in text
        assert ("in stock" in text) is product.in_stock
