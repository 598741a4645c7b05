"""Hidden states of the target: which ones a drafter reads, which ones a target can send, and their messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from paceline.protocol.errors import Unsupported, require

MAX_FEATURE_LAYERS = 16
"""Most layers that one drafter reads; published ones read 1 to 6."""
MAX_FEATURE_BYTES = 1 << 18
"""Most bytes of values and scales in one message: a quarter of a frame, so that verdicts beside it wait for little.
It holds a row of 16 layers of 8,192 float16."""
MAX_KEPT_FEATURE_BYTES = 16 << 20
"""Bytes of one request that a coordinator keeps: in float16 4,800 tokens of three layers of SmolLM2-135M, 680 of an
8B model's. With 1024 requests at once that may be 16 GiB: a coordinator of large targets is given less."""


@dataclass(frozen=True)
class FeatureNeed:
    """Which of the target's hidden states a drafter reads, in the order in which it joins them.

    A layer's number stands for its *output*: `i` is the residual stream behind decoder layer i, counted from 0, so
    that `i - 1` is the input of layer i. `EMBEDDING` (-1) is the input of layer 0. `FINAL` (-2) is the last layer's
    output behind the decoder's last norm, which the target's head reads. Checkpoints count differently, by one. Their
    loaders translate; nothing else does.
    """

    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            len(self.layers) <= MAX_FEATURE_LAYERS,
            "feature layers",
            len(self.layers),
            f"at most {MAX_FEATURE_LAYERS}",
        )
        for layer in self.layers:
            require(layer >= FINAL, "feature layer", layer, "at least 0, -1 (embedding), -2 (final)")

    @property
    def any(self) -> bool:
        """Whether there is anything to send."""
        return bool(self.layers)


EMBEDDING = -1
FINAL = -2
NO_FEATURES = FeatureNeed()
"""The need of drafters that read tokens alone."""


class FeatureType(StrEnum):
    """The type of hidden states on the wire. int8 has a scale for each layer of a row, as layers differ in size."""

    FLOAT16 = "float16"
    INT8 = "int8"

    @property
    def size(self) -> int:
        """Bytes of one value."""
        return 2 if self is FeatureType.FLOAT16 else 1

    def row_bytes(self, layers: int, hidden: int) -> int:
        """Bytes of one token's hidden states."""
        return layers * (hidden * self.size + (4 if self is FeatureType.INT8 else 0))


@dataclass(frozen=True)
class FeatureOffer:
    """The hidden states that a target can send: those of `layers` decoder layers, each `hidden` values wide."""

    layers: int
    hidden: int

    def __post_init__(self) -> None:
        require(self.layers >= 1, "feature offer layers", self.layers, "at least 1")
        require(self.hidden >= 1, "feature offer hidden", self.hidden, "at least 1")

    def check(self, need: FeatureNeed) -> None:
        """Refuse what this target can't send.

        Raises:
            Unsupported: naming the layer that it lacks, or the bytes of a row that no message holds.
        """
        for layer in need.layers:
            if layer >= self.layers:
                raise Unsupported(f"feature layer = {layer}: must be below {self.layers}, the target's layers")
        size = FeatureType.FLOAT16.row_bytes(len(need.layers), self.hidden)
        if size > MAX_FEATURE_BYTES:
            raise Unsupported(
                f"feature row bytes = {size}: must be at most {MAX_FEATURE_BYTES}, those of one message"
            )


@dataclass(frozen=True)
class FeatureRequest:
    """The hidden states that a session asks for, from `first_position` on: it has those of the tokens before."""

    need: FeatureNeed
    dtype: FeatureType = FeatureType.FLOAT16
    first_position: int = 0

    def __post_init__(self) -> None:
        require(self.need.any, "feature request layers", self.need.layers, "at least 1")


@dataclass(frozen=True)
class Features:
    """Hidden states of the committed tokens from `first_position` on, in the order of the session's need.

    `data` holds little-endian values of `shape` [rows, layers, hidden]. For int8, `scales` [rows · layers] has the
    factor of each layer of a row. `paceline.engine.features` reads the values; on the way they are only cut into
    rows.
    """

    session_id: int
    first_position: int
    dtype: FeatureType
    shape: tuple[int, int, int]
    data: bytes = field(repr=False)
    scales: tuple[float, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        dimensions = len(self.shape) == 3 and min(self.shape) >= 1
        require(dimensions, "features shape", self.shape, "[rows, layers, hidden], at least 1 each")
        rows, layers, hidden = self.shape
        require(layers <= MAX_FEATURE_LAYERS, "features layers", layers, f"at most {MAX_FEATURE_LAYERS}")
        size = rows * layers * hidden * self.dtype.size
        require(len(self.data) == size, "features bytes", len(self.data), f"{size}, shape times element size")
        require(self.size <= MAX_FEATURE_BYTES, "features bytes", self.size, f"at most {MAX_FEATURE_BYTES}")
        scales = rows * layers if self.dtype is FeatureType.INT8 else 0
        require(len(self.scales) == scales, "features scales", len(self.scales), f"{scales}")
        for scale in self.scales:
            require(math.isfinite(scale) and scale >= 0, "features scale", scale, "finite and at least 0")

    @property
    def rows(self) -> int:
        """The number of tokens whose hidden states these are."""
        return self.shape[0]

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first_position + self.rows

    @property
    def size(self) -> int:
        """Bytes of values and scales."""
        return len(self.data) + 4 * len(self.scales)

    def within(self, start: int, end: int) -> Iterator[Features]:
        """The part for the positions [start, end), if there is any."""
        first, last = max(start, self.first_position), min(end, self.end)
        if first >= last:
            return
        if (first, last) == (self.first_position, self.end):
            yield self
            return
        low, high = first - self.first_position, last - self.first_position
        rows, layers, hidden = self.shape
        row_bytes, row_scales = len(self.data) // rows, len(self.scales) // rows
        yield replace(
            self,
            first_position=first,
            shape=(high - low, layers, hidden),
            data=self.data[low * row_bytes : high * row_bytes],
            scales=self.scales[low * row_scales : high * row_scales],
        )
