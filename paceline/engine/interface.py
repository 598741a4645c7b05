"""The interface of a served model: sessions of KV rows, and steps over ragged batches.

A step's plan is a few integers, so that rank 0 of a tensor-parallel group can
broadcast it and every rank run the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.features import FeatureOffer
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.target import Round

Logits = NDArray[np.float32]
"""[rows, V], V = the tokenizer's real vocabulary, never the padded tensor width."""


@dataclass(frozen=True)
class Prefix:
    """The tokens that a session begins with: it may take their rows from other sessions and give them its own.

    The first `prompt_rows` rows are the prompt's; in reproducible mode they are
    computed in the prompt's shape and all later ones in the decode shape. Only
    sessions of the same `tenant` share rows.
    """

    token_ids: tuple[int, ...] = ()
    prompt_rows: int = 0
    tenant: str = ""


NO_PREFIX = Prefix()
"""The prefix of a session that shares nothing."""


@dataclass(frozen=True)
class StepItem:
    """The new rows of one session in one step.

    Before the rows are computed the session keeps `base_length` rows;
    `kept_rows` names those (absolute indices, ascending) that become the last
    `len(kept_rows)` of them, which is how an accepted path is made contiguous
    and how the live part of a tree is.

    The first `trunk_length` of the kept rows (default: all of them) form a
    path. The others are a kept tree, and the new rows grow it: `parents` covers
    the tree, kept rows first, as indices into it, `ROOT` for the trunk's last
    row; empty means a chain. A tree row's position is trunk_length + its depth
    - 1, where a child of `ROOT` has depth 1; it sees the trunk, its ancestors
    and itself. `logit_rows` are indices of new rows.
    """

    session: int
    base_length: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...] = ()
    kept_rows: tuple[int, ...] = ()
    logit_rows: tuple[int, ...] = ()
    trunk_length: int | None = None

    @property
    def trunk(self) -> int:
        """Kept rows that form a path."""
        return self.base_length if self.trunk_length is None else self.trunk_length

    @property
    def kept_tree(self) -> int:
        """Kept rows that form a tree; the new rows come behind them."""
        return self.base_length - self.trunk

    @property
    def tree_rows(self) -> int:
        """Rows of the tree, kept and new."""
        return self.kept_tree + len(self.token_ids)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every row of the tree hangs from the one before it."""
        return not self.parents or self.parents == tuple(range(-1, self.tree_rows - 1))

    def parent_of(self, row: int) -> int:
        """Parent of a row of the tree."""
        return self.parents[row] if self.parents else row - 1


@dataclass(frozen=True)
class StepPlan:
    """One forward pass."""

    items: tuple[StepItem, ...]

    @property
    def rows(self) -> int:
        """Rows of the whole step."""
        return sum(len(item.token_ids) for item in self.items)


@dataclass(frozen=True)
class EngineInfo:
    """Facts of a loaded model. `features`: the hidden states that it offers as a `FeatureSource`; None: none.

    `session_rows`: KV rows whose room every session takes beside its rows: the states of recurrent layers.
    """

    fingerprint: Fingerprint
    max_length: int
    max_kv_rows: int
    features: FeatureOffer | None = None
    session_rows: int = 0

    @property
    def most_rows(self) -> int:
        """Rows of a session that has the whole KV budget."""
        return self.max_kv_rows - self.session_rows

    @property
    def longest_session(self) -> int:
        """Tokens of the longest session that can be served: the context length, or the KV budget if that is less."""
        return min(self.max_length, self.most_rows)


class Engine(Protocol):
    """A loaded model. Every call but `info` and `kv_rows` comes from one thread.

    Sessions are integers chosen by the caller, never reused while open.
    """

    @property
    def info(self) -> EngineInfo:
        """Constant after loading."""

    @property
    def kv_rows(self) -> int:
        """KV rows of all open sessions, as they are budgeted; 0 when none is open.

        Shared blocks take what sessions leave of the budget, and are evicted when sessions need the room.
        """

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        """Reserve room for a session of at most `max_rows` rows, and begin it with the stored rows of its prefix.

        Returns:
            Rows that the session holds now: the first of the prefix, computed
            for other sessions. Never all of them, since the last token's logits
            must be computed. 0 without a prefix.

        Raises:
            Overloaded: the KV budget has no room now.
        """

    def close(self, session: int) -> None:
        """Free a session's rows; unknown sessions are ignored."""

    def step(self, plan: StepPlan) -> Sequence[Logits]:
        """Run one forward pass.

        Returns:
            For each item [len(item.logit_rows), V] float32, in the order of
            `logit_rows`. Valid until the next step.
        """


