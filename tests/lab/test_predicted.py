"""The grid's figures by hand, and a prediction that names every round of a served request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.costs.cost_line import CostLine
from paceline.engine.table.engine import load_table
from paceline.local.settings import local_settings
from paceline.local.supervisor import SupervisedServices
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.records import GenerationStats
from paceline_lab.bench.predicted.__main__ import report_text
from paceline_lab.bench.predicted.cells import GridCell, ServedRounds, summary_rows
from paceline_lab.bench.predicted.grid import (
    GridOptions,
    GridSetting,
    own_times,
    serve_grid,
    settings_of,
    stated_times,
)
from paceline_lab.bench.predicted.serving import FixedPlan, GridServices, drafter_names
from paceline_lab.plan.options import PlanOptions
from paceline_lab.predict.cycle import StepTimes
from paceline_lab.predict.positions_cache import PositionsCache
from paceline_lab.predict.reading import EnginePasses, read_texts
from paceline_lab.predict.rounds import ProposalShape, expected_rounds
from paceline_lab.predict.sample import SampleOptions, texts_at
from paceline_lab.predict.verdict import Candidates
from paceline_training.user_data import UserData
from tests.lab.fakes import prompt
from tests.lab.made_stats import stats_of


def test_rounds_behind_the_first_are_counted_the_last_as_the_end_cuts_it() -> None:
    """Rounds commit 1, 3, 2, 1 and 1 of 8 tokens."""
    found = ServedRounds.of([stats_of(0, 2, 1, 0, 0)])
    assert (found.rounds, found.tokens) == (4, 7)
    assert found.tokens_a_round == 1.75
    assert found.noise == pytest.approx((0.6875 / 4) ** 0.5)
    assert found.decode_tokens == 7 and found.decode_s == pytest.approx(0.07)
    assert found.ms_per_token == pytest.approx(10)
    cut = ServedRounds.of([replace(stats_of(0, 2, 2), committed=5)])
    assert (cut.rounds, cut.tokens, cut.squares) == (2, 4, 10)


def cell(**changes: float) -> GridCell:
    served, plain = ServedRounds(10, 20, 50, 100, 1.0), ServedRounds(10, 10, 10, 100, 2.0)
    made = GridCell("chat", 0.8, "d", "k=2", 1, 2.08, 0.05, 8.0, 9.0, 10.0, 18.0, served, plain)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_errors_by_hand() -> None:
    assert cell().tokens_off == pytest.approx(0.04)
    assert cell().unseen_speed_off == pytest.approx(10 / 8 - 1)
    assert cell().speed_off == pytest.approx(10 / 9 - 1)
    assert cell().formula_off == pytest.approx(0)
    assert cell().gain_off == pytest.approx((18 / 8) / (20 / 10) - 1)
    tokens, *_ = summary_rows([cell(), cell(predicted_tokens=1.6), cell(predicted_tokens=2.0)])
    assert tokens["median error"] == "+0.0%" and tokens["greatest"] == "-20.0%" and tokens["within"] == "2 of 3"
    assert "| chat | 0.8 | d | k=2 | 1 |" in report_text([cell()])


def test_lines_of_services_and_of_rounds_replace_those_from_before() -> None:
    times = StepTimes(CostLine(((1, 1.0),)), {"d": CostLine(((1, 1.0),))})
    stated = stated_times(times, {"alone": CostLine(((1, 7.0),)), "draft": CostLine(((1, 2.0),))})
    assert stated.target.ms(1) == 7 and stated.drafts["d"].ms(1) == 2
    stats = [stats_of(0, 2, 1, 0, 0)]
    own = own_times(times, "d", stats)
    assert own.target.ms(3) == 10 and own.drafts["d"].ms(1) == 2  # 4 ms for two tokens
    assert own.draft_trip_ms == 1


def test_requests_name_drafters_as_their_service_does() -> None:
    assert drafter_names(["a", "b"]) == {"ngram": "ngram", "a": "model", "b": "model:b"}
    asked = FixedPlan([prompt("p")], num_draft_tokens=3, drafter="model", widths=(2,)).request(0).speculation
    assert (asked.drafter, asked.num_draft_tokens, asked.tree_widths) == ("model", 3, (2,))
    assert FixedPlan([prompt("p")]).request(0).speculation.off


def test_every_setting_is_served_in_each_turn_beside_target_only(tmp_path: Path) -> None:
    prompts = [*map(prompt, "abcd")]
    plan = PlanOptions("t", SampleOptions(Path("chat"), (0.8,), 4, 8, 1), tmp_path, loads=(1, 3))
    options = GridOptions(plan, {"chat": prompts}, requests=4, tokens=8, turns=2)
    predictions = {("chat", 0.8): Candidates({"ngram": [], "d": []}, (ProposalShape(0), ProposalShape(2)))}
    settings = list(settings_of(options, predictions))
    assert len(settings) == len(set(settings)) == 2 * 3  # target-only, matches and the draft at both loads
    assert all(setting.plain in settings for setting in settings)
    services = ServedPlans()
    turns = list(serve_grid(options, services, predictions, lambda done: None))  # type: ignore[arg-type]
    assert len(turns) == 2 and len(services.plans) == 12
    assert {setting: len(run.stats) for setting, run in turns[-1].items()} == {
        setting: 2 * max(2, setting.load) for setting in settings
    }
    first, second = services.plans[:6], services.plans[6:]
    assert {each.first for each in first} == {0} and {each.first for each in second} == {2, 3}
    key = lambda each: (each.sessions, each.drafter)  # noqa: E731
    assert [*map(key, first)] != [*map(key, second)] and sorted(map(key, first)) == sorted(map(key, second))
    plain = GridSetting("chat", 0.8, 1).plan(options, {}, 1)
    assert plain.request(0).seed == 2 and plain.request(0).messages == prompts[2].chats[0]


class ServedPlans:
    """Services that note what they are asked."""

    def __init__(self) -> None:
        self.plans: list[FixedPlan] = []

    def serve(self, plan: FixedPlan) -> list[GenerationStats]:
        """As many requests as the plan has."""
        self.plans.append(plan)
        return [stats_of(1)] * plan.requests

    def lines(self) -> dict[str, CostLine]:
        """None were stated."""
        return {}


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_predicted_ranks_name_every_round_that_is_served(tmp_path: Path, temperature: float) -> None:
    """Prediction with the request's own seed: each round's accepted tokens, not their mean alone."""
    target = "table:vocab=300,seed=1,sharpness=6,max_length=400"
    draft = "table:vocab=300,seed=1,sharpness=6,noise=0.2,noise_seed=2,max_length=400"
    k, tokens = 3, 160
    asked = prompt("hello")
    with SupervisedServices(
        local_settings(target, f"model:{draft}"), tmp_path / "services", coordinator={"fan_out": 0}
    ) as services:
        plan = FixedPlan(
            [asked], requests=1, tokens=tokens, temperature=temperature, num_draft_tokens=k, drafter="model", seed=7
        )
        stats = GridServices(services.address, tmp_path).serve(plan)[0]
    tokenizer = load_tokenizer(target)
    data = UserData((), (tokenizer.render_chat(asked.chats[0]),))
    options = SampleOptions(tmp_path, (temperature,), answer_tokens=tokens, seed=7)
    texts = texts_at(options, temperature, data, EnginePasses(load_table(target), {}), tokenizer, tmp_path / "work")
    read = read_texts(
        EnginePasses(load_table(target), {"d": load_table(draft)}), texts, PositionsCache(tmp_path / "kept", {})
    )
    ranks = read[0].drafters["d"].ranks.tolist()
    at = 0
    for record in stats.records:
        right = next((depth for depth in range(record.proposed) if ranks[at + depth] != 1), record.proposed)
        assert record.accepted == right
        at += record.accepted + 1
    assert at == stats.committed == len(ranks)
    served = ServedRounds.of([stats])
    expected = expected_rounds([read[0].drafters["d"]], ProposalShape(k))
    assert abs(served.tokens_a_round - expected.tokens) < 5 * served.noise + 1e-9
