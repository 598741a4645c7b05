"""A prediction names every round of a served request."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from paceline.client import Client
from paceline.engine.table.engine import load_table
from paceline.local.settings import local_settings
from paceline.local.supervisor import SupervisedServices
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from paceline_lab.predict.positions_cache import PositionsCache
from paceline_lab.predict.reading import EnginePasses, read_texts
from paceline_lab.predict.rounds import ProposalShape, expected_rounds
from paceline_lab.predict.sample import SampleOptions, texts_at
from paceline_training.user_data import UserData
from tests.lab.fakes import prompt


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_predicted_ranks_name_every_round_that_is_served(tmp_path: Path, temperature: float) -> None:
    """Prediction with the request's own seed: each round's accepted tokens, not their mean alone."""
    target = "table:vocab=300,seed=1,sharpness=6,max_length=400"
    draft = "table:vocab=300,seed=1,sharpness=6,noise=0.2,noise_seed=2,max_length=400"
    k, tokens = 3, 160
    asked = prompt("hello")
    settings = local_settings(target, f"model:{draft}")
    with (
        SupervisedServices(settings, tmp_path / "services", coordinator={"fan_out": 0}) as services,
        Client(services.address) as client,
    ):
        stats = client.generate(
            messages=asked.chats[0],
            sampling=SamplingParams(temperature=temperature).with_defaults(),
            seed=7,
            max_new_tokens=tokens,
            speculation=SpeculationSettings(drafter="model", num_draft_tokens=k),
        ).stats
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
    committed = [record.accepted + 1 for record in stats.records[1:]]
    noise = statistics.stdev(committed) / len(committed) ** 0.5
    expected = expected_rounds([read[0].drafters["d"]], ProposalShape(k))
    assert abs(statistics.fmean(committed) - expected.tokens) < 5 * noise