@dataclass(frozen=True)
class Filters:
    """The part of `SamplingParams` that leaves ids out, which a draw needs the scores of other ids for."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


NO_FILTERS = Filters()


@dataclass(frozen=True)
class Draw:
    """The parameters of a round's draws from logits that temperature and filters alone shape.

    Temperature 0 is greedy, and has no filters.
    """

    acceptance: Acceptance
    temperature: float
    noise: NoiseKey
    round_: Round
    vocab_size: int
    filters: Filters = NO_FILTERS

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is drawn."""
        return self.temperature == 0


@dataclass(frozen=True)
class DrawnTokens:
    """The tokens drawn for one round, as `paceline.protocol.target.Verdict` has them."""

    token_ids: tuple[int, ...]
    target_probabilities: tuple[float, ...] = ()
    residual_masses: tuple[float, ...] = ()


class Drawing(Protocol):
    """The draws of one round."""

    def drawn_tokens(self) -> DrawnTokens:
        """The tokens, and their probabilities where the acceptance rule needs them.

        Raises:
            InvalidInput: there was nothing to draw from.
        """


@runtime_checkable
class DrawingEngine(Protocol):
    """An engine that draws where its logits are: on a GPU, or spread over ranks."""

    def step_and_draw(self, plan: StepPlan, draws: Sequence[Draw | None]) -> Sequence[Logits | Drawing]:
        """Run one forward pass and draw.

        Args:
            plan: as for `Engine.step`.
            draws: for the first items of the plan how to draw from their logits; None: their logits are returned.

        Returns:
            For each item its draws or its logits, as for `Engine.step`; logits, too, where the engine can't draw so.

        Raises:
            PeerUnavailable: a rank is gone, and the engine with it.
        """


@dataclass(frozen=True)
class Ranking:
    """The parameters of a ranking of the tokens after an item's logit rows, by the race of shared noise.

    `positions` are those of the tokens, one for each logit row; `count` is the number of tokens to return for each.
    Temperature and filters alone shape the scores; 0 ranks by the logits themselves, and has no filters.
    """

    noise: NoiseKey
    temperature: float
    positions: tuple[int, ...]
    count: int = 1
    filters: Filters = NO_FILTERS

    @property
    def greedy(self) -> bool:
        """Whether tokens are ranked by their logits alone, without noise."""
        return self.temperature == 0

    @property
    def sampling(self) -> SamplingParams:
        """The chain that shapes the scores."""
        return SamplingParams(self.temperature, *astuple(self.filters))


@dataclass(frozen=True)
class RankedTokens:
    """The best tokens after one row, in order, fewer if fewer are left, and their softmax at the temperature.

    Greedy: at temperature 1. The tokens are exactly those of the definition; probabilities have float32's precision.
    """

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]


class RankedRows(Protocol):
    """The ranking of one item's logit rows."""

    def ranked_tokens(self) -> tuple[RankedTokens, ...]:
        """One for each row.

        Raises:
            InvalidInput: there was nothing to rank.
        """


@runtime_checkable
class RankingEngine(Protocol):
    """An engine that ranks tokens where the logits are."""

    def step_and_rank(self, plan: StepPlan, rankings: Sequence[Ranking | None]) -> Sequence[Logits | RankedRows]:
        """Run one forward pass and rank.

        Args:
            plan: as for `Engine.step`.
            rankings: for each item how its logit rows are ranked; None: their logits are returned.

        Returns:
            For each item its ranking or its logits, valid until the next step.
        """


PROMPT_LOGITS = 64 * 160 * 1024
"""Logits of prompts' rows in one step, at most: 40 MiB in float32.

That is 64 rows, a reproducible prompt's pass and the largest chunk that is a graph, of the largest vocabulary in use
here (151,936 ids). A smaller one has more rows, SmolLM2's 213: the default chunk of 128 is never cut. What they
add to a step is bounded, too: log-softmax and the best 20 take 2.5 ns an id on one core of an AMD EPYC, 26 ms in all.
"""


def prompt_logit_rows(vocab_size: int) -> int:
    """Rows of prompts that have logits in one step, at most."""
    return max(1, PROMPT_LOGITS // vocab_size)
