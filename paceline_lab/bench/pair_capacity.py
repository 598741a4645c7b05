"""What a target gains if its drafts are made elsewhere, measured on a real pair.

`python -m paceline_lab.bench.pair_capacity qwen2.5-coder-1.5b --out docs/reports`. Target and draft have one thread
each. The target's process is kept on one core; the draft's is on the same core (the target drafts itself) or on
another (drafts are made elsewhere), and is moved between settings: the services, prompts and seeds are the same. The
coordinators and the client are on the other core both times. Settings are served in turns, each in an order of its
own. Lyu, Irukulapati and Champati (arXiv 2606.25091) expect 1 + γ·t_d ÷ t_v times as many clients at the same speed.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from paceline.local.settings import ServeSettings, available_cores
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.errors import require
from paceline.protocol.proposal import MODEL, NONE
from paceline.protocol.records import GenerationStats
from paceline_lab import REPORTS
from paceline_lab.bench.predicted.cells import ServedRounds
from paceline_lab.bench.predicted.serving import FixedPlan, GridServices
from paceline_lab.bench.prompts import Prompt, load_prompts
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.progress import progress_bar, stderr_console
from paceline_lab.reporting.reports import describe, load_average, write_report
from paceline_lab.simulate.measured import measured_setting
from paceline_lab.simulate.studies.capacity import GAMMA

TARGET_CORE, OTHER_CORE = 0, 1
WAITED, AHEAD = "waited for", "drafted ahead"
FAN_OUT: Mapping[str, int] = {WAITED: 0, AHEAD: 4}
"""Of each way's coordinator."""


@dataclass(frozen=True)
class CapacitySetting:
    """What is served: clients at once, how proposals come (`none`: target-only), and where drafts are made."""

    clients: int
    way: str
    elsewhere: bool = False


@dataclass(frozen=True)
class CapacityRow:
    """Tokens per second of a client, by turn; the target drafts itself, or drafts are elsewhere.

    Attributes:
        plain: target-only.
        claimed: 1 + γ·t_d ÷ t_v, by the rounds of drafts elsewhere that were waited for.
    """

    clients: int
    way: str
    plain: Sequence[float]
    itself: Sequence[float]
    elsewhere: Sequence[float]
    claimed: float

    @property
    def gain(self) -> float:
        """Of drafts elsewhere, over all turns."""
        return fmean(self.elsewhere) / fmean(self.itself)

    def row(self) -> dict[str, object]:
        """A table's line."""
        by_turn = [there / here for there, here in zip(self.elsewhere, self.itself, strict=True)]
        return {
            "clients": self.clients,
            "proposals": self.way,
            "target-only tokens/s": round(fmean(self.plain), 2),
            "target drafts itself": round(fmean(self.itself), 2),
            "drafts elsewhere": round(fmean(self.elsewhere), 2),
            "gain": round(self.gain, 3),
            "by turn": ", ".join(f"{each:.2f}" for each in by_turn),
            "1 + γ·t_d ÷ t_v": round(self.claimed, 3),
        }


