"""One request's features on their way from its target to its draft service, which alone reads them.

They are kept as they came, the latest within a limit, for a draft session that is opened later or again. Missing rows
cost the drafter some acceptance: nothing waits for them here.
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
    """What a request's drafter reads of its target.

    Attributes:
        need: what the target is asked for; set before the target's session is opened.
        end: the position behind the last one whose features have come.
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
        self._kept: deque[Features] = deque()
        self._kept_bytes = 0
        self._generated_bytes = 0

    def offered(self, targets: Iterable[Welcome]) -> None:
        """See whether any target that the request may be placed on can send what is needed."""
        refusals = [_why_not(self.need, welcome) for welcome in targets]
        if refusals and all(refusals):
            self._refuse(refusals[0])

    def request(self, target: Welcome | None, committed: int) -> FeatureRequest | None:
        """What a session with so many committed tokens asks of the target that it is opened on; None: nothing.

        Features of other tokens came from a target whose verdicts are lost.
        """
        if not self.need.any or target is None:
            return None
        self._refuse(_why_not(self.need, target))
        if self._refusal:
            return None
        kept = [each for each in self._kept if each.first_position < committed]
        self._kept = deque(cut for each in kept for cut in each.within(0, committed))
        self._kept_bytes = sum(each.size for each in self._kept)
        self.end = min(self.end, committed)
        return FeatureRequest(self.need, self._dtype, self.end)

    def meets(self, need: FeatureNeed) -> bool:
        """Whether a drafter gets what it reads."""
        return not need.any or (need == self.need and not self._refusal)

    def take(self, features: Features) -> None:
        """Take in what the target sent; what has come before, or was not asked for, is dropped."""
        if features.shape[1] != len(self.need.layers):
            return
        self.total += features.size
        generated = next(features.within(self._prompt_length, features.end), None)
        self._generated_bytes += 0 if generated is None else generated.size
        metrics.features_came(features.size)
        for new in features.within(self.end, features.end):
            self._kept.append(new)
            self._kept_bytes += new.size
        while self._kept_bytes > self._most_bytes:
            self._kept_bytes -= self._kept.popleft().size
        self.end = max(self.end, features.end)
        self.on_rows()

    def between(self, start: int, end: int) -> Sequence[Features]:
        """Those of positions [start, end) that are kept, in order."""
        found: list[Features] = []
        for kept in reversed(self._kept):
            if kept.end <= start:
                break
            found += kept.within(start, end)
        return found[::-1]

    def take_generated_bytes(self) -> int:
        """Bytes of generated tokens that have come since the last call."""
        taken, self._generated_bytes = self._generated_bytes, 0
        return taken

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        if reason:
            _log_refusal(self.need, reason)


def is_offered(need: FeatureNeed, targets: Iterable[Welcome]) -> bool:
    """Whether any of the targets can send what a drafter reads; where none is known yet, they may."""
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
    """Once for each: requests after the first have the same drafter and targets."""
    logger.warning("drafter left out, its requests go without it: layers=%s reason=%s", need.layers, reason)
