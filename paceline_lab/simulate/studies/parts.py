"""What studies share: models on GPUs, assumed prices, one run of a scenario, and a study's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline_lab.reporting.figures import Spread
from paceline_lab.reporting.presentation import Bars, Plot
from paceline_lab.simulate.cluster_report import simulate_scenario
from paceline_lab.simulate.outcome import ClusterOutcome
from paceline_lab.simulate.scenario import Scenario

PRICES: Mapping[str, float] = {"h100": 2.5, "l40s": 1.0, "l4": 0.5}
"""Of a GPU and hour. Assumed, not quoted: only ratios matter to what the studies say."""
ROUND_MS = 0.2
"""A coordinator's own time for a round; assumed, near what traces of real runs say on the cores of one machine."""
TEXT_PAIR = "good"
"""Of `paceline_lab.simulate.synthetic`: the draft's first choice is right .70 to .92 of the time."""


@dataclass(frozen=True)
class StudiedModel:
    """A target on its GPUs and a draft of it."""

    target: str
    tensor_parallel: int
    draft: str
    draft_gpu: str = "l40s"
    gpu: str = "h100"

    def targets(self, count: int, **more: Any) -> dict[str, Any]:
        """For a scenario."""
        price = PRICES[self.gpu] * self.tensor_parallel
        size = {"gpu": self.gpu, "model": self.target, "tensor_parallel": self.tensor_parallel}
        return {"count": count, "price_per_hour": price, **size, **more}

    def drafts(self, count: int, **more: Any) -> dict[str, Any]:
        """For a scenario."""
        return {
            "count": count,
            "gpu": self.draft_gpu,
            "model": self.draft,
            "price_per_hour": PRICES[self.draft_gpu],
            **more,
        }


SMALL = StudiedModel("llama-3.1-8b", 1, "llama-3.2-1b")
MIDDLE = StudiedModel("qwen3-32b", 4, "qwen3-0.6b")
LARGE = StudiedModel("llama-3.3-70b", 8, "llama-3.2-1b")


@dataclass(frozen=True)
class Study:
    """What a study found.

    Attributes:
        name: of its report and its command.
        question: the title.
        settings, findings: Markdown: what was simulated, and what it says.
        rows: the table, each run a line.
    """

    name: str
    question: str
    settings: str
    findings: str
    rows: Sequence[Mapping[str, object]]
    plots: Sequence[Plot] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def run(
    targets: Mapping[str, Any],
    traffic: Mapping[str, Any],
    *,
    drafts: Mapping[str, Any] | None = None,
    k: str = "auto",
    seed: int = 0,
    **more: Any,
) -> ClusterOutcome:
    """Simulate one cell with closed-loop or Poisson traffic, 4 s of which are counted."""
    values: dict[str, Any] = {
        "seed": seed,
        "seconds": 6.0,
        "warmup_seconds": 2.0,
        "drain_seconds": 30.0,
        "coordinators": {"round_ms": ROUND_MS, "count": 2, "max_requests": 4096},
        "targets": [targets],
        "drafts": [drafts] if drafts else [],
        "traffic": [
            {
                "pair": TEXT_PAIR,
                "prompt_tokens": {"median": 300, "p99": 1500},
                "answer_tokens": {"median": 150, "p99": 600},
                **traffic,
            }
        ],
        "speculation": {"k": k},
    }
    speculation = {**values["speculation"], **more.pop("speculation", {})}
    return simulate_scenario(Scenario.model_validate(values | {"speculation": speculation} | more))


def bars(
    title: str, unit: str, groups: Sequence[str], values: Mapping[str, Sequence[float]], line: float | None = None
) -> Plot:
    """A plot of one value for each label and group."""
    series = [Bars(label, [Spread.of([each]) for each in numbers]) for label, numbers in values.items()]
    return Plot(f"{title} (simulated)", unit, groups, series, line)
