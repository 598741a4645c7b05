"""Places that tenants share: whoever floods leaves room for those who come later."""

from __future__ import annotations

import random

import pytest

from paceline.access import places as module
from paceline.access.places import SHARE_OF_FREE, Places
from paceline.protocol.errors import Overloaded

MOST = 100


def flood(places: Places, tenant: str) -> int:
    """Take places until one is refused; returns how many there were."""
    taken = 0
    try:
        while True:
            places.take(tenant)
            taken += 1
    except Overloaded:
        return taken


def test_without_a_tenant_s_name_every_place_is_to_be_had() -> None:
    places = Places("max_queue", MOST, 200)
    assert flood(places, "") == MOST == len(places)
    with pytest.raises(Overloaded, match="max_queue = 100: all are taken") as caught:
        places.check("somebody")
    assert caught.value.retry_after_ms == 200
    places.give_back("")
    places.take("somebody")


def test_who_floods_leaves_a_fifth_and_is_told_why() -> None:
    places = Places("max_queue", MOST, 200)
    assert flood(places, "flood") == MOST * SHARE_OF_FREE / (SHARE_OF_FREE + 1)
    with pytest.raises(Overloaded, match="80 are the key's, and the 20 that are left are for others"):
        places.take("flood")
    assert flood(places, "other") == 16


@pytest.mark.parametrize("floods", [1, 2, 5, 20])
def test_there_is_a_place_for_whoever_comes_next_however_many_flood(floods: int) -> None:
    """Requests end in any order and each flood takes what it may at once; a newcomer comes at any time."""
    source = random.Random(floods)
    names = [f"flood {number}" for number in range(floods)]
    places = Places("max_queue", MOST, 200)
    held = {name: flood(places, name) for name in names}
    for _ in range(2000):
        ended = source.choices(names, [held[name] for name in names])[0]
        places.give_back(ended)
        held[ended] -= 1
        places.check("newcomer")
        for name in source.sample(names, floods):
            held[name] += flood(places, name)
    assert max(held.values()) - min(held.values()) <= 0.25 * max(held.values()) + 2, (
        "and all floods have about as much"
    )
    assert sum(held.values()) >= MOST * 0.79, "of what there is"


def test_a_place_that_is_given_back_is_forgotten() -> None:
    places = Places("max_queue", MOST, 200)
    with places.taken("a"):
        assert len(places) == 1
    assert len(places) == 0
    assert not places._taken


def test_the_newcomer_s_test_notices_first_come_first_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_OF_FREE", MOST)
    with pytest.raises(AssertionError):
        test_who_floods_leaves_a_fifth_and_is_told_why()
