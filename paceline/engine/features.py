"""Hidden states of a target: engines that give them, and engines whose rows read them beside tokens.

Those that read them are EAGLE, Medusa, MTP and blocks.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.engine.interface import Engine
from paceline.protocol.features import FeatureNeed

FeatureRows = NDArray[np.float32]
"""[rows, layers · hidden]: each position's features, the layers of a need joined in its order."""


@runtime_checkable
class FeatureSource(Protocol):
    """An engine that can give the hidden states of rows that it computes; `EngineInfo.features` says which.

    Logits are bit-identical whether any are kept or not.
    """

    def keep_features(self, session: int, need: FeatureNeed) -> None:
        """Keep those of the session's rows in every step from now on, until it is closed."""

    def features(self, session: int) -> FeatureRows:
        """Features of the session's new rows in the latest step, in their order; valid until the next step."""


def feature_source(engine: Engine) -> FeatureSource:
    """An engine whose info offers features, as what gives them."""
    assert engine.info.features is not None, "sessions that ask for others are refused"
    assert isinstance(engine, FeatureSource), "it offers them"
    return engine


@runtime_checkable
class FeatureEngine(Engine, Protocol):
    """An engine for a drafter that reads features. To its caller a row is a token after a path, as in any engine.

    The row of the token at position p reads the features of position p - 1, which the target computed for the token
    before it. Where the target's features were not given, EAGLE and multi-token prediction read the engine's own
    output for the parent's row; Medusa's heads and blocks read the nearest given position on the path, and how far
    back it lies. So a row may be computed twice: first as a draft, on features that the engine made, and once it is
    committed, on the target's. For the latter the caller rolls back to the first row whose features were not given
    when it was computed.
    """

    @property
    def need(self) -> FeatureNeed:
        """Constant; which features rows read."""

    @property
    def feature_width(self) -> int:
        """Constant; values of a position's features: layers · hidden."""

    @property
    def reach(self) -> int | None:
        """Constant; the number of rows behind the last given position that can predict the next token. None: all.

        The logits of rows further behind are zeros.
        """

    def give(self, session: int, first_position: int, rows: FeatureRows) -> None:
        """Add the target's features of committed tokens from `first_position` on: used by rows computed from now on.

        Positions that were given before are replaced. Positions may be skipped: their features stay missing.

        Raises:
            InvalidInput: rows of another width, or not finite.
        """
