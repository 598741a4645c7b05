"""Services of recurrent layers, or of an index: any speculation, any failure, one text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.local.service_process import Flags
from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from tests.chaos.proxy import Proxy
from tests.e2e.cluster import Cluster, full
from tests.e2e.streams import output_of, stream
from tests.engine import test_families, tiny
from tests.engine.families import Family, named
from tests.engine.test_families import sampled
from tests.engine.test_states import SPECS, TOKENS, longer
from tests.models.saving import save_with_tokenizer

FAMILIES = (
    *("LFM 2", "Qwen 3 Next", "Falcon-H1", "DeepSeek-V3.2"),
    *("GLM-5", "Kimi Linear", "Nemotron-H", "Mamba 2", "Mamba", "Jamba"),
)
"""One of each kind of layer, alone and beside attention; the first takes the least time."""
PROMPT = test_families.PROMPT * 8
"""Whole blocks, and some rows."""
NOISE = 0.02
"""Of the draft's weights: it is right now and then."""
STRUCK_AT = 20
OFF = SpeculationSettings(off=True)
SPECULATIONS = (
    SpeculationSettings(drafter="model", num_draft_tokens=1),
    SpeculationSettings(drafter="model", num_draft_tokens=5),
    SpeculationSettings(drafter="model", num_draft_tokens=3, tree_widths=(3, 2)),
    SpeculationSettings(drafter="model", num_draft_tokens=8, tree_widths=(2, 2, 2)),
    SpeculationSettings(drafter="ngram", num_draft_tokens=4),
    SpeculationSettings(drafter="model"),
    SpeculationSettings(),
    OFF,
)
request = partial(GenerateRequest, token_ids=PROMPT, seed=11, max_new_tokens=TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Served:
    """Services whose coordinator reaches the target through what may be cut."""

    family: Family
    cluster: Cluster
    proxy: Proxy


def save_pair(family: Family, folder: Path) -> tuple[str, str]:
    """A target, and a draft whose weights are off."""
    target, draft = folder / "target", folder / "draft"
    model = tiny.random_model(family.config())
    save_with_tokenizer(model, target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=NOISE)
    save_with_tokenizer(model, draft)
    return str(target), str(draft)


served = pytest.mark.parametrize("recurrent", [FAMILIES[0], *map(full, FAMILIES[1:])], indirect=True, scope="module")


@pytest.fixture(scope="module")
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, folder = longer(named(request.param)), tmp_path_factory.mktemp("recurrent")
    target, draft = save_pair(family, folder)
    flags: Flags = {"engine.threads": 1, "engine.kv_bytes": 1 << 26}
    cluster = Cluster(folder, target, (f"model:{draft}",), target_flags=flags, draft_flags=flags)
    with Proxy(("127.0.0.1", cluster.ports["target"])) as proxy:
        cluster.target_proxy = proxy.address
        with cluster:
            yield Served(family, cluster, proxy)


@served
@pytest.mark.parametrize("temperature", [full(0.0), 0.8])
async def test_any_speculation_writes_the_text_of_forward_passes(recurrent: Served, temperature: float) -> None:
    """One request after another, then eight at once, whose prompts are one prefix."""
    cluster = recurrent.cluster
    asked = partial(request, sampling=SamplingParams(temperature=temperature))
    async with cluster.async_client() as client:
        plain = await client.generate(asked(speculation=OFF))
        one_by_one = [await client.generate(asked(speculation=each)) for each in SPECULATIONS[1:3]]
        at_once = await asyncio.gather(*(client.generate(asked(speculation=each)) for each in SPECULATIONS))
    for each in (*one_by_one, *at_once):
        assert output_of(each) == output_of(plain)
    assert any(Provenance.ACCEPTED in each.provenance for each in (*one_by_one, *at_once))
    spec = SPECS["T 0.8" if temperature else "greedy"]
    whole = sampled(tiny.Plain(tiny.random_model(recurrent.family.config())), spec, len(PROMPT) + TOKENS, PROMPT)
    assert (*PROMPT, *plain.token_ids) == tuple(whole)
    cluster.wait_idle()


@served
async def test_sessions_lost_in_mid_round_go_on(recurrent: Served) -> None:
    """The link to the target is cut twice, the draft is killed: states are rebuilt from the text."""
    cluster, proxy = recurrent.cluster, recurrent.proxy
    asked = partial(request, speculation=SPECULATIONS[1], sampling=SamplingParams(temperature=0.8))
    blows = ((STRUCK_AT, proxy.cut), (2 * STRUCK_AT, proxy.cut), (50, lambda: cluster.kill("draft")))
    async with cluster.async_client() as client:
        plain = await client.generate(asked(speculation=OFF))
        text, beside = await asyncio.gather(stream(client, asked(), *blows), client.generate(asked()))
        assert text.token_ids == beside.token_ids == plain.token_ids
        await asyncio.to_thread(cluster.restart, "draft")
        await asyncio.to_thread(cluster.await_links)
        assert (await client.generate(asked())).token_ids == plain.token_ids
    cluster.wait_idle()
