"""Engines whose rows have a state that follows from their path alone: no model, and no keys or values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from paceline.engine.interface import NO_PREFIX, Prefix, StepItem, StepPlan
from paceline.engine.ledger import LedgerEngine

State = TypeVar("State")


class PathEngine(LedgerEngine[list[State]], ABC, Generic[State]):
    """Keeps a state for each row where a real model keeps keys and values.

    So a wrong rollback, a wrong compaction or crossed sessions give wrong states, as they would there.
    """

    _paths: dict[int, list[State]]

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        """As `Engine`."""
        blocks = self._ledger.open(session, max_rows, prefix)
        self._paths[session] = [row for rows in blocks for row in rows]
        return len(self._paths[session])

    def close(self, session: int) -> None:
        """As `Engine`."""
        self._ledger.close(session)
        self._paths.pop(session, None)

    def _extend_paths(self, plan: StepPlan) -> None:
        """Add the states of a step's rows.

        Raises:
            UnknownSession, PrefixMismatch, InvalidInput: as `Ledger.check`; nothing is added.
        """
        self._ledger.check(plan)
        for item in plan.items:
            self._extend_path(item)
        self._ledger.apply(plan)
        self._ledger.share(plan, lambda session, start, end: self._paths[session][start:end])

    def _logit_states(self, item: StepItem) -> list[State]:
        """The states of an item's rows that have logits."""
        rows = self._paths[item.session]
        return [rows[item.base_length + row] for row in item.logit_rows]

    @abstractmethod
    def _next_state(self, state: State | None, token: int) -> State:
        """The state of a token's row behind another row; None: it is the first."""

    def _extend_path(self, item: StepItem) -> None:
        rows = self._paths[item.session]
        rows[item.base_length - len(item.kept_rows) :] = [rows[row] for row in item.kept_rows]
        for row, token in enumerate(item.token_ids, start=item.kept_tree):
            parent = item.trunk + item.parent_of(row)
            rows.append(self._next_state(rows[parent] if parent >= 0 else None, token))
