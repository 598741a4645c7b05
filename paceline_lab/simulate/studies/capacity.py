"""How many more clients does a target serve at the same speed if drafts are made elsewhere? × (1 + γ·t_d ÷ t_v)?

The claim is of arXiv 2606.25091 (Lyu, Irukulapati, Champati: Speculation at a Distance). Beside it stands a target
that drafts itself: each of its steps takes γ steps of the draft longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline_lab.simulate.outcome import ClusterOutcome
from paceline_lab.simulate.studies.parts import Study, bars, run

GAMMA = 4
"""Tokens of a proposal."""
CLIENTS = (1, 4, 8, 16, 32, 64, 128)
AT = (8, 32, 128)
"""Clients that the summary names."""
ANSWER_TOKENS = 128
ACCEPTANCE = 0.8
MOST_ROWS = 1025.0


@dataclass(frozen=True)
class TimedPair:
    """A target's and a draft's step: milliseconds, and those of each row. `batches`: whether requests share steps."""

    name: str
    target_ms: float = 20.0
    row_ms: float = 0.05
    draft_ms: float = 2.0
    draft_row_ms: float = 0.02
    batches: bool = True

    def verify_ms(self, clients: float) -> float:
        """Of a step with all clients' proposals, or with one's."""
        return self.target_ms + self.row_ms * (GAMMA + 1) * (clients if self.batches else 1)

    def level_ms(self, clients: float) -> float:
        """Of a draft's step with a row of each, or of one."""
        return self.draft_ms + self.draft_row_ms * (clients if self.batches else 1)

    def claimed(self, clients: float) -> float:
        """1 + γ·t_d ÷ t_v at so many clients."""
        return 1 + GAMMA * self.level_ms(clients) / self.verify_ms(clients)

    def target(self, *, drafts_itself: bool) -> dict[str, Any]:
        """For a scenario. One that does not batch serves one proposal a step."""
        extra, row = (GAMMA * self.draft_ms, GAMMA * self.draft_row_ms / (GAMMA + 1)) if drafts_itself else (0.0, 0.0)
        first_ms, row_ms = self.target_ms + extra, self.row_ms + row
        step = [[rows, first_ms + row_ms * rows] for rows in (1.0, MOST_ROWS)]
        return {"step": step, "max_step_rows": 0 if self.batches else GAMMA + 1}

    def draft(self, *, elsewhere: bool) -> dict[str, Any]:
        """For a scenario; a draft whose time is in the target's steps takes none."""
        if not elsewhere:
            return {"step": [[1.0, 1e-3]]}
        return {"step": [[rows, self.draft_ms + self.draft_row_ms * rows] for rows in (1.0, MOST_ROWS)]}


PAIRS = (
    TimedPair("rows cost little"),
    TimedPair("rows cost much", row_ms=0.5),
    TimedPair("no batching", batches=False),
)


@dataclass(frozen=True)
class CapacityGain:
    """One pair: tokens per second of a client by the number of clients, by who drafts and when.

    Attributes:
        itself: the target's steps have the draft's in them.
        elsewhere: rounds wait for drafts made elsewhere; `ahead`: made while the round before is verified.
    """

    pair: TimedPair
    itself: Sequence[float]
    elsewhere: Sequence[float]
    ahead: Sequence[float]

    def gain(self, clients: int, speeds: Sequence[float]) -> float:
        """A client's speed over that with the target's own drafts; saturated, so many more clients fit."""
        place = CLIENTS.index(clients)
        return speeds[place] / self.itself[place]

    def rows(self) -> list[dict[str, object]]:
        """Of the table."""
        return [
            {
                "pair": self.pair.name,
                "clients": clients,
                "tokens/s of one, target drafts itself": round(itself, 2),
                "elsewhere, waited for": round(elsewhere, 2),
                "gain": round(elsewhere / itself, 3),
                "elsewhere, ahead": round(ahead, 2),
                "gain ahead": round(ahead / itself, 3),
                "1 + γ·t_d ÷ t_v": round(self.pair.claimed(clients), 3),
            }
            for clients, itself, elsewhere, ahead in zip(
                CLIENTS, self.itself, self.elsewhere, self.ahead, strict=True
            )
        ]


def study(seed: int) -> Study:
    """Run it."""
    gains = [_gain(pair, seed) for pair in PAIRS]
    groups = [f"{each.pair.name}, {clients}" for each in gains for clients in AT]
    values = {
        "waited for": [each.gain(clients, each.elsewhere) for each in gains for clients in AT],
        "ahead": [each.gain(clients, each.ahead) for each in gains for clients in AT],
        "1 + γ·t_d ÷ t_v": [each.pair.claimed(clients) for each in gains for clients in AT],
    }
    return Study(
        "study-capacity",
        "What does a target gain if drafts are made elsewhere?",
        f"γ = {GAMMA}, acceptance {ACCEPTANCE}, answers of {ANSWER_TOKENS} tokens, no delay. Target steps of 20 ms "
        "and 0.05 or 0.5 ms a row, draft steps of 2 ms and 0.02 ms a row. Without batching a step has one client's "
        "proposal. A draft service has up to 64 rows a step for outcomes, however many clients there are.",
        "".join(f"- {_said(each)}\n" for each in gains),
        [row for each in gains for row in each.rows()],
        [bars("A client's speed over that with the target's own drafts, by clients", "times", groups, values, 1.0)],
    )


def _gain(pair: TimedPair, seed: int) -> CapacityGain:
    ways = ((False, str(GAMMA)), (True, str(GAMMA)), (True, f"{GAMMA}+ahead"))
    speeds = [[_speed(pair, clients, seed, elsewhere, k) for clients in CLIENTS] for elsewhere, k in ways]
    return CapacityGain(pair, *speeds)


def _speed(pair: TimedPair, clients: int, seed: int, elsewhere: bool, k: str) -> float:
    traffic = {
        "sessions": clients,
        "prompt_tokens": {"median": 8},
        "answer_tokens": {"median": ANSWER_TOKENS},
        "acceptance": ACCEPTANCE,
    }
    outcome: ClusterOutcome = run(
        {**pair.target(drafts_itself=not elsewhere), "link": {"ms": 0}},
        traffic,
        drafts={**pair.draft(elsewhere=elsewhere), "link": {"ms": 0}},
        k=k,
        seed=seed,
        coordinators={"round_ms": 0, "max_requests": 4096},
        seconds=8.0,
    )
    return outcome.tokens_per_second / clients


def _said(each: CapacityGain) -> str:
    gains = [
        f"{each.gain(n, each.elsewhere):.2f} and {each.gain(n, each.ahead):.2f} (formula {each.pair.claimed(n):.2f}) "
        f"at {n} clients"
        for n in AT
    ]
    return f"{each.pair.name}: gain waited for and ahead {', '.join(gains)}"
