"""An engine around another one; subclasses change its steps."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.features import FeatureRows, feature_source
from paceline.engine.interface import NO_PREFIX, Engine, EngineInfo, Logits, Prefix, StepPlan
from paceline.protocol.features import FeatureNeed


class WrappedEngine:
    """Passes every call on; `Engine` says what its methods promise."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def info(self) -> EngineInfo:  # noqa: D102
        return self._inner.info

    @property
    def kv_rows(self) -> int:  # noqa: D102
        return self._inner.kv_rows

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        return self._inner.open(session, max_rows, prefix)

    def close(self, session: int) -> None:  # noqa: D102
        self._inner.close(session)

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        return self._inner.step(plan)

    def keep_features(self, session: int, need: FeatureNeed) -> None:
        """As `FeatureSource`, where the inner engine is one."""
        feature_source(self._inner).keep_features(session, need)

    def features(self, session: int) -> FeatureRows:
        """As `FeatureSource`, where the inner engine is one."""
        return feature_source(self._inner).features(session)
