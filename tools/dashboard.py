"""The Grafana dashboard: `python -m tools.dashboard` writes deploy/otel/dashboard.json, `--check` compares it.

Each panel is a title, a unit and its queries; its position follows from its place in its row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "deploy" / "otel" / "dashboard.json"
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = "[$__rate_interval]"
HIT, REUSE = 'result="hit"', 'source="reused"'
REASONING, ACCEPTED, PROPOSED = "paceline_reasoning_tokens_total", 'kind="accepted"', 'kind="proposed"'


@dataclass(frozen=True)
class DashboardPanel:
    """A panel; `queries` by their legend, in PromQL."""

    title: str
    unit: str
    queries: dict[str, str]
    about: str = ""
    stack: bool = False


def _rate(metric: str, labels: str = "", where: str = "") -> str:
    return f"sum{f' by ({labels}) ' if labels else ''}(rate({metric}{{{where}}}{WINDOW}))".replace("{}", "")


def _quantile(q: float, metric: str, labels: str = "", where: str = "") -> str:
    return f"histogram_quantile({q}, {_rate(f'{metric}_bucket', f'le, {labels}' if labels else 'le', where)})"


def _quantiles(metric: str, labels: str = "", where: str = "") -> dict[str, str]:
    legend = f" {{{{{labels}}}}}" if labels else ""
    return {f"p{q * 100:g}{legend}": _quantile(q, metric, labels, where) for q in (0.5, 0.95)}


def _mean(metric: str, labels: str = "") -> str:
    return f"{_rate(f'{metric}_sum', labels)} / {_rate(f'{metric}_count', labels)}"


def _no_worse(le: str) -> str:
    bucket_rate = _rate("paceline_request_overtime_bucket", where=f'le=~"{le}"')
    return f"{bucket_rate} / {_rate('paceline_request_overtime_count')}"


ROUNDS = _rate("paceline_round_duration_seconds_count")
ROWS: dict[str, tuple[DashboardPanel, ...]] = {
    "What users see": (
        DashboardPanel("Time to first token", "s", _quantiles("gen_ai_server_time_to_first_token_seconds")),
        DashboardPanel("Time per output token", "s", _quantiles("gen_ai_server_time_per_output_token_seconds")),
        DashboardPanel("Request duration", "s", _quantiles("gen_ai_server_request_duration_seconds")),
        DashboardPanel(
            "Requests a second, by how they ended",
            "reqps",
            {"{{outcome}}": f"{_rate('paceline_requests_ended_total', 'outcome')} > 0"},
            stack=True,
        ),
        DashboardPanel(
            "Requests that run", "short", {"{{state}}": "sum by (state) (paceline_requests_active)"}, stack=True
        ),
        DashboardPanel(
            "Tokens a second, by where they came from",
            "short",
            {"{{provenance}}": _rate("paceline_tokens_committed_total", "provenance")},
            stack=True,
        ),
    ),
    "Nobody is slower": (
        DashboardPanel(
            "Share of requests by their account",
            "percentunit",
            {"not slower than target-only": _no_worse("0|0\\\\.0"), "at most 3 % slower": _no_worse("0\\\\.03")},
            "A request's account is its time beyond target-only's for the same tokens, by measured step times.",
        ),
        DashboardPanel(
            "Share that ended over the account's bound",
            "percentunit",
            {"over": f"{_rate('paceline_requests_over_bound_total')} / {_rate('paceline_request_overtime_count')}"},
        ),
        DashboardPanel("Fallbacks by cause", "short", {"{{cause}}": _rate("paceline_fallbacks_total", "cause")}),
    ),
    "Rounds": (
        DashboardPanel("Round", "s", _quantiles("paceline_round_duration_seconds", "proposer")),
        DashboardPanel(
            "Mean of each part",
            "s",
            {"{{part}}": _mean("paceline_round_part_duration_seconds", "part")},
            "The target's part of a self-started round began before the round: the parts exceed it then.",
            stack=True,
        ),
        DashboardPanel(
            "Tokens of a round",
            "short",
            {"mean": f"{_rate('paceline_tokens_committed_total')} / {ROUNDS}"},
        ),
        DashboardPanel(
            "Share of rounds that were proposed for, or self-started",
            "percentunit",
            {
                "proposed, {{proposer}}": f"{_rate('paceline_rounds_proposed_total', 'proposer')} / on () group_left "
                f"{ROUNDS}",
                "self-started": f"{_rate('paceline_rounds_self_started_total')} / {ROUNDS}",
            },
        ),
    ),
    "Speculation": (
        DashboardPanel(
            "Accepted share of proposed tokens",
            "percentunit",
            {"all": f"{_rate('paceline_tokens_accepted_total')} / {_rate('paceline_tokens_proposed_total')}"},
        ),
        DashboardPanel(
            "Accepted tokens a proposal, by position",
            "percentunit",
            {
                "{{position}}": f"{_rate('paceline_tokens_accepted_total', 'position')} / on () group_left "
                f"{_rate('paceline_rounds_proposed_total')}"
            },
        ),
        DashboardPanel(
            "Hits of the speculation cache",
            "percentunit",
            {"hits": f"{_rate('paceline_cache_lookups_total', where=HIT)} / {_rate('paceline_cache_lookups_total')}"},
        ),
        DashboardPanel(
            "Accepted share of tokens proposed in reasoning",
            "percentunit",
            {"all": f"{_rate(REASONING, where=ACCEPTED)} / {_rate(REASONING, where=PROPOSED)}"},
        ),
        DashboardPanel(
            "Reasoning rounds a second", "short", {"all": _rate("paceline_reasoning_round_duration_seconds_count")}
        ),
        DashboardPanel("Acceptance length of requests", "short", _quantiles("paceline_request_acceptance_length")),
        DashboardPanel(
            "Planned rounds a second, by way and length",
            "short",
            {"{{way}} {{draft_tokens}}": _rate("paceline_planner_rounds_total", "way, draft_tokens")},
            stack=True,
        ),
        DashboardPanel(
            "What a second row costs a step", "s", {"{{instance}}": "paceline_planner_row_duration_seconds"}
        ),
        DashboardPanel(
            "Targets by the mode of their requests",
            "short",
            {"{{mode}}": "sum by (mode) (paceline_group_mode)"},
            "A coordinator's requests that share a target rest, copy matches or draft, by what they gain together.",
            stack=True,
        ),
        DashboardPanel(
            "Gain of a mode beside resting",
            "short",
            {"{{target}} {{mode}}": "avg by (target, mode) (paceline_group_gain)"},
            "As it ran last. Below 1 a mode loses, and is left for a pause.",
        ),
        DashboardPanel(
            "Steps until a mode is tried again",
            "short",
            {"{{target}} {{mode}}": "min by (target, mode) (paceline_group_wait_steps)"},
        ),
        DashboardPanel(
            "Rank of committed tokens in the draft's order",
            "short",
            {"{{rank}}": _rate("paceline_draft_shadow_total", "rank")},
            "Also of tokens that were never proposed: what a longer proposal would have brought.",
            stack=True,
        ),
        DashboardPanel(
            "Drafted tokens a second", "short", {"{{kind}}": _rate("paceline_draft_tokens_total", "kind")}
        ),
        DashboardPanel("Bytes of features a second", "Bps", {"all": _rate("paceline_features_bytes_total")}),
        DashboardPanel("Proposals a second", "short", {"{{kind}}": _rate("paceline_draft_proposals_total", "kind")}),
    ),
    "Targets and draft services": (
        DashboardPanel(
            "Busy share of the time",
            "percentunit",
            {"{{role}} {{instance}}": _rate("paceline_step_duration_seconds_sum", "role, instance")},
            "Of a draft service: above .7 add one.",
        ),
        DashboardPanel("Step", "s", _quantiles("paceline_step_duration_seconds", "role")),
        DashboardPanel(
            "Rows and sessions of a step",
            "short",
            {
                "rows, {{role}}": _mean("paceline_step_rows", "role"),
                "sessions, {{role}}": _mean("paceline_step_sessions", "role"),
            },
        ),
        DashboardPanel(
            "Open sessions", "short", {"{{role}} {{state}}": "sum by (role, state) (paceline_sessions_open)"}
        ),
        DashboardPanel("Queue for a step", "short", {"{{role}}": "sum by (role) (paceline_queue_length)"}),
        DashboardPanel("KV rows in use", "percentunit", {"{{role}} {{instance}}": "paceline_kv_usage"}),
        DashboardPanel("KV rows", "short", {"{{role}}": "sum by (role) (paceline_kv_rows)"}),
        DashboardPanel(
            "Share of prefix tokens in the cache",
            "percentunit",
            {
                "reused": f"{_rate('paceline_prefix_tokens_total', where=REUSE)} / "
                f"{_rate('paceline_prefix_tokens_total')}"
            },
        ),
        DashboardPanel("Prompt tokens a second", "short", {"all": _rate("paceline_tokens_prompt_total")}),
        DashboardPanel(
            "Sessions refused or failed",
            "short",
            {
                "refused, {{role}} {{reason}}": f"{_rate('paceline_sessions_refused_total', 'role, reason')} > 0",
                "failed, {{role}} {{reason}}": f"{_rate('paceline_sessions_failed_total', 'role, reason')} > 0",
            },
        ),
        DashboardPanel(
            "Files that could not be read again",
            "short",
            {"{{job}} {{file}}": f"{_rate('paceline_reload_failures_total', 'job, file')} > 0"},
            "What they held before stays in force: a revoked key is let in, a certificate expires.",
        ),
        DashboardPanel("Grammar workers", "short", {"{{role}}": "sum by (role) (paceline_grammar_workers)"}),
    ),
    "HTTP": (
        DashboardPanel(
            "HTTP requests a second",
            "reqps",
            {
                "{{http_route}} {{http_response_status_code}}": _rate(
                    "http_server_request_duration_seconds_count", "http_route, http_response_status_code"
                )
            },
            stack=True,
        ),
        DashboardPanel("HTTP request", "s", _quantiles("http_server_request_duration_seconds", "http_route")),
    ),
}


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    return {
        "title": "Paceline",
        "uid": "paceline",
        "schemaVersion": 39,
        "tags": ["paceline"],
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [*_panels()],
    }


def main() -> None:
    """Write the dashboard, or say that it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if it is stale")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if not parser.parse_args().check:
        FILE.write_text(text)
    elif not FILE.exists() or FILE.read_text() != text:
        sys.exit(f"{FILE} is stale: python -m tools.dashboard")


def _panels() -> Iterator[dict[str, Any]]:
    top, number = 0, 1
    for title, panels in ROWS.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        top, number = top + 1, number + 1
        for index, panel in enumerate(panels):
            down, right = divmod(index, COLUMNS // PANEL_WIDTH)
            place = {"x": right * PANEL_WIDTH, "y": top + down * PANEL_HEIGHT, "w": PANEL_WIDTH, "h": PANEL_HEIGHT}
            yield _panel(number, panel, place)
            number += 1
        top += (len(panels) + 2) // (COLUMNS // PANEL_WIDTH) * PANEL_HEIGHT


def _panel(number: int, panel: DashboardPanel, place: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stack else {"fillOpacity": 5}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


if __name__ == "__main__":
    main()
