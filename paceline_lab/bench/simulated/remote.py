"""The second grid of `paceline_lab.bench.simulated.overlap`: services at a distance.

A delay is one way, the same there and back, between the coordinator and the target and between the
coordinator and the draft (`paceline_lab.bench.simulated.delay`): each round trip pays it twice. Services and both
coordinators, with overlap and without, stay up while delay and temperature change.

A cell's figures are of all its generations together. Target-only requests go to the coordinator without
overlap, over the same delay; their text must be the beginning of the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.client import Client
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.sampling import SamplingParams
from paceline_lab.bench.simulated.delay import DelayProxy
from paceline_lab.bench.simulated.distributions import DRAFT_OF_ACCEPTANCE, coupled_match
from paceline_lab.bench.simulated.echo import echo_ms, echo_server
from paceline_lab.bench.simulated.replay import FAN_OUT, SPECULATION, pool, replay, run_pair
from paceline_lab.bench.simulated.services import OFF, SimulatedPair, request
from paceline_lab.reporting.figures import Spread
from paceline_lab.reporting.presentation import Bars, Plot

DRAFT_MS = 2.54
ONE_WAY_MS = (0.0, 1.0, 5.0, 20.0)
TEMPERATURES = (0.0, 1.0)
GENERATIONS = 3
TOKENS = 64
TARGET_ONLY_TOKENS = 24
SETTINGS = f"""A cell: {GENERATIONS} requests of {TOKENS} tokens with overlap and without, one of {TARGET_ONLY_TOKENS}
tokens target-only; its figures are of all of them together.
One way ms is the delay between the coordinator and either service; a round trip pays it twice. The ideal
has the same hits and misses, pays T_verify a round, one round trip of delay where the round was not
self-started, the drafting steps and the draft's round trip a miss, and nothing else. Match is the tables' own at
this temperature; acceptance is what it is at temperature 1.
"""
DETOURS = "What the forwarder adds to an idle echo beyond twice the delay that it states:\n"
DETOUR_MESSAGES = 50
DETOUR_PAUSE_MS = 11.45


@dataclass(frozen=True)
class Remote:
    """Figures of one cell.

    `match` is the tables' own at this temperature; `acceptance` is what it was fitted to at temperature 1.
    """

    verify_ms: float
    draft_ms: float
    acceptance: float
    temperature: float
    one_way_ms: float
    draft_distribution: str
    match: float
    rounds: int
    hit_rate: float
    tokens_per_round: float
    tokens_per_second: float
    of_ideal: float
    of_perfect_cache: float
    over_off: float
    off_tokens_per_second: float
    target_only_tokens_per_second: float
    over_target_only: float

    @property
    def cell(self) -> tuple[float, ...]:
        """Return the cell's key, in the order of the table."""
        return -self.verify_ms, self.acceptance, self.temperature, self.one_way_ms


@dataclass(frozen=True)
class Detour:
    """An idle echo over gRPC through the forwarder, beside an echo without it; medians."""

    one_way_ms: float
    direct_echo_ms: float
    echo_ms: float
    beyond_delay_ms: float

    @property
    def cell(self) -> tuple[float, ...]:
        """Return the cell's key."""
        return (self.one_way_ms,)


def measure_detours() -> list[Detour]:
    """Measure a detour for each delay."""
    detours = []
    with echo_server() as address, DelayProxy.to(address) as proxy:
        direct = echo_ms(address, DETOUR_PAUSE_MS, DETOUR_MESSAGES)
        for one_way_ms in ONE_WAY_MS:
            proxy.set_one_way_ms(one_way_ms)
            through = echo_ms(proxy.address, DETOUR_PAUSE_MS, DETOUR_MESSAGES)
            detours.append(Detour(one_way_ms, direct, through, through - direct - 2 * one_way_ms))
    return detours


