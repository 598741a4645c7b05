"""What the teacher remembers: labels whose bits don't depend on it, and nothing where it would be wrong."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline_training.corpus import Role, Row
from paceline_training.teacher import Teacher
from tests.training.tiny_target import load_target

RANDOM = np.random.Generator(np.random.Philox(11))
ROLES = np.array([Role.FORCED] * 4 + [Role.ANSWER] * 20, np.int8)
ROWS = tuple(Row(RANDOM.integers(0, 258, ROLES.size).astype(np.int32), ROLES, 1.0) for _ in range(3))
VOCABULARY = DraftVocabulary(np.arange(0, 258, 2, dtype=np.int32), 258)
SOME, NONE = 1 << 20, 0


@pytest.fixture(scope="module")
def model(target_folder: Path) -> PreTrainedModel:
    return load_target(target_folder).model


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.5), (torch.bfloat16, 1.0)])
def test_a_remembered_label_is_the_recomputed_one(
    model: PreTrainedModel, dtype: torch.dtype, temperature: float
) -> None:
    remembering, forgetful = (Teacher(model, VOCABULARY, dtype, memory_bytes=memory) for memory in (SOME, NONE))
    for row in ROWS * 2:
        mine, theirs = (each.lesson(row, temperature).labels for each in (remembering, forgetful))
        assert torch.equal(mine, theirs)
    assert (len(remembering._texts), len(forgetful._texts)) == (len(ROWS), 0)


def test_labels_are_the_targets_distribution(model: PreTrainedModel) -> None:
    teacher = Teacher(model, VOCABULARY, torch.float32, memory_bytes=SOME)
    (row,) = ROWS[:1]
    for temperature in (1.0, 0.5, 1.0):  # the same text at two temperatures: two labels
        tokens = torch.from_numpy(row.token_ids[None]).long()
        with torch.inference_mode():
            logits = model_logits(model, tokens)[0, 3:-1]  # before each of the answer's tokens
        plain = torch.log_softmax(logits / temperature, dim=-1)[:, VOCABULARY.d2t]
        torch.testing.assert_close(teacher.lesson(row, temperature).labels, plain, atol=1e-4, rtol=1e-4)
    assert len(teacher._texts) == 2


def model_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    plain: Any = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    logits: torch.Tensor = plain(input_ids=tokens, use_cache=False).logits
    return logits


def scaled(model: PreTrainedModel, *, in_place: bool) -> PreTrainedModel:
    """A model that changes logits behind its head, by a hundredth, which no tolerance would show."""
    changed: Any = copy.deepcopy(model)
    forward = changed.forward

    @functools.wraps(forward)
    def behind(*arguments: Any, **named: Any) -> Any:
        output = forward(*arguments, **named)
        output.logits = output.logits.mul_(0.99) if in_place else output.logits * 0.99
        return output

    changed.forward = behind
    scaled_model: PreTrainedModel = changed
    return scaled_model


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_scales_behind_its_head_is_read_each_time(model: PreTrainedModel, in_place: bool) -> None:
    teacher = Teacher(scaled(model, in_place=in_place), VOCABULARY, torch.float32, memory_bytes=SOME)
    plain = Teacher(model, VOCABULARY, torch.float32, memory_bytes=SOME)
    for row in ROWS:
        once, again = (teacher.lesson(row, 0.99).labels for _ in range(2))
        assert torch.equal(once, again)
        torch.testing.assert_close(once, plain.lesson(row, 1.0).labels, atol=1e-5, rtol=1e-4)
    assert (len(teacher._texts), len(plain._texts)) == (0, len(ROWS))
