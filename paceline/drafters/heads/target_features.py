"""The target's features, by session and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.features import FeatureRows
from paceline.engine.interface import StepItem
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.features import FeatureNeed
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

NOTHING = -1
"""In place of a position: no feature is given."""
KEPT_POSITIONS = 4 * MAX_PROPOSAL_NODES
"""Positions before a step's trunk whose features are kept: only rows of the last rounds are computed again."""


Network = TypeVar("Network", bound=torch.nn.Module)


@dataclass(frozen=True, eq=False)
class FeatureDraft(Generic[Network]):
    """A network that reads the target's features, as it was loaded or trained, and what belongs to it.

    Attributes:
        need: the target's hidden states that it reads, in the order in which it joins them.
        target_ids: [head size] target id of each of its own, ascending; None: they are the target's.
    """

    network: Network
    need: FeatureNeed
    target_ids: NDArray[np.int32] | None = None

    def head_ids(self, vocab_size: int) -> NDArray[np.signedinteger[Any]]:
        """Target id of each logit of the head.

        The head of a padded vocabulary may have logits for ids of no token: the last ones, since ids ascend.
        """
        ids = np.arange(vocab_size) if self.target_ids is None else self.target_ids
        return ids[ids < vocab_size]


class SessionFeatures:
    """A session's features: `width` values a position, of the dtype and on the device of `like`."""

    def __init__(self, width: int, like: torch.Tensor) -> None:
        self._rows = like.new_zeros((0, width))
        self._mask = np.zeros(0, np.bool_)
        self._start = 0
        """Position of the first row."""

    def put(self, first_position: int, rows: torch.Tensor) -> None:
        """Store the features [n, width] of the positions from `first_position` on, in place of earlier ones."""
        new = rows[max(self._start - first_position, 0) :]
        end = first_position - self._start + len(rows)
        if len(new):
            self._make_room(end)
            self._rows[end - len(new) : end] = new
            self._mask[end - len(new) : end] = True

    def drop_before(self, position: int) -> None:
        """Drop the features before `position`, once they are more than those behind it: so each row is moved once."""
        count = position - self._start
        if count > len(self._mask) - count:
            self._rows = self._rows[count:].clone()
            self._mask = self._mask[count:].copy()
            self._start = position

    def has(self, position: int) -> bool:
        """Whether a position has features."""
        place = position - self._start
        return 0 <= place < len(self._mask) and bool(self._mask[place])

    def nearest(self, position: int) -> int:
        """The last position with features up to `position`; `NOTHING` if there is none."""
        if self.has(position):
            return position
        mask = self._mask[: max(position - self._start, 0)][::-1]
        return self._start + len(mask) - 1 - int(mask.argmax()) if mask.any() else NOTHING

    def gather(self, positions: Sequence[int]) -> torch.Tensor:
        """Features [n, width] of positions that have some."""
        places = [position - self._start for position in positions]
        return self._rows[torch.tensor(places, dtype=torch.long, device=self._rows.device)]

    def rows_before(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All features [n, width] before a position, and their positions [n]."""
        mask = self._mask[: max(position - self._start, 0)]
        places = torch.from_numpy(np.flatnonzero(mask)).to(self._rows.device)
        rows = self._rows[: len(mask)] if mask.all() else self._rows[places]
        return rows, places + self._start

    def _make_room(self, rows: int) -> None:
        if rows > len(self._mask):
            room = max(rows, 2 * len(self._mask))
            larger = self._rows.new_zeros((room, self._rows.shape[1]))
            larger[: len(self._rows)] = self._rows
            self._rows = larger
            self._mask = np.pad(self._mask, (0, room - len(self._mask)))


def check_rows(first_position: int, rows: FeatureRows, width: int, like: torch.Tensor) -> torch.Tensor:
    """Features as a tensor [n, width], of the dtype and on the device of `like`.

    Raises:
        InvalidInput: rows of another width, before the first position, or not finite.
    """
    require(first_position >= 0, "features first_position", first_position, "at least 0")
    fits = rows.ndim == 2 and rows.shape[1] == width
    require(fits, "features shape", rows.shape, f"[rows, {width}]: layers · hidden")
    if not np.isfinite(rows).all():
        raise InvalidInput.of("features", f"from position {first_position} on", "finite")
    return torch.tensor(rows, dtype=like.dtype, device=like.device)


class TargetFeatures:
    """The features of all open sessions, checked and projected as they arrive.

    Args:
        feature_width: values of a row as the target sends it: layers · hidden.
        width: values of a row as it is stored.
        like: a tensor of the dtype and on the device of stored rows.
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
        self._sessions: dict[int, SessionFeatures] = {}

    def __getitem__(self, session: int) -> SessionFeatures:
        return self._sessions[session]

    def open(self, session: int) -> None:
        """Begin a session without features."""
        self._sessions[session] = SessionFeatures(self._width, self._like)

    def trim(self, item: StepItem) -> None:
        """Drop the features far before a computed step's rows: they will not be read again."""
        self._sessions[item.session].drop_before(item.trunk - KEPT_POSITIONS)

    def close(self, session: int) -> None:
        """Forget a session; unknown sessions are ignored."""
        self._sessions.pop(session, None)

    def give(self, session: int, first_position: int, rows: FeatureRows) -> None:
        """Store the target's features [n, feature_width] from `first_position` on.

        Raises:
            InvalidInput: rows of another width, before the first position, or not finite.
        """
        features = check_rows(first_position, rows, self._feature_width, self._like)
        with torch.inference_mode():
            if self._project is not None:
                features = self._project(features)
            self._sessions[session].put(first_position, features)
