"""Under rejection and block acceptance the text has the target's distribution, whatever reads its hidden states."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from draft_service.drafters.model import ModelDrafter
from paceline.engine.decoder import build_engine
from paceline.engine.features import FeatureEngine
from paceline.formats.kinds import kind_of, load_kind
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import EngineSettings
from tests.e2e.statistics import LEVEL, Tokens, chi_square_p
from tests.e2e.test_features import coordinator
from tests.e2e.test_mtp_and_blocks import NAME, _block, _mtp
from tests.engine import tiny
from tests.formats import eagle_files
from tests.heads.lookahead_files import own_tensors, write
from tests.models.saving import save_with_tokenizer
from tests.services.harness import draft_service, target_service

SETTINGS = EngineSettings(threads=1, device="cpu", kv_bytes=1 << 24)
PROMPT = tuple(range(1, 12))
LENGTH, CHOICES, SAMPLES, AT_ONCE = 4, 3, 600, 4
SAMPLING = SamplingParams(temperature=1.2, top_k=CHOICES)


def _eagle(folder: Path, *, third: bool) -> FeatureEngine:
    tensors = eagle_files.eagle3_tensors() if third else eagle_files.eagle1_tensors()
    changes = {"draft_vocab_size": len(eagle_files.DRAFT_IDS)} if third else {}
    draft = eagle_files.write_draft(folder / "draft", {**eagle_files.LLAMA, **changes}, tensors)
    kind = kind_of(draft)
    assert kind is not None
    return kind.load(draft, eagle_files.write_target(folder / "target"), SETTINGS)


def _medusa(folder: Path) -> FeatureEngine:
    save_with_tokenizer(tiny.random_model(eagle_files.target_config(), seed=7), folder / "target")
    heads = write(folder / "heads", own_tensors(outputs=False), "medusa_lm_head.pt")
    kind = kind_of(heads)
    assert kind is not None
    return load_kind(kind, heads, str(folder / "target"), SETTINGS)


DRAFTERS: dict[str, Callable[[Path], FeatureEngine]] = {
    "eagle1": lambda folder: _eagle(folder, third=False),
    "eagle3": lambda folder: _eagle(folder, third=True),
    "medusa": _medusa,
    "mtp": _mtp,
    "block": _block,
}


def enumerate_texts(temperature: float) -> dict[Tokens, float]:
    """The chance of every text, as transformers computes it."""
    model = tiny.random_model(eagle_files.target_config(), seed=7)
    texts: dict[Tokens, float] = {(): 1.0}
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
        best, ids = (logits / temperature).topk(CHOICES)
        chances = best.softmax(-1)
        texts = {
            (*text, int(ids[row, place])): chance * float(chances[row, place])
            for (row, (text, chance)), place in itertools.product(enumerate(texts.items()), range(CHOICES))
        }
    return texts


async def _sampled(engine: FeatureEngine, acceptance: Acceptance) -> Sequence[Tokens]:
    speculation = SpeculationSettings(drafter="model", num_draft_tokens=2)
    target = build_engine(
        tiny.random_model(eagle_files.target_config(), seed=7), load_tokenizer(NAME), SETTINGS, "tiny"
    )
    slots = asyncio.Semaphore(AT_ONCE)
    async with (
        target_service(target) as (_, target_address),
        draft_service(engine, drafter=ModelDrafter(engine, prefill_chunk=16)) as (_, draft_address),
        coordinator(target_address, draft_address, model=NAME) as client,
    ):

        async def one(seed: int) -> tuple[Tokens, int]:
            async with slots:
                made = GenerateRequest(
                    token_ids=PROMPT,
                    seed=seed,
                    max_new_tokens=LENGTH,
                    ignore_eos=True,
                    sampling=SAMPLING,
                    acceptance=acceptance,
                    speculation=speculation,
                )
                found = await client.generate(made)
                return found.token_ids, sum(record.proposed for record in found.stats.records)

        drawn = await asyncio.gather(*(one(seed) for seed in range(SAMPLES)))
    assert sum(proposed for _, proposed in drawn) > SAMPLES / 2, "what is not proposed shows nothing"
    return [tokens for tokens, _ in drawn]


@pytest.mark.full
@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_the_text_has_the_distribution_that_transformers_computes(
    drafter: str, acceptance: Acceptance, tmp_path: Path
) -> None:
    texts = await _sampled(DRAFTERS[drafter](tmp_path), acceptance)
    assert chi_square_p(texts, enumerate_texts(SAMPLING.temperature)) > LEVEL
    assert chi_square_p(texts, enumerate_texts(0.3)) < LEVEL, "the samples suffice to tell another distribution"
