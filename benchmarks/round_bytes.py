"""Serialised bytes of a session and round on every edge: `python -m benchmarks.round_bytes`.

A coordinator in this process runs a real model and its own draft (one thread each, real vocabulary
ids) and weighs each message that it encodes or decodes, with its tag and length in the frame. Every
request carries a trace context; outcome proposals (fan-out 4) are counted, used or not. Openings and
closings are not part of a round. A column has the bytes of all messages of its kind over the rounds.
Coupled: a chain of 8, and a tree of 4 + 4 * 3 = 16 nodes; rejection and block: a chain of 8.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import REPORTS
from benchmarks.prompts import load_prompts
from benchmarks.reporting.presentation import markdown_table, titled, verdict
from benchmarks.reporting.reports import write_rows
from benchmarks.simulated.headless import Generate, SilentContext, with_coordinator
from benchmarks.simulated.services import ModelServices
from paceline.local.drafter_choice import MODEL
from paceline.local.service_process import write_config
from paceline.models.resolve import DEFAULT_DRAFT, resolve_draft
from paceline.protocol import codec
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.rpc.link_kinds import DRAFT, TARGET, LinkKind
from paceline.rpc.peer_link import DraftLink, TargetLink
from paceline.runtime.config import DEFAULT_MODEL, CoordinatorConfig, load_config
from paceline.runtime.stopping import signals_interrupt

FAN_OUT = 4
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TAG_AND_LENGTH = 3
"""Bytes of a message's tag and length in its frame; one byte less for the shortest."""
CHAIN = SpeculationSettings(drafter=MODEL, num_draft_tokens=8)
TREE = SpeculationSettings(drafter=MODEL, num_draft_tokens=2, tree_widths=(4, 3))
CASES = {
    "chain of 8, coupled": (CHAIN, Acceptance.COUPLED, 500),
    "tree of 16, coupled": (TREE, Acceptance.COUPLED, 500),
    "chain of 8, rejection": (CHAIN, Acceptance.REJECTION, 20_000),
    "chain of 8, block": (CHAIN, Acceptance.BLOCK, 20_000),
}
"""Settings, rule, and the bar in bytes."""


@dataclass(frozen=True)
class RoundBytes:
    """Mean bytes of a session and round, by message."""

    case: str
    temperature: float
    rounds: int
    round: float
    prefetch: float
    verdict: float
    commit: float
    verifying: float
    proposals: float
    proposals_per_round: float
    bar: int

    @property
    def with_target(self) -> float:
        """Round, prefetch and verdict."""
        return self.round + self.prefetch + self.verdict

    @property
    def with_draft(self) -> float:
        """Commit and verifying."""
        return self.commit + self.verifying


class Scale:
    """Weighs the messages of one coordinator's links."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def weighed(self, kind: LinkKind[Any, Any]) -> LinkKind[Any, Any]:
        """The same kind of link, whose messages are weighed as they leave and as they come."""

        def encode(command: Any) -> Any:
            message = kind.encode_command(command)
            self._note(message, message.WhichOneof("command"))
            return message

        def decode(message: Any) -> Any:
            self._note(message, message.WhichOneof("event"))
            return kind.decode_event(message)

        return replace(kind, encode_command=encode, decode_event=decode)

    def _note(self, message: Any, name: str) -> None:
        self.bytes[name] += message.ByteSize() + TAG_AND_LENGTH
        self.messages[name] += 1


async def weigh(config: CoordinatorConfig, requests: Sequence[GenerateRequest]) -> tuple[Scale, int]:
    """Run requests one after the other; returns what their messages weighed, and how many rounds they had."""
    scale = Scale()

    async def each(generate: Generate) -> int:
        contexts = [SilentContext(TRACEPARENT) for _ in requests]
        for request, context in zip(requests, contexts, strict=True):
            await generate(codec.encode_generate_request(request), context)
        return sum(context.stats.rounds for context in contexts)

    with (
        mock.patch.object(TargetLink, "kind", scale.weighed(TARGET)),
        mock.patch.object(DraftLink, "kind", scale.weighed(DRAFT)),
    ):
        rounds = await with_coordinator(config, each)
    return scale, rounds


def measure(config: CoordinatorConfig, case: str, temperature: float, asked: Sequence[GenerateRequest]) -> RoundBytes:
    """One row."""
    speculation, acceptance, bar = CASES[case]
    sampling = SamplingParams(temperature=temperature)
    requests = [
        replace(request, speculation=speculation, acceptance=acceptance, sampling=sampling, seed=number)
        for number, request in enumerate(asked)
    ]
    scale, rounds = asyncio.run(weigh(config, requests))
    names = ("round", "prefetch", "verdict", "commit", "verifying", "proposal")
    mean = {name: scale.bytes[name] / rounds for name in names}
    return RoundBytes(
        case=case,
        temperature=temperature,
        rounds=rounds,
        round=mean["round"],
        prefetch=mean["prefetch"],
        verdict=mean["verdict"],
        commit=mean["commit"],
        verifying=mean["verifying"],
        proposals=mean["proposal"],
        proposals_per_round=scale.messages["proposal"] / rounds,
        bar=bar,
    )


def table(rows: Sequence[RoundBytes]) -> str:
    """One line a case."""
    return markdown_table([titled(row, **_sums(row)) for row in rows])


def _sums(row: RoundBytes) -> dict[str, object]:
    bar = verdict(-row.with_target, -row.bar)
    return {"bar": bar, "with_target": row.with_target, "with_draft": row.with_draft}


def asked_of(kinds: Sequence[str], tokens: int) -> list[GenerateRequest]:
    """The first prompt of each kind."""
    chats = [prompts[0].chats[0] for prompts in load_prompts(kinds).values()]
    return [GenerateRequest(messages=chat, max_new_tokens=tokens, ignore_eos=True) for chat in chats]


def run(services: ModelServices, temperatures: Sequence[float], asked: Sequence[GenerateRequest]) -> list[RoundBytes]:
    """Every case at every temperature."""
    with services:
        file = services.folder / "coordinator.toml"
        write_config(CoordinatorConfig, file, services.coordinator_flags() | {"fan_out": FAN_OUT})
        config = load_config(CoordinatorConfig, file, {})
        return [measure(config, case, temperature, asked) for case in CASES for temperature in temperatures]


@signals_interrupt()
def main() -> None:
    """Weigh and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--kinds", nargs="+", default=["chat", "story", "code-edit"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked = asked_of(given.kinds, given.tokens)
        services = ModelServices(Path(folder), given.model, resolve_draft(DEFAULT_DRAFT, given.model))
        rows = run(services, given.temperatures, asked)
    settings = {"model": given.model, "tokens": str(given.tokens), "fan-out": str(FAN_OUT)}
    print(write_rows(given.out, "round-bytes", settings | {"kinds": ", ".join(given.kinds)}, rows, table(rows)))


if __name__ == "__main__":
    main()
