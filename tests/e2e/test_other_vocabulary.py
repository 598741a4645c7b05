"""A draft model of another tokenizer behind real services: the text is the target's own, under every rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster, cluster_fixture
from tests.e2e.statistics import LEVEL
from tests.e2e.test_distribution import SAMPLING, TARGET, p_value, request, sample
from tests.engine.tiny import llama, random_model
from tests.engine.vocabulary.tokenizers_of_two import draft_tokenizer, target_tokenizer

BYTES = "table:vocab=300,seed=9,contexts=101,sharpness=1.0"
"""A draft that has the target's three letters among its bytes, with ids of its own."""
NO_LETTERS = "table:vocab=257,eos=97"
"""One that lacks the first of them."""
THREADS: dict[str, object] = {"engine.threads": 1}


in_bytes = cluster_fixture(TARGET, BYTES, NO_LETTERS, draft_flags={"target_model": TARGET})


@pytest.fixture(autouse=True, scope="module")
def _honest(in_bytes: Cluster) -> Iterator[None]:
    yield
    assert "mistake" not in in_bytes.processes["coordinator"].log_tail(1_000_000), "of an honest draft"


@pytest.mark.parametrize(
    ("acceptance", "drafter"),
    [
        (Acceptance.REJECTION, "model"),
        pytest.param(Acceptance.REJECTION, f"model:{NO_LETTERS}", id="lacks one", marks=pytest.mark.full),
        pytest.param(Acceptance.BLOCK, "model", marks=pytest.mark.full),
        pytest.param(Acceptance.COUPLED, "model", marks=pytest.mark.full),
    ],
)
async def test_text_has_the_targets_distribution(in_bytes: Cluster, acceptance: Acceptance, drafter: str) -> None:
    speculation = SpeculationSettings(drafter=drafter, num_draft_tokens=1)
    async with in_bytes.async_client() as client:
        texts = await sample(
            client, partial(request, sampling=SAMPLING, acceptance=acceptance, speculation=speculation), 400
        )
    assert p_value(texts, SAMPLING) > LEVEL


def test_coupled_text_is_target_onlys(in_bytes: Cluster) -> None:
    accepted = compare(in_bytes, SpeculationSettings(drafter="model", num_draft_tokens=4), "abcabba")
    assert accepted > 10, "its rows are read in the target's ids"


def compare(cluster: Cluster, speculation: SpeculationSettings, prompt: str) -> int:
    """Some texts with and without drafts; returns how many drafted tokens were accepted."""
    accepted = 0
    with cluster.client() as client:
        for seed in range(4):
            asked = GenerateRequest(
                prompt=prompt, seed=seed, sampling=SamplingParams(temperature=1.0), max_new_tokens=48
            )
            plain = client.generate(replace(asked, speculation=SpeculationSettings(off=True)))
            drafted = client.generate(replace(asked, speculation=speculation))
            assert drafted.token_ids == plain.token_ids
            accepted += drafted.stats.num_accepted_draft_tokens
    return accepted


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two tiny models, all but uniform, so that the noise that they share lets them agree now and then."""
    folders = {}
    for name, tokenizer in (("target", target_tokenizer()), ("draft", draft_tokenizer())):
        folders[name] = tmp_path_factory.mktemp(name)
        random_model(llama(vocab_size=len(tokenizer), initializer_range=0.05)).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    with Cluster(
        tmp_path_factory.mktemp("tokenized"),
        target_model=str(folders["target"]),
        drafters=(f"model:{folders['draft']}",),
        target_flags=THREADS,
        draft_flags=THREADS | {"target_model": str(folders["target"])},
        coordinator_flags={"draft_timeout_ms": 5000.0},
    ) as running:
        yield running


@pytest.mark.full
def test_coupled_text_of_two_tokenizers_is_target_onlys(tokenized: Cluster) -> None:
    for speculation in (
        SpeculationSettings(num_draft_tokens=4),
        SpeculationSettings(num_draft_tokens=3, tree_widths=(4, 2, 1)),
    ):
        assert compare(tokenized, speculation, "the quick brown fox jumps over 漢字\n") > 10
    assert "tokens in common, of its own 310 and" in tokenized.processes["draft"].log_tail(1_000_000)
