"""What a coordinator tells clients of its peers, over real services that are lost and come back."""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.client import PeerDescription, PeerKind, Provenance, SpeculationSettings, Tokens
from tests.e2e.cluster import Cluster, eventually

TIMED = "table:vocab=64,seed=1,step_ms=10"
"""So slow that a text is still being made when the coordinator is asked."""
DRAFTED = SpeculationSettings(drafter="model", num_draft_tokens=3)


def test_peers_and_their_links_are_described(tmp_path: Path) -> None:
    with Cluster(tmp_path, target_model=TIMED) as cluster, cluster.client() as client:

        def peers() -> dict[PeerKind, PeerDescription]:
            (model,) = client.describe_models()
            assert [peer.kind for peer in model.peers] == [PeerKind.TARGET, PeerKind.DRAFT]
            return {peer.kind: peer for peer in model.peers}

        stream = client.stream(token_ids=(1, 2, 3), max_new_tokens=80, seed=5, speculation=DRAFTED)
        with contextlib.closing(stream):  # type: ignore[type-var]  # a generator
            next(event for event in stream if isinstance(event, Tokens))
            assert peers()[PeerKind.TARGET].sessions == 1
            eventually(lambda: peers()[PeerKind.TARGET].step_sessions == 1, "the target's steps are told")
            replaced = [event for event in stream if isinstance(event, Tokens) and event.replaced_token_ids]
        target, draft = peers().values()
        assert target.address == f"127.0.0.1:{cluster.ports['target']}"
        assert (target.up, target.problem, draft.up, draft.problem) == (True, "", True, "")
        assert target.fingerprint.model.startswith("table:vocab=64,seed=1")
        assert target.step_ms > 5
        assert all(
            len(event.replaced_token_ids) == event.provenance.count(Provenance.RECOVERED) for event in replaced
        )
        assert replaced, "drafts of another model are not all accepted"
        cluster.kill("draft")
        eventually(lambda: not peers()[PeerKind.DRAFT].up, "the lost link is told")
        assert "no link to draft at 127.0.0.1" in peers()[PeerKind.DRAFT].problem
        cluster.restart("draft")
        eventually(lambda: peers()[PeerKind.DRAFT].up, "the link is back")
