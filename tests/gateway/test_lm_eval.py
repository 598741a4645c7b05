"""The evaluation harness lm-eval over HTTP, beside its own run of the same checkpoint with transformers.

Opt-in: `pip install 'lm-eval[api]==0.4.13'`, then `python -m pytest -m full tests/gateway/test_lm_eval.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.local.service_process import Flags
from tests.engine import tiny
from tests.gateway.gateways import GatewayCluster
from tests.models.saving import save_with_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

LETTERS = "".join(chr(0x60 + i) for i in range(1, tiny.VOCAB))
REQUESTS = 40
CLOSE = 1e-3
"""Of sums over up to 30 tokens of values that differ by 1e-5 or so."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-checkpoint")
    save_with_tokenizer(tiny.random_model(tiny.llama()), folder)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[GatewayCluster]:
    flags: Flags = {"engine.threads": 1, "engine.prefill_chunk": 32}
    with GatewayCluster(tmp_path_factory.mktemp("evaluated"), target_model=str(model), target_flags=flags) as running:
        yield running


def texts() -> list[tuple[str, str]]:
    """Contexts and continuations; several share a context, as the choices of one question do."""
    source = random.Random(3)
    contexts = ["".join(source.choices(LETTERS, k=source.randint(1, 150))) for _ in range(REQUESTS // 4)]
    return [(context, "".join(source.choices(LETTERS, k=source.randint(1, 30)))) for context in contexts * 4]


def asked(kind: str, arguments: Sequence[tuple[str, ...]]) -> list[Any]:
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    return [instance(request_type=kind, doc={}, arguments=each, idx=place) for place, each in enumerate(arguments)]


def test_loglikelihoods_are_those_of_its_own_run(served: GatewayCluster, model: Path) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions").LocalCompletionsAPI(
        base_url=f"http://{served.address_of('gateway')}/v1/completions",
        model=str(model),
        tokenizer_backend="huggingface",
        tokenizer=str(model),
        max_length=tiny.CONTEXT,
        batch_size=4,
        num_concurrent=2,
    )
    direct = pytest.importorskip("lm_eval.models.huggingface").HFLM(
        pretrained=str(model), device="cpu", dtype="float32", max_length=tiny.CONTEXT, batch_size=1
    )
    questions = asked("loglikelihood", texts())
    ours, theirs = completions.loglikelihood(questions), direct.loglikelihood(questions)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=CLOSE)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    rolling = asked("loglikelihood_rolling", [(context,) for context, _ in texts()[:5]])
    whole = direct.loglikelihood_rolling(rolling)
    assert completions.loglikelihood_rolling(rolling) == pytest.approx(whole, abs=CLOSE)