def keep_on(process: int, core: int) -> None:
    """Keep all threads of a process on one core; those that they start stay there, too."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def pair_services(model: str, folder: Path) -> Iterator[tuple[SupervisedServices, Mapping[str, GridServices]]]:
    """A target and its draft with a thread each, and a coordinator for each way of proposing."""
    settings = ServeSettings(model=model, port=0, draft_port=0, target_port=0, cores="target=1,draft=1")
    with SupervisedServices(settings, folder / "services") as services:
        require("draft" in services.processes, "model", model, "one that has a draft of its own")
        with (
            services.coordinator("waited", {"fan_out": FAN_OUT[WAITED]}) as waited,
            services.coordinator("ahead", {"fan_out": FAN_OUT[AHEAD]}) as ahead,
        ):
            for label, process in services.processes.items():
                if process.pid is not None:
                    keep_on(process.pid, TARGET_CORE if label == "target" else OTHER_CORE)
            yield services, {WAITED: GridServices(waited, folder), AHEAD: GridServices(ahead, folder)}


def settings_of(clients: Sequence[int]) -> list[CapacitySetting]:
    """Target-only, and both ways of proposing with drafts in both places, at each number of clients."""
    return [CapacitySetting(count, NONE) for count in clients] + [
        CapacitySetting(*each) for each in product(clients, FAN_OUT, (False, True))
    ]


def serve(
    model: str, clients: Sequence[int], prompts: Sequence[Prompt], tokens: int, turns: int
) -> Mapping[CapacitySetting, list[list[GenerationStats]]]:
    """Requests of every setting, by turn."""
    settings = settings_of(clients)
    found: dict[CapacitySetting, list[list[GenerationStats]]] = {setting: [] for setting in settings}
    with (
        tempfile.TemporaryDirectory(prefix="paceline-capacity-") as folder,
        pair_services(model, Path(folder)) as (services, by_way),
        progress_bar(stderr_console(), "settings are served", turns * len(settings)) as advance,
    ):
        draft = services.processes["draft"].pid
        assert draft is not None, "serving"
        by_way[WAITED].serve(FixedPlan(prompts, requests=1, tokens=16, num_draft_tokens=GAMMA, drafter=MODEL))
        for turn in range(turns):
            random.Random(turn).shuffle(settings)  # noqa: S311 - an order, no secret
            for setting in settings:
                keep_on(draft, OTHER_CORE if setting.elsewhere else TARGET_CORE)
                found[setting].append(
                    by_way.get(setting.way, by_way[WAITED]).serve(_plan(setting, prompts, tokens, turn))
                )
                advance(f"{setting.clients} clients, {setting.way}")
    return found


def _plan(setting: CapacitySetting, prompts: Sequence[Prompt], tokens: int, turn: int) -> FixedPlan:
    requests = max(setting.clients, 2)
    drafter = NONE if setting.way == NONE else MODEL
    return FixedPlan(
        prompts,
        requests=requests,
        sessions=setting.clients,
        tokens=tokens,
        num_draft_tokens=GAMMA,
        drafter=drafter,
        first=turn * requests,
    )


def rows_of(served: Mapping[CapacitySetting, list[list[GenerationStats]]]) -> list[CapacityRow]:
    """One row for each number of clients and way of proposing."""

    def speeds(setting: CapacitySetting) -> list[float]:
        return [1e3 / ServedRounds.of(stats).ms_per_token for stats in served[setting]]

    def claimed(clients: int) -> float:
        stats = [each for turn in served[CapacitySetting(clients, WAITED, elsewhere=True)] for each in turn]
        steps = measured_setting(stats, {})
        return 1 + GAMMA * steps.draft.ms(clients) / steps.alone.ms(clients * (GAMMA + 1))

    return [
        CapacityRow(
            clients,
            way,
            speeds(CapacitySetting(clients, NONE)),
            speeds(CapacitySetting(clients, way)),
            speeds(CapacitySetting(clients, way, elsewhere=True)),
            claimed(clients),
        )
        for clients in sorted({setting.clients for setting in served})
        for way in FAN_OUT
    ]


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b", help="a target with a draft of its own")
    parser.add_argument("--clients", default="1,2,4", help="requests at once, with commas between")
    parser.add_argument("--kind", default="code", help="of the prompts; temperature 0")
    parser.add_argument("--tokens", type=int, default=32, help="of a request, at most")
    parser.add_argument(
        "--turns", type=int, default=2, help="in which all settings are served, each with other prompts"
    )
    parser.add_argument("--out", type=Path, default=REPORTS)
    args = parser.parse_args()
    cores = available_cores(os.environ)
    require(cores > OTHER_CORE, "cores", cores, "2 or more: one of them for drafts that are made elsewhere")
    facts = describe() | {"load average before": load_average(), "target": args.model, "γ": str(GAMMA)}
    clients = [int(each) for each in args.clients.split(",")]
    prompts = load_prompts([args.kind])[args.kind]
    rows = rows_of(serve(args.model, clients, prompts, args.tokens, args.turns))
    table = markdown_table([each.row() for each in rows])
    text = f"# Capacity of drafts made elsewhere, on a real pair\n\n{__doc__}\n{table}"
    print(write_report(args.out, "pair-capacity", facts, {"rows": [asdict(each) for each in rows]}, text))


if __name__ == "__main__":
    main()
