"""Hidden states of a target: engines that give them, engines whose rows read them, and how they travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.engine.interface import Engine
from paceline.protocol.errors import require
from paceline.protocol.features import MAX_FEATURE_BYTES, FeatureNeed, Features, FeatureType

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


_LARGEST = {FeatureType.FLOAT16: 65504.0, FeatureType.INT8: 1e30}
_LEVELS = 127
"""Steps of int8 on either side of 0."""


def encode_features(
    session_id: int, first_position: int, rows: FeatureRows, layers: int, dtype: FeatureType
) -> Iterator[Features]:
    """Messages with rows [n, layers · hidden], as many in each as fit; NaN becomes 0."""
    whole = rows.reshape(len(rows), layers, -1)
    hidden = whole.shape[2]
    largest = _LARGEST[dtype]
    whole = np.clip(np.nan_to_num(whole, nan=0.0, posinf=largest, neginf=-largest), -largest, largest)
    most = max(1, MAX_FEATURE_BYTES // dtype.row_bytes(layers, hidden))
    for start in range(0, len(whole), most):
        part = whole[start : start + most]
        data, scales = _encode_rows(part, dtype)
        yield Features(session_id, first_position + start, dtype, (len(part), layers, hidden), data, scales)


def _encode_rows(part: FeatureRows, dtype: FeatureType) -> tuple[bytes, tuple[float, ...]]:
    if dtype is FeatureType.FLOAT16:
        return part.astype("<f2").tobytes(), ()
    scales = (np.abs(part).max(axis=2) / _LEVELS).astype(np.float32)  # [rows, layers]
    steps = part / np.where(scales > 0, scales, 1)[:, :, None]
    return np.rint(steps).clip(-_LEVELS, _LEVELS).astype(np.int8).tobytes(), tuple(scales.ravel().tolist())


def decode_features(features: Features) -> FeatureRows:
    """The rows of a message: [rows, layers · hidden].

    Raises:
        InvalidInput: a value that is not finite.
    """
    rows, layers, hidden = features.shape
    if features.dtype is FeatureType.FLOAT16:
        values = np.frombuffer(features.data, "<f2").astype(np.float32)
    else:
        scales = np.array(features.scales, np.float32).reshape(rows, layers, 1)
        values = np.frombuffer(features.data, np.int8).reshape(features.shape) * scales
    require(bool(np.isfinite(values).all()), "feature values", "not finite", "finite")
    joined_rows: FeatureRows = values.reshape(rows, layers * hidden)
    return joined_rows
