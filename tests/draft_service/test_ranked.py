"""A drafter whose engine ranks tokens itself proposes what it would have read from the logits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draft_service.drafters.model import ModelDrafter
from paceline.engine.decoder import build_engine
from paceline.engine.interface import Engine, Logits, RankedRows, Ranking, RankingEngine, StepPlan
from paceline.engine.wrapped import WrappedEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import EngineSettings
from tests.draft_service.driving import Driver, FreeRows
from tests.engine import tiny

BUDGET = DraftBudget(max_tokens=4, max_nodes=12, fan_out=3)
CASES = [
    (Acceptance.COUPLED, SamplingParams(temperature=0.9), True),
    (Acceptance.COUPLED, SamplingParams(temperature=0.0), True),
    (Acceptance.COUPLED, SamplingParams(temperature=0.9, logprobs=2), True),
    (Acceptance.COUPLED, SamplingParams(temperature=0.9, top_k=5), False),
    (Acceptance.COUPLED, SamplingParams(temperature=0.9, presence_penalty=0.5), False),
    (Acceptance.REJECTION, SamplingParams(temperature=0.9), False),
]


class Counting(WrappedEngine):
    """Notes how often tokens are ranked, and how often logits are wanted."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.ranked = self.read = 0

    def step_and_rank(self, plan: StepPlan, rankings: Sequence[Ranking | None]) -> Sequence[Logits | RankedRows]:
        assert isinstance(self._inner, RankingEngine)
        for item, ranking in zip(plan.items, rankings, strict=True):
            self.ranked += ranking is not None
            self.read += ranking is None and bool(item.logit_rows)
        return self._inner.step_and_rank(plan, rankings)


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = tiny.random_model(tiny.llama())
    settings = EngineSettings(threads=1, kv_bytes=1 << 22)
    return build_engine(model, TableTokenizer(tiny.VOCAB, None), settings, "tiny", static=True)


def proposals(engine: Engine, acceptance: Acceptance, sampling: SamplingParams) -> list[Proposal]:
    """Of a draft, of all that was prepared while it was verified, and of what follows a commit."""
    budget = BUDGET if acceptance is Acceptance.COUPLED else DraftBudget(max_tokens=4, fan_out=3)
    driver = Driver(ModelDrafter(engine, 16, meters=FreeRows()), acceptance, sampling)
    proposals = [driver.speculate(budget), *driver.prepared.values()]
    driver.commit((0, 50))
    proposals.append(driver.draft(budget))
    driver.drafter.close(driver.session)
    return proposals


@pytest.mark.parametrize(("acceptance", "sampling", "on_device"), CASES)
def test_ranked_drafts_are_those_of_logits(
    engine: Engine, acceptance: Acceptance, sampling: SamplingParams, on_device: bool
) -> None:
    counting = Counting(engine)
    mine = proposals(counting, acceptance, sampling)
    theirs = proposals(WrappedEngine(engine), acceptance, sampling)
    assert (counting.ranked > 0, counting.read == 0) == (on_device, on_device)
    assert [(each.token_ids, each.parents) for each in mine] == [(each.token_ids, each.parents) for each in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.draft_probabilities == pytest.approx(other.draft_probabilities, rel=1e-4)
