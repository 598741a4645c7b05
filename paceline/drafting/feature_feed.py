"""One request's features on their way from its target to its draft service, which alone reads them.

The latest features are kept, within a limit, for a draft session that is opened later or again. Missing rows cost the
drafter some acceptance; nothing waits for them here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from paceline.protocol.errors import Unsupported
from paceline.protocol.features import (
    MAX_KEPT_FEATURE_BYTES,
    NO_FEATURES,
    FeatureNeed,
    FeatureRequest,
    Features,
    FeatureType,
)
from paceline.protocol.handshake import Welcome
from paceline.runtime import metrics

logger = logging.getLogger(__name__)


class FeatureFeed:
    """A buffer of the target's features for one request's drafter.

    Attributes:
        need: the features that the target is asked for; set before the target's session is opened.
        end: the position after the last one whose features have come.
        total: bytes that have come.
    """

    def __init__(
        self,
        prompt_length: int = 1,
        dtype: FeatureType = FeatureType.FLOAT16,
        most_bytes: int = MAX_KEPT_FEATURE_BYTES,
    ) -> None:
        self.need = NO_FEATURES
        self.end = self.total = 0
        self.on_rows: Callable[[], None] = lambda: None
        """Called when features have come."""
        self._prompt_length = prompt_length
        self._dtype = dtype
        self._most_bytes = most_bytes
        self._refusal = ""
        self._buffer: deque[Features] = deque()
        self._buffer_bytes = 0
        self._generated_bytes = 0

    def check_targets(self, targets: Iterable[Welcome]) -> None:
        """Note whether any target that the request may be placed on can send what is needed."""
        refusals = [_why_not(self.need, welcome) for welcome in targets]
        if refusals and all(refusals):
            self._refuse(refusals[0])

    def request(self, target: Welcome | None, committed: int) -> FeatureRequest | None:
        """The request for features with which a target's session is opened; None: it gets none.

        Features beyond the `committed` tokens are dropped: they came from a target whose verdicts are lost.
        """
        if not self.need.any or target is None:
            return None
        self._refuse(_why_not(self.need, target))
        if self._refusal:
            return None
        earlier = [each for each in self._buffer if each.first_position < committed]
        self._buffer = deque(cut for each in earlier for cut in each.within(0, committed))
        self._buffer_bytes = sum(each.size for each in self._buffer)
        self.end = min(self.end, committed)
        return FeatureRequest(self.need, self._dtype, self.end)

    def meets(self, need: FeatureNeed) -> bool:
        """Whether a drafter gets what it reads."""
        return not need.any or (need == self.need and not self._refusal)

    def take(self, features: Features) -> None:
        """Add features from the target. Positions that have come before, and other layers, are dropped."""
        if features.shape[1] != len(self.need.layers):
            return
        self.total += features.size
        generated_part = next(features.within(self._prompt_length, features.end), None)
        self._generated_bytes += 0 if generated_part is None else generated_part.size
        metrics.features_came(features.size)
        for new in features.within(self.end, features.end):
            self._buffer.append(new)
            self._buffer_bytes += new.size
        while self._buffer_bytes > self._most_bytes:
            self._buffer_bytes -= self._buffer.popleft().size
        self.end = max(self.end, features.end)
        self.on_rows()

    def slice(self, start: int, end: int) -> Sequence[Features]:
        """The features at positions [start, end) that are in the buffer, in order."""
        parts: list[Features] = []
        for features in reversed(self._buffer):
            if features.end <= start:
                break
            parts += features.within(start, end)
        return parts[::-1]

    def take_generated_bytes(self) -> int:
        """Bytes of generated tokens that have come since the last call."""
        count, self._generated_bytes = self._generated_bytes, 0
        return count

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        if reason:
            _log_refusal(self.need, reason)


def is_available(need: FeatureNeed, targets: Iterable[Welcome]) -> bool:
    """Whether any of the targets can send what a drafter reads; true while no target is known."""
    refusals = [_why_not(need, target) for target in targets]
    return not refusals or not all(refusals)


def _why_not(need: FeatureNeed, target: Welcome) -> str:
    """Why a target can't send what a drafter reads; empty: it can."""
    if not need.any:
        return ""
    if target.features is None:
        return "the target sends no hidden states"
    try:
        target.features.check(need)
    except Unsupported as error:
        return error.message
    return ""


@lru_cache(maxsize=64)
def _log_refusal(need: FeatureNeed, reason: str) -> None:
    """Log a refusal once: later requests have the same drafter and targets."""
    logger.warning("drafter left out, its requests go without it: layers=%s reason=%s", need.layers, reason)
