"""D2: draft services that answer wrongly."""

from __future__ import annotations

from pathlib import Path

from paceline.local.service_process import Flags
from paceline.protocol.proposal import Acceptance
from tests.attacks.registry import attack
from tests.e2e import test_wrong_draft as wrong
from tests.e2e.cluster import Cluster

ANSWERS = (
    wrong.out_of_range,
    wrong.too_long,
    wrong.with_supports,
    wrong.under_a_long_name,
    wrong.as_large_as_a_frame,
    wrong.for_another_outcome,
    wrong.never,
)
PREPARED = (wrong.for_a_token_beyond, wrong.behind_a_node_beyond, wrong.too_wide_ahead)


@attack("D2", "a draft service that sends supports, tokens, nodes, names and frames that may not be")
async def wrong_drafts(folder: Path) -> str:
    """The text is target-only's."""
    kinds = [*((answer, wrong.for_nothing) for answer in ANSWERS), *((wrong.never, prepare) for prepare in PREPARED)]
    for place, (answer, prepare) in enumerate(kinds):
        async with wrong.serving(answer, prepare) as address:
            flags: Flags = {"draft.address": address, "draft_timeout_ms": 50.0}
            with Cluster(folder / str(place), wrong.TIMED, (), coordinator_flags=flags) as services:
                async with services.async_client() as client:
                    plain, drafted = [
                        (await client.generate(wrong.request(Acceptance.COUPLED, off=off))).token_ids
                        for off in (True, False)
                    ]
        name = answer.__name__ if prepare is wrong.for_nothing else prepare.__name__
        assert drafted == plain, f"{name} changed the text"
    return f"{len(kinds)} of {len(kinds)} kinds changed no token"
