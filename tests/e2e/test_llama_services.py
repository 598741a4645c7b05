"""llama.cpp as target and as draft, each by itself, through all three services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.drafters.model import ModelDrafter
from paceline.client import AsyncClient, Generation
from paceline.engine.interface import Engine
from paceline.engine.loading import load_engine
from paceline.models.resolve import kept_gguf
from paceline.protocol.generation import ChatMessage, GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import EngineSettings
from paceline_lab.bench.peers.install import peers_home
from paceline_lab.bench.peers.models import gguf_of
from tests.e2e.cluster import Cluster, full
from tests.e2e.in_process import three_services
from tests.e2e.streams import output_of, stream
from tests.e2e.test_coupled_identity import TARGET_ONLY, random_speculation
from tests.e2e.test_real_model import PROMPTS
from tests.engine.llama_engines import llama, tiny_file
from tests.models import gguf_files

SAMPLINGS = (SamplingParams(temperature=0), SamplingParams(temperature=0.8))
SMOLLM2 = "smollm2-135m"


def near_file(folder: Path) -> Path:
    """A model whose last layer differs a little."""
    shape = (gguf_files.HIDDEN, gguf_files.INNER)
    weight = gguf_files.values("blk.1.ffn_down.weight", shape)
    noise = gguf_files.values("noise", shape)
    return gguf_files.write(folder / "near.gguf", tensors={"blk.1.ffn_down.weight": weight + noise / 2})


@asynccontextmanager
async def services(target: Engine, draft: Engine, model: Path | str) -> AsyncIterator[AsyncClient]:
    async with three_services(target, ModelDrafter(draft, 128, "model"), model=str(model)) as client:
        yield client


@pytest.mark.parametrize(
    ("target", "draft"),
    [("llama", "llama"), full("llama", "torch"), full("torch", "llama")],
)
async def test_any_speculation_writes_the_target_only_text(tmp_path: Path, target: str, draft: str) -> None:
    exact = EngineSettings(engine="torch", threads=1, reproducible=True)
    target_engine = llama(reproducible=True) if target == "llama" else load_engine(str(tiny_file()), exact)
    near = near_file(tmp_path)
    draft_engine = llama(near) if draft == "llama" else load_engine(str(near), EngineSettings(threads=1))
    rng = np.random.default_rng(11)
    async with services(target_engine, draft_engine, tiny_file()) as client:
        for sampling, prompt in product(SAMPLINGS, ((5, 6, 7), tuple(range(5, 45)))):
            request = partial(GenerateRequest, token_ids=prompt, sampling=sampling, seed=17, max_new_tokens=32)
            text = await client.generate(request(speculation=TARGET_ONLY))
            settings = [random_speculation(rng) for _ in range(4)]
            drafted = await asyncio.gather(*(client.generate(request(speculation=each)) for each in settings))
            for each, generation in zip(settings, drafted, strict=True):
                assert output_of(generation) == output_of(text), each
            assert any(Provenance.ACCEPTED in generation.provenance for generation in drafted)


PROMPT_COUNT, KILL_EVERY = 100, 20
MEASURED_S = 300.0
"""A start, the first of which measures what a row's bits depend on."""
BY_LLAMA: dict[str, Any] = {"engine.engine": "llama", "engine.max_model_len": 512}
BY_TORCH: dict[str, Any] = {"engine.dtype": "fast", "engine.max_model_len": 512}
BY_DRAFT = SpeculationSettings(drafter="model", num_draft_tokens=4)


@dataclass(frozen=True)
class Files:
    """A target and its draft; `tokens`: of each of its texts."""

    target: Path
    draft: str
    draft_flags: dict[str, Any]
    tokens: int


@dataclass(frozen=True)
class Served:
    cluster: Cluster
    tokens: int


def files_of(kind: str, folder: Path) -> Files | None:
    """None: they aren't here."""
    if kind == "qwen q4_k_m":
        models = peers_home() / "models"
        target, draft = (models / f"qwen2.5-coder-{size}-q4_k_m.gguf" for size in ("1.5b", "0.5b"))
        return Files(target, str(draft), BY_LLAMA, 16) if target.is_file() and draft.is_file() else None
    published = kept_gguf(SMOLLM2)
    if not published.is_file():
        return None
    if kind == "smollm2 q4_1":
        return Files(published, SMOLLM2, BY_TORCH, 24)
    return Files(gguf_of(published.name, "q8_0", folder), published.name, BY_LLAMA, 24)


@pytest.fixture(scope="module", params=["smollm2 q4_1", "smollm2 q8_0", "qwen q4_k_m"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The target in a format, reproducible, by two threads; its draft is torch's, another format or another model."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    files = files_of(request.param, folder)
    if files is None:
        pytest.skip(f"paceline pull {SMOLLM2} --keep-gguf, or paceline bench peers --gguf q4_k_m")
    with Cluster(
        folder,
        target_model=str(files.target),
        drafters=(f"model:{files.draft}",),
        target_flags=BY_LLAMA | {"engine.threads": 2, "engine.reproducible": True},
        draft_flags=files.draft_flags | {"engine.threads": 1, "target_model": str(files.target)},
        coordinator_flags={"draft_timeout_ms": 5000.0, "target_wait_ms": 120_000.0},
        start_s=MEASURED_S,
    ) as running:
        yield Served(running, files.tokens)


async def text_of_a_killed_draft(served: Served, client: AsyncClient, request: GenerateRequest) -> Generation:
    """A text whose draft is killed in its midst, and is back behind it."""
    cluster, killed_at = served.cluster, served.tokens // 2
    drafted = await stream(client, request, (killed_at, lambda: cluster.kill("draft")))
    assert Provenance.ACCEPTED in drafted.provenance[:killed_at], "the draft was at work"
    await asyncio.to_thread(cluster.restart, "draft")
    await asyncio.to_thread(cluster.await_links)
    return drafted


@pytest.mark.full
@pytest.mark.real_model
@pytest.mark.timeout(7200)
async def test_the_real_models_text_is_its_own_on_a_hundred_prompts(served: Served) -> None:
    rng = np.random.default_rng(3)
    async with served.cluster.async_client() as client:
        for number, sampling in product(range(PROMPT_COUNT), SAMPLINGS):
            prompt = f"{PROMPTS[number % len(PROMPTS)]} ({number})"
            request = partial(
                GenerateRequest, messages=(ChatMessage("user", prompt),), sampling=sampling, seed=number,
                max_new_tokens=served.tokens, ignore_eos=True,
            )  # fmt: skip
            text = await client.generate(request(speculation=TARGET_ONLY))
            if number % KILL_EVERY == KILL_EVERY - 1:
                drafted = await text_of_a_killed_draft(served, client, request(speculation=BY_DRAFT))
            else:
                drafted = await client.generate(request(speculation=random_speculation(rng)))
            assert output_of(drafted) == output_of(text), (number, sampling)
