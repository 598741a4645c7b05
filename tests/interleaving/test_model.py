"""The state model of the link protocol: every state of small configurations, and the mistakes that it must find."""

from __future__ import annotations

import logging
import re
from collections import Counter

import pytest

from tests.interleaving.link_model import Bounds, LinkModel
from tests.interleaving.modelled_draft import SureDraft
from tests.interleaving.mutants import MODELLED, PAIRED, ModelMutant, PairedMutant
from tests.interleaving.searching import Violated, search
from tests.interleaving.walking import follow, traces

logger = logging.getLogger(__name__)

SMALL = (
    Bounds(tokens=3, lease=1, faults=1),
    Bounds(tokens=4, lease=2, faults=0),
    Bounds(tokens=5, lease=3, faults=1, drafts=False),
    Bounds(tokens=4, lease=2, faults=1, at_once=True),
    Bounds(tokens=3, lease=1, faults=1, changes=1, at_once=True),
)
LARGE = (
    Bounds(tokens=4, lease=2, faults=1),
    Bounds(tokens=5, lease=2, faults=1, at_once=True),
    Bounds(tokens=4, lease=2, faults=2, changes=1, at_once=True),
    Bounds(tokens=7, lease=4, faults=2, drafts=False),
)
EVERY = 25
"""In continuous integration the product follows each so many of the ways."""


@pytest.mark.parametrize(
    "bounds",
    [*SMALL, *(pytest.param(each, marks=[pytest.mark.full, pytest.mark.timeout(900)]) for each in LARGE)],
    ids=str,
)
def test_every_state_of_the_model_holds_and_ends(bounds: Bounds) -> None:
    found = search(LinkModel(bounds))
    logger.info("%d states, %d steps, %d final states: %s", found.states, found.steps, found.final, bounds)
    assert found.final


@pytest.mark.parametrize("mutant", MODELLED, ids=lambda mutant: mutant.name)
def test_the_search_finds_a_mistake(mutant: ModelMutant) -> None:
    with pytest.raises(Violated, match=mutant.shows):
        search(mutant.model(mutant.bounds))


@pytest.mark.parametrize("mutant", PAIRED, ids=lambda mutant: mutant.name)
def test_the_way_to_a_mistake_in_the_model_shows_it_in_the_product(mutant: PairedMutant) -> None:
    with pytest.raises(Violated, match=mutant.model_shows) as found:
        search(mutant.model(mutant.bounds))
    trace = found.value.trace
    follow(mutant.bounds, trace)
    with mutant.patch(), pytest.raises(AssertionError) as failed:
        follow(mutant.bounds, trace)
    assert re.search(mutant.product_shows, str(failed.value))


@pytest.mark.parametrize(
    "every", [EVERY, pytest.param(1, marks=[pytest.mark.full, pytest.mark.timeout(900)])], ids=["some", "all"]
)
def test_the_product_goes_the_models_ways(every: int) -> None:
    bounds = Bounds(tokens=4, lease=2, faults=1, at_once=True)
    ways = traces(LinkModel(bounds, draft=SureDraft))
    counts = Counter[str]()
    for way in ways[::every]:
        counts += follow(bounds, way).counts
    logger.info("%d of %d ways: %s", len(ways[::every]), len(ways), dict(counts))
    assert min(counts[kind] for kind in ("leases", "self-started rounds", "opened in mid-text", "prefetch", "commit"))
