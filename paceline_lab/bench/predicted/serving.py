"""Serving the grid's requests: fixed lengths, each round waiting for its proposal, as prediction has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.recorder import FILE
from paceline.client import Client
from paceline.costs.cost_line import CostLine
from paceline.local.settings import local_settings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO, MODEL, NGRAM, NONE
from paceline.protocol.records import GenerationStats
from paceline_lab.bench.record import RecordPlan, read_recordings, run_requests

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class FixedPlan(RecordPlan):
    """Requests that one drafter serves with a fixed length, up to their answers' own ends.

    Attributes:
        drafter: the drafter as requests name it; `none`: target-only.
        widths: widths of a static tree.
        first: number of the first request; prompts and seeds go on from there.
    """

    drafter: str = NONE
    widths: tuple[int, ...] = ()
    first: int = 0

    def request(self, number: int) -> GenerateRequest:
        """Return the request of a number."""
        speculation = SpeculationSettings(off=True)
        if self.drafter != NONE:
            speculation = SpeculationSettings(
                drafter=self.drafter, num_draft_tokens=self.num_draft_tokens, tree_widths=self.widths
            )
        return replace(super().request(self.first + number), ignore_eos=False, speculation=speculation)


@dataclass(frozen=True)
class GridServices:
    """A coordinator that drafts nothing ahead, in front of a target and its drafters.

    It writes what requests did, and what steps take, into the folder `recordings`.
    """

    address: str
    recordings: Path

    def serve(self, plan: FixedPlan, advance: Callable[[str], None] = lambda done: None) -> list[GenerationStats]:
        """Run a plan's requests, `sessions` of them at once."""
        requests = [plan.request(number) for number in range(plan.requests)]
        runs = asyncio.run(run_requests(self.address, requests, plan.sessions, advance))
        return [run.generation.stats for run in runs]

    def lines(self) -> dict[str, CostLine]:
        """Return the cost lines that the services stated last: `alone`, `beside` and `draft`, as far as they did."""
        lines: dict[str, CostLine] = {}
        for recording in read_recordings(self.recordings / FILE).values():
            lines |= {
                name: CostLine(tuple((r, ms) for r, ms in points)) for name, points in recording["lines"].items()
            }
        return lines


def drafter_names(models: Sequence[str]) -> dict[str, str]:
    """Return what requests call each of a service's drafters: the first `model`, the others in full; and matches."""
    return {NGRAM: NGRAM} | {name: f"{MODEL}:{name}" if number else MODEL for number, name in enumerate(models)}


@contextmanager
def grid_services(target: str, models: Sequence[str], folder: Path, cores: str | None) -> Iterator[GridServices]:
    """Run services of their own, warmed up."""
    drafter = f"{AUTO}:{'+'.join(models)}" if models else NGRAM
    settings = local_settings(target, drafter, cores=cores)
    recordings = folder / "recordings"
    recordings.mkdir(parents=True, exist_ok=True)
    with (
        SupervisedServices(settings, folder / "services") as services,
        services.coordinator("fixed", {"record_to": str(recordings), "fan_out": 0}) as address,
    ):
        _warm_up(address, drafter_names(models))
        yield GridServices(address, recordings)


def _warm_up(address: str, names: dict[str, str]) -> None:
    """Send a short request of each kind of work."""
    with Client(address) as client:
        for name in (NONE, *names.values()):
            speculation = SpeculationSettings(off=True) if name == NONE else SpeculationSettings(drafter=name)
            request = GenerateRequest(token_ids=(1, 2, 3), max_new_tokens=WARM_UP_TOKENS, speculation=speculation)
            client.generate(replace(request, ignore_eos=True))
