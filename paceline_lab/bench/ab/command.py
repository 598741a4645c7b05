"""`paceline bench ab`: stages run in turns, in each of which another arm comes first, and the report written."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import uvloop

from paceline.protocol.errors import require
from paceline_lab.bench.ab.arms import Arm, ArmRun, ArmServices, ArmsTurn, RunningServices, Stage
from paceline_lab.bench.ab.experiments import EXPERIMENTS, SETTLING, AbOptions
from paceline_lab.bench.ab.load import Arrivals, LoadPlan
from paceline_lab.bench.ab.report import ab_markdown, arm_lines
from paceline_lab.reporting.progress import Advance, progress_bar, stderr_console
from paceline_lab.reporting.reports import describe, load_average, write_report


def in_order(arms: Sequence[Arm], turn: int) -> Sequence[Arm]:
    """Return a turn's arms: each has every place once in as many turns as there are, and the next run backwards.

    A machine is faster behind a pause, so an arm that always had the middle would be compared with what ran then.
    Turns below 0 warm up, and no arm starts anew in them.
    """
    rounds, first = divmod(turn, len(arms))
    order = [*arms[first:], *arms[:first]]
    return [arm for arm in order[:: -1 if rounds % 2 else 1] if turn >= 0 or not arm.starts_anew]


async def run_stage(stage: Stage, turns: int, warm_up_turns: int, results: list[ArmsTurn], advance: Advance) -> None:
    """Run a stage's cases in turns, and add those after the warm-up turns to the results.

    Raises:
        PacelineError: services that did not start, or a request that was not served.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        up: dict[str, RunningServices] = {}
        setups = {arm.services.label: arm.services for arm in stage.all_arms if not arm.starts_anew}
        for label, services in setups.items():
            up[label] = await stack.enter_async_context(services.running(folder / label))
        for number, case in product(range(-warm_up_turns, turns), stage.cases):
            runs = dict[str, ArmRun]()
            wave = case.turns[number % len(case.turns)], case.starts_s
            for arm in in_order(stage.all_arms, number):
                if arm.starts_anew:
                    async with arm.services.running(folder / f"{case.name} {number}") as fresh:
                        runs[arm.name] = await fresh.run(arm, *wave)
                else:
                    runs[arm.name] = await up[arm.services.label].run(arm, *wave)
            if number >= 0:
                results.append(ArmsTurn(stage.name, case.name, number, runs))
                advance(f"{stage.name}, {case.name}")


def with_arms(stage: Stage, names: Sequence[str]) -> Stage:
    """Return the stage with those arms alone, or with all of its arms if none is named."""
    own = [arm.name for arm in stage.arms]
    for name in names:
        require(name in own, "arms", name, f"some of: {', '.join(own)}")
    return replace(stage, arms=[arm for arm in stage.arms if not names or arm.name in names])


def measure_ab(name: str, options: AbOptions, turns: int, arms: Sequence[str], tree: Path | None, out: Path) -> Path:
    """Run an experiment, `turns` of each case; return the report, which has what was measured before Ctrl-C, too.

    `tree`: the checkout to compare the last arm with.
    """
    require(name in EXPERIMENTS, "experiment", name, f"one of: {', '.join(EXPERIMENTS)}")
    require(turns >= 1, "turns", turns, "at least 1")
    require(tree is None or tree.is_dir(), "against", str(tree), "the folder of a checkout")
    title = f"{name.capitalize()}: {EXPERIMENTS[name].__doc__}"
    with ExitStack() as stack:
        stages = [with_arms(stage, arms) for stage in EXPERIMENTS[name](options, stack)]
        stages = stages if tree is None else [stage.against(tree.resolve()) for stage in stages]
        facts = {"tokens of an answer": f"at most {options.tokens}"}
        return measure_stages(name, title, stages, turns, facts, out, SETTLING.get(name, 1))


def measure_load(plan: LoadPlan, services: ArmServices, facts: Mapping[str, str], out: Path, name: str) -> Path:
    """Run waves of requests; return the report, which has what was measured before Ctrl-C, too."""
    services = replace(services, opens_http=plan.over_http)
    way = "streamed chat completions over HTTP" if plan.over_http else "gRPC"
    arrivals = plan.arrivals.value + (f", {plan.rate:g} a second" if plan.arrivals is Arrivals.POISSON else "")
    facts = {"tokens of an answer": str(plan.tokens), "temperature": f"{plan.temperature:g}", **facts}
    facts |= {"requests": f"{way}; {arrivals}"}
    title = "Load: what drafting and `auto` do to many requests at once"
    return measure_stages(name, title, [plan.stage(services)], plan.waves, facts, out)


def measure_stages(
    name: str, title: str, stages: Sequence[Stage], turns: int, facts: Mapping[str, str], out: Path, settling: int = 1
) -> Path:
    """Run stages, `turns` of each case behind `settling` that aren't counted, and write the report."""
    services = [f"{arm.services.model} with {arm.services.drafter}" for stage in stages for arm in stage.arms]
    all_facts = describe() | {"load average before": load_average(), "services": "; ".join(dict.fromkeys(services))}
    results = list[ArmsTurn]()
    with progress_bar(stderr_console(), "turns", turns * sum(len(stage.cases) for stage in stages)) as advance:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the services' loop
                for stage in stages:
                    runner.run(run_stage(stage, turns, settling, results, advance))
        finally:
            if results:
                values = {"results": arm_lines(stages, results), "turns": [asdict(turn) for turn in results]}
                text = ab_markdown(title, stages, results)
                report = write_report(out, name, all_facts | dict(facts), values, text)
    return report
