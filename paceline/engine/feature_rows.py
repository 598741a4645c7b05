"""Hidden states as they travel: written in few bytes by the target, read by the draft service.

The precision that is lost on the way costs a draft some acceptance and never exactness. Values that float16 can't
hold are cut to the largest that it can: single channels of some models reach that far.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.engine.features import FeatureRows
from paceline.protocol.errors import require
from paceline.protocol.features import MAX_FEATURE_BYTES, Features, FeatureType

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
