"""A target that is busy for longer than its coordinator's patience is waited for; one that owes a verdict is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from paceline.client import Client
from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.generation import GenerateRequest
from tests.chaos.blows import Aim, Blow
from tests.chaos.lies import without_verdicts
from tests.chaos.states import State
from tests.chaos.trigger import Armed, Trigger, proxy_before
from tests.e2e.cluster import Cluster

PATIENCE_MS = 700.0
STEP_MS = 950
CHUNK = 16
PROMPTS = tuple(tuple(range(first, first + CHUNK + 4)) for first in (1, 30))
"""Of no common prefix: the second waits for room, and nothing else."""
SHORT = GenerateRequest(token_ids=(1, 2), max_new_tokens=1)


@pytest.fixture(scope="module")
def trigger() -> Trigger:
    return Trigger()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, trigger: Trigger) -> Iterator[Cluster]:
    """A step takes longer than the target may say nothing; what is armed falls on what it says."""
    cluster = Cluster(
        tmp_path_factory.mktemp("busy"),
        target_model=f"table:vocab=64,seed=1,step_ms={STEP_MS}",
        drafters=(),
        target_flags={"engine.prefill_chunk": CHUNK, "engine.max_num_seqs": 1},
        coordinator_flags={"round_timeout_ms": PATIENCE_MS, "target_wait_ms": 0.0},
    )
    with proxy_before("target", "target", ("127.0.0.1", cluster.ports["target"]), trigger) as proxy:
        cluster.target_proxy = proxy.address
        with cluster:
            yield cluster


@pytest.mark.full
async def test_long_steps_chunks_and_a_queue_are_waited_for(busy: Cluster) -> None:
    """A prompt takes two steps, and one request waits for another."""
    async with busy.async_client(resume_wait_s=0) as client:
        generations = await asyncio.gather(
            *(client.generate(GenerateRequest(token_ids=prompt, max_new_tokens=1)) for prompt in PROMPTS)
        )
    assert [len(generation.token_ids) for generation in generations] == [1, 1]
    assert busy.status("target").steps == 2 * len(PROMPTS), "nothing was begun anew"


def test_a_verdict_that_a_living_target_withholds_ends_the_request_and_holds_nothing(
    busy: Cluster, trigger: Trigger
) -> None:
    withholds = threading.Event()
    withholds.set()

    def told(message: bytes) -> bytes:
        return without_verdicts(message) if withholds.is_set() else message

    armed = Armed(frozenset({"target"}), State.PREFILL, 0, lambda label: Aim(Blow.LIE, seconds=600, lie=told))
    with Client(busy.reach("coordinator"), timeout_s=30, resume_wait_s=0) as client:
        trigger.arm(armed)
        with pytest.raises(PeerUnavailable, match=r"target at .* is not at work on the session") as caught:
            client.generate(SHORT)
        assert armed.has_fallen
        facts = caught.value.metadata
        assert (facts["peer"], facts["base_length"]) == ("target", str(len(SHORT.token_ids) - 1))
        assert int(facts["session"]) >= 1
        assert PATIENCE_MS / 1e3 <= float(facts["unanswered_s"]) < 20, "a bound, though the link shows life"
        busy.wait_idle()
        withholds.clear()
        assert len(client.generate(SHORT).token_ids) == 1, "over the same link"
