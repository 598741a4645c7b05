"""The real model, and its own draft: speculation writes the target's own text, token for token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.protocol.generation import ChatMessage, FinishReason, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.runtime.config import DEFAULT_MODEL as MODEL
from tests.e2e.cluster import Cluster
from tests.e2e.test_records import assert_parts_add_up

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1800)]

OWN = "model:default"
"""The draft of paceline-drafts, found by the target's name."""
DRAFTERS = (f"model:{MODEL}#layers=0,1,2,29", OWN)
PROMPTS = (
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a short story about a lighthouse keeper.",
    "def add(first, second):\n    return first + second\n\nRename `first` to `left` in the code above.",
    "Explain why the sky is blue in two sentences.",
    "List the planets of the solar system.",
    "Summarise: Paris is the capital of France. It lies on the Seine. It has two million inhabitants.",
    "Extract JSON with name and price: The red kettle costs 25 dollars.",
    "What is 12 times 7? Show your steps.",
)
SAMPLINGS = (SamplingParams(temperature=0), SamplingParams(temperature=0.8))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    threads: dict[str, object] = {"engine.threads": 1}
    with Cluster(
        tmp_path_factory.mktemp("real"),
        target_model=MODEL,
        drafters=DRAFTERS,
        target_flags=threads,
        draft_flags=threads | {"target_model": MODEL},
        coordinator_flags={"draft_timeout_ms": 5000.0},
    ) as running:
        yield running


def request(prompt: str, length: int, sampling: SamplingParams, speculation: SpeculationSettings) -> GenerateRequest:
    return GenerateRequest(
        messages=(ChatMessage("user", prompt),),
        seed=42,
        sampling=sampling,
        max_new_tokens=length,
        speculation=speculation,
    )


def check(
    cluster: Cluster, prompt: str, length: int, k: int, samplings: Sequence[SamplingParams] = SAMPLINGS
) -> None:
    with cluster.client() as client:
        for sampling in samplings:
            plain = client.generate(request(prompt, length, sampling, SpeculationSettings(off=True)))
            for drafter in ("model", "ngram"):
                speculation = SpeculationSettings(drafter=drafter, num_draft_tokens=k)
                drafted = client.generate(request(prompt, length, sampling, speculation))
                assert drafted.token_ids == plain.token_ids, (prompt, drafter, k, sampling)
                assert drafted.text == plain.text
                assert_parts_add_up(drafted.stats)


def test_32_tokens(real: Cluster) -> None:
    check(real, PROMPTS[0], 32, 3, SAMPLINGS[:1])


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "price": {"type": "integer", "minimum": 0, "maximum": 9999},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "in stock": {"type": "boolean"},
    },
    "required": ["name", "price", "colours", "in stock"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON_PROMPTS = (
    "Extract JSON with name and price: The red kettle costs 25 dollars.",
    "Tell me a joke.",
    "Describe a green bicycle as JSON.",
    "Wie heißt du? Antworte auf Deutsch.",
)
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logprobs": 1,
}


def check_json(cluster: Cluster, prompt: str, *seeds: int | None) -> None:
    """Every text (None: greedy) parses and fits, and is the target-only text under the same penalties."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    with cluster.client() as client:
        for seed in seeds:
            sampling = SamplingParams(temperature=0.0 if seed is None else 1.0, grammar=grammar, **EVERYTHING)
            base = request(prompt, 120, sampling, SpeculationSettings(drafter="model", num_draft_tokens=4))
            drafted = client.generate(replace(base, seed=seed or 0))
            plain = client.generate(replace(base, seed=seed or 0, speculation=SpeculationSettings(off=True)))
            assert drafted.token_ids == plain.token_ids
            assert drafted.finish_reason is FinishReason.STOP
            document = json.loads(drafted.text)
            assert set(document) == set(SCHEMA["properties"])
            assert 0 <= document["price"] <= 9999
            assert set(document["colours"]) <= {"red", "green", "blue"}


def test_json_of_a_schema_always_parses(real: Cluster) -> None:
    check_json(real, JSON_PROMPTS[0], 0)


def test_the_models_own_draft_is_there_changes_no_text_and_draws_what_it_says(real: Cluster) -> None:
    """It draws from int8 weights; the coordinator draws each token again."""
    own = SpeculationSettings(drafter=OWN, num_draft_tokens=3)
    rivers = request("Name three rivers.", 32, SamplingParams(0.7), own)
    narrow = SamplingParams(0.8, top_k=20, top_p=0.9)
    with real.client() as client:
        drafted = client.generate(rivers)
        plain = client.generate(replace(rivers, speculation=SpeculationSettings(off=True)))
        block = client.generate(replace(rivers, sampling=narrow, acceptance=Acceptance.BLOCK))
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_accepted_draft_tokens > 2
    assert block.stats.num_draft_tokens > 20
    assert "mistake" not in real.processes["coordinator"].log_tail(1_000_000)


@pytest.mark.full
@pytest.mark.parametrize("prompt", JSON_PROMPTS)
def test_json_of_many_texts_parses(real: Cluster, prompt: str) -> None:
    check_json(real, prompt, None, *range(8))


@pytest.mark.full
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_whole_matrix(real: Cluster, prompt: str, k: int) -> None:
    check(real, prompt, 128, k)
