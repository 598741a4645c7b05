"""What the schedules run on, by name."""

from __future__ import annotations

from paceline.protocol.proposal import Acceptance
from tests.interleaving.deployment import READING
from tests.interleaving.schedules import Setup

SETUPS = {
    setup.name: setup
    for setup in (
        Setup("one of each"),
        Setup("fixed lengths", num_draft_tokens=2, drafts=2, tokens=12, penalties=True),
        Setup("drafters change", drafter="auto", drafts=2),
        Setup("target alone", num_draft_tokens=0, targets=2, tokens=12, penalties=True),
        Setup("pools", targets=2, drafts=2, requests=2, penalties=True),
        Setup("features", drafter=READING, targets=2, drafts=2),
        Setup("matches", drafter="ngram", tokens=12),
        Setup("rejection", acceptance=Acceptance.REJECTION, drafts=2),
        Setup("block", acceptance=Acceptance.BLOCK, targets=2, num_draft_tokens=2),
        Setup("no room to draft", capacity=0, requests=2, drafts=2, draft_rooms=1),
        Setup("no room to verify", requests=3, target_rooms=1),
        Setup("fixed lengths in pools", drafter="auto", targets=2, drafts=2, requests=2, num_draft_tokens=3),
    )
}
