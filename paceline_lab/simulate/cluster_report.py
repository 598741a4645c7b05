"""`paceline simulate --scenario`: a cluster's report, in Markdown and JSON, with plots. All of it is simulated."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from paceline_lab.reporting.figures import Spread
from paceline_lab.reporting.presentation import Bars, Plot, markdown_table
from paceline_lab.reporting.reports import describe, write_report
from paceline_lab.simulate.cluster import run_cells
from paceline_lab.simulate.outcome import ClusterOutcome, GroupOutcome, outcome
from paceline_lab.simulate.scenario import Scenario

SIMULATED = """Every figure is simulated; docs/capacity.md says how well that was checked. Steps of named GPUs are
modelled by `paceline_lab.predict.roofline`, which meets published decode speeds within 15 %.
"""


def simulate_scenario(scenario: Scenario) -> ClusterOutcome:
    """Run what is simulated of a cluster, and scale."""
    return outcome(scenario, run_cells(scenario))


def report_scenario(scenario: Scenario, file: Path, out: Path | None) -> str:
    """Run a scenario; returns the report, which is written where `out` says."""
    cluster = simulate_scenario(scenario)
    text = f"# Simulated cluster: {file.stem}\n\n{outcome_text(cluster)}"
    if out is None:
        return text
    facts = describe() | {"scenario": file.name, "seed": str(scenario.seed)}
    values = {"scenario": scenario.model_dump(mode="json"), "outcome": asdict(cluster)}
    return write_report(out, f"simulated-{file.stem}", facts, values, text, plots(cluster)).read_text()


def outcome_text(cluster: ClusterOutcome) -> str:
    """Tables, and the bottleneck as a sentence."""
    scaled = (
        f"{cluster.simulated_cells} of {cluster.cells} cells were simulated and scaled up; cells share nothing.\n\n"
        if cluster.cells > cluster.simulated_cells
        else ""
    )
    return (
        f"{SIMULATED}\n{scaled}Bottleneck: {cluster.bottleneck}.\n\n"
        f"{markdown_table([_speed_row(cluster)])}\n{markdown_table([_round_row(cluster)])}\n"
        f"{markdown_table([_share_row(cluster)])}\n{markdown_table([group_row(each) for each in cluster.groups])}"
    )


def plots(cluster: ClusterOutcome) -> list[Plot]:
    """Latencies by kind of traffic, and what services did with their time."""
    names = [each.name for each in cluster.groups]
    latencies = [
        Bars(label, [Spread.of([getattr(each, name)]) for each in cluster.groups])
        for label, name in (
            ("first token p50", "ttft_p50_ms"),
            ("first token p99", "ttft_p99_ms"),
            ("per token p50", "tpot_p50_ms"),
            ("per token p99", "tpot_p99_ms"),
        )
    ]
    shares = _share_row(cluster)
    busy = Bars("share", [Spread.of([float(str(value).rstrip("%")) / 100]) for value in shares.values()])
    return [
        Plot("Latency (simulated)", "milliseconds", names, latencies),
        Plot("Shares (simulated)", "share", [*shares], [busy]),
    ]


def _speed_row(cluster: ClusterOutcome) -> dict[str, object]:
    return {
        "GPUs": cluster.gpus,
        "tokens/s": round(cluster.tokens_per_second, 1),
        "tokens/s per GPU": round(cluster.tokens_per_second_per_gpu, 2),
        "cost per million tokens": f"{cluster.cost_per_million:.3f}"
        if cluster.cost_per_million
        else "no prices stated",
        "requests counted": cluster.requests,
        "refused": cluster.refused,
        "unfinished": cluster.unfinished,
    }


def _round_row(cluster: ClusterOutcome) -> dict[str, object]:
    return {
        "rounds": cluster.rounds,
        "tokens a round": cluster.tokens_per_round,
        "proposed": cluster.proposed_per_drafted_round,
        "accepted": cluster.accepted_per_drafted_round,
        "acceptance": f"{cluster.acceptance:.1%}",
        "hits": f"{cluster.hits:.1%}",
        "started by the target": f"{cluster.self_started:.1%}",
        "rows a step": round(cluster.rows_per_step, 1),
        "step over a single row's": round(cluster.long_steps, 2),
    }


def _share_row(cluster: ClusterOutcome) -> dict[str, object]:
    return {
        "targets busy": f"{cluster.target_busy:.1%}",
        "drafts busy": f"{cluster.draft_busy:.1%}",
        "coordinators busy": f"{cluster.coordinator_busy:.1%}",
        "KV reserved": f"{cluster.kv_share:.1%}",
        "in steps": f"{cluster.stepping:.1%}",
        "waiting for a step": f"{cluster.queueing:.1%}",
        "waiting for drafts": f"{cluster.waiting_for_drafts:.1%}",
    }


def group_row(group: GroupOutcome) -> dict[str, object]:
    """A table's line of one kind of traffic."""
    return {
        name.replace("_", " "): round(value, 2) if isinstance(value, float) else value
        for name, value in asdict(group).items()
    }