@dataclass(frozen=True)
class DelayedServices:
    """Two coordinators on the same services, with overlap and without, and the forwarders between."""

    pair: SimulatedPair
    acceptance: float
    on: Client
    off: Client
    proxies: tuple[DelayProxy, DelayProxy]

    def measure(
        self,
        one_way_ms: float,
        temperature: float,
        match: float,
        generations: int = GENERATIONS,
        tokens: int = TOKENS,
    ) -> Remote:
        """Measure one cell."""
        for proxy in self.proxies:
            proxy.set_one_way_ms(one_way_ms)
        requests = [sampled_request(number, tokens, temperature) for number in range(1, generations + 1)]
        ran = [run_pair(self.on, self.off, each) for each in requests]
        verify_ms = self.pair.verify_ms
        on = pool([replay(fast.stats, verify_ms, one_way_ms) for fast, _ in ran])
        off = pool([replay(slow.stats, verify_ms, one_way_ms) for _, slow in ran])
        alone = replace(requests[0], speculation=OFF, max_new_tokens=min(tokens, TARGET_ONLY_TOKENS))
        target_only = self.off.generate(alone)
        if target_only.token_ids != ran[0][0].token_ids[:TARGET_ONLY_TOKENS]:
            raise AssertionError(f"temperature {temperature:g}: drafting changed the text")
        return Remote(
            verify_ms=verify_ms,
            draft_ms=self.pair.draft_ms,
            acceptance=self.acceptance,
            temperature=temperature,
            one_way_ms=one_way_ms,
            draft_distribution=self.pair.draft_distribution,
            match=match,
            rounds=on.rounds,
            hit_rate=on.hit_rate,
            tokens_per_round=on.tokens / on.rounds,
            tokens_per_second=on.tokens_per_second,
            of_ideal=on.of_ideal,
            of_perfect_cache=on.of_perfect,
            over_off=on.tokens_per_second / off.tokens_per_second,
            off_tokens_per_second=off.tokens_per_second,
            target_only_tokens_per_second=target_only.stats.tokens_per_second,
            over_target_only=on.tokens_per_second / target_only.stats.tokens_per_second,
        )


def sampled_request(number: int, tokens: int, temperature: float) -> GenerateRequest:
    """Return the request of a number."""
    return replace(
        request(number, tokens, SPECULATION), sampling=SamplingParams(temperature=temperature).with_defaults()
    )


def measure_remotes(verify_ms: float, acceptances: Sequence[float], folder: Path) -> Iterator[Remote]:
    """Measure every cell of one T_verify; each draft's first pair of generations warms up."""
    for acceptance in acceptances:
        draft = DRAFT_OF_ACCEPTANCE[acceptance]
        pair = SimulatedPair(draft, verify_ms, DRAFT_MS)
        matches = {temperature: coupled_match(draft, temperature) for temperature in TEMPERATURES}
        with (
            pair.services(folder / f"{acceptance}") as services,
            DelayProxy.to(services.address_of("target")) as to_target,
            DelayProxy.to(services.address_of("draft")) as to_draft,
        ):
            ways = {"target.address": to_target.address, "draft.address": to_draft.address}
            with (
                services.coordinator("on", ways | {"fan_out": FAN_OUT}) as on_address,
                services.coordinator("off", ways | {"fan_out": 0}) as off_address,
                Client(on_address) as on,
                Client(off_address) as off,
            ):
                delayed_services = DelayedServices(pair, acceptance, on, off, (to_target, to_draft))
                run_pair(on, off, sampled_request(0, TOKENS, 1.0))
                for one_way_ms in ONE_WAY_MS:
                    for temperature, match in matches.items():
                        yield delayed_services.measure(one_way_ms, temperature, match)


def remote_rows(cells: Sequence[Remote]) -> list[dict[str, object]]:
    """Return the rows of the table of services at a distance."""
    return [
        {
            "T_verify ms": cell.verify_ms,
            "acceptance": f"{cell.acceptance:g}",
            "temperature": f"{cell.temperature:g}",
            "match": cell.match,
            "one way ms": f"{cell.one_way_ms:g}",
            "hit rate": cell.hit_rate,
            "tokens per round": cell.tokens_per_round,
            "tok/s": cell.tokens_per_second,
            "of the ideal": cell.of_ideal,
            "of a perfect cache": cell.of_perfect_cache,
            "÷ overlap off": cell.over_off,
            "target-only tok/s": cell.target_only_tokens_per_second,
            "÷ target-only": cell.over_target_only,
            "overlap off ÷ target-only": cell.off_tokens_per_second / cell.target_only_tokens_per_second,
        }
        for cell in cells
    ]


def cells(acceptances: int) -> int:
    """Return the number of cells of one T_verify."""
    return acceptances * len(ONE_WAY_MS) * len(TEMPERATURES)


def remote_plot(rows: Sequence[Remote]) -> Plot:
    """Plot overlap on over target-only by the delay, at temperature 1."""
    plot_rows = [row for row in rows if row.temperature == 1]
    names = sorted({(row.verify_ms, row.one_way_ms) for row in plot_rows})
    bars = []
    for acceptance in sorted({row.acceptance for row in plot_rows}):
        speedups = {
            (row.verify_ms, row.one_way_ms): row.over_target_only for row in plot_rows if row.acceptance == acceptance
        }
        spreads = [Spread.of([speedups[name]]) if name in speedups else None for name in names]
        bars.append(Bars(f"acceptance {acceptance:g}", spreads))
    groups = [f"{verify_ms:g} ms\n{one_way_ms:g} ms away" for verify_ms, one_way_ms in names]
    return Plot("At a distance, temperature 1", "overlap on ÷ target-only", groups, bars, line=1.0)
