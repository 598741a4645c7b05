"""The target's features that sessions were given, by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.engine.features import FeatureRows
from paceline.engine.interface import StepItem
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

NOTHING = -1
"""No position: nothing is given."""
KEPT_POSITIONS = 4 * MAX_PROPOSAL_NODES
"""Positions before a step's trunk whose features stay: of rows that have read theirs, those of the last rounds alone
are computed again."""


class GivenFeatures:
    """One session's; `width` values a position, kept as `like` is: its dtype, its device."""

    def __init__(self, width: int, like: torch.Tensor) -> None:
        self._rows = like.new_zeros((0, width))
        self._known = np.zeros(0, np.bool_)
        self._start = 0
        """Position of the first row."""

    def put(self, first_position: int, rows: torch.Tensor) -> None:
        """Take the features [n, width] of the positions from `first_position` on, in place of what was there."""
        new = rows[max(self._start - first_position, 0) :]
        end = first_position - self._start + len(rows)
        if len(new):
            self._make_room(end)
            self._rows[end - len(new) : end] = new
            self._known[end - len(new) : end] = True

    def drop_before(self, position: int) -> None:
        """Drop those before `position` for good, once they are more than those behind it: so each is moved once."""
        dropped = position - self._start
        if dropped > len(self._known) - dropped:
            self._rows = self._rows[dropped:].clone()
            self._known = self._known[dropped:].copy()
            self._start = position

    def knows(self, position: int) -> bool:
        """Whether a position's features are given."""
        place = position - self._start
        return 0 <= place < len(self._known) and bool(self._known[place])

    def nearest(self, position: int) -> int:
        """The last given position up to `position`; `NOTHING` if there is none."""
        if self.knows(position):
            return position
        known = self._known[: max(position - self._start, 0)][::-1]
        return self._start + len(known) - 1 - int(known.argmax()) if known.any() else NOTHING

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """Features [n, width] of given positions."""
        places = [position - self._start for position in positions]
        return self._rows[torch.tensor(places, dtype=torch.long, device=self._rows.device)]

    def before(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All given features [n, width] before a position, and the positions [n] that they are of."""
        known = self._known[: max(position - self._start, 0)]
        places = torch.from_numpy(np.flatnonzero(known)).to(self._rows.device)
        rows = self._rows[: len(known)] if known.all() else self._rows[places]
        return rows, places + self._start

    def _make_room(self, rows: int) -> None:
        if rows > len(self._known):
            room = max(rows, 2 * len(self._known))
            grown = self._rows.new_zeros((room, self._rows.shape[1]))
            grown[: len(self._rows)] = self._rows
            self._rows = grown
            self._known = np.pad(self._known, (0, room - len(self._known)))


def checked_rows(first_position: int, rows: FeatureRows, width: int, like: torch.Tensor) -> torch.Tensor:
    """What was given, [n, width], of the dtype and on the device of `like`.

    Raises:
        InvalidInput: rows of another width, before the first position, or not finite.
    """
    require(first_position >= 0, "features first_position", first_position, "at least 0")
    fits = rows.ndim == 2 and rows.shape[1] == width
    require(fits, "features shape", rows.shape, f"[rows, {width}]: layers · hidden")
    if not np.isfinite(rows).all():
        raise InvalidInput.of("features", f"from position {first_position} on", "finite")
    return torch.tensor(rows, dtype=like.dtype, device=like.device)


class GivenBySession:
    """The given features of all open sessions, checked and projected as they come.

    Args:
        feature_width: values of a row as the target sends it: layers · hidden.
        width: values of a row as it is kept.
        like: a tensor of the dtype and on the device in which rows are kept.
        project: from [n, feature_width] to [n, width], for networks that fuse layers; run once a row.
    """

    def __init__(
        self,
        feature_width: int,
        width: int,
        like: torch.Tensor,
        project: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._feature_width, self._width, self._like, self._project = feature_width, width, like, project
        self._sessions: dict[int, GivenFeatures] = {}

    def __getitem__(self, session: int) -> GivenFeatures:
        return self._sessions[session]

    def open(self, session: int) -> None:
        """Begin a session that was given nothing."""
        self._sessions[session] = GivenFeatures(self._width, self._like)

    def stepped(self, item: StepItem) -> None:
        """A step's rows are computed: features far before them will not be read again."""
        self._sessions[item.session].drop_before(item.trunk - KEPT_POSITIONS)

    def close(self, session: int) -> None:
        """Forget a session; unknown sessions are ignored."""
        self._sessions.pop(session, None)

    def give(self, session: int, first_position: int, rows: FeatureRows) -> None:
        """Take what the target computed, [n, feature_width], from `first_position` on.

        Raises:
            InvalidInput: rows of another width, before the first position, or not finite.
        """
        taken = checked_rows(first_position, rows, self._feature_width, self._like)
        with torch.inference_mode():
            kept = taken if self._project is None else self._project(taken)
            self._sessions[session].put(first_position, kept)
