"""Hidden states of the tokens that a step has committed, for sessions whose drafter reads them.

Under every acceptance rule the draws are keyed by the session's noise. So the target knows a round's outcome as soon
as it has drawn, and sends no rows of tokens that were not accepted. The rows follow the verdict, which does not wait
for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from paceline.engine.features import encode_features, feature_source
from paceline.engine.interface import Engine
from paceline.protocol.errors import PacelineError
from paceline.protocol.features import FeatureRequest, Features
from paceline.protocol.target import Verdict
from paceline.sampling import acceptance
from target_service.session import Session
from target_service.step import PrefillWork, RoundWork, Step, StepResult

logger = logging.getLogger(__name__)


def committed_features(engine: Engine, step: Step, result: StepResult) -> list[tuple[Session, Features]]:
    """The features of a step that has just run; called on the engine's thread, before its next step.

    A failure costs the drafter these rows and the session nothing.
    """
    features: list[tuple[Session, Features]] = []
    answers: list[Verdict | PacelineError | None] = [*result.answers, *(None for _ in step.prefills)]
    works: list[RoundWork | PrefillWork] = [*step.rounds, *step.prefills]
    for work, answer in zip(works, answers, strict=True):
        session = work.session
        if session.features is None or isinstance(answer, PacelineError):
            continue
        try:
            rows = committed_rows(work, answer)
            features += ((session, each) for each in _feature_messages(engine, work, session.features, rows))
        except Exception:
            logger.exception("features are lost: session=%d first_position=%d", session.id, work.item.base_length)
    return features


def committed_rows(work: RoundWork | PrefillWork, verdict: Verdict | None) -> list[int]:
    """The new rows of committed tokens: all of a chunk; of a round those up to its root, and the accepted path.

    Their positions are consecutive, from the item's base length on.
    """
    rows = len(work.item.token_ids)
    if isinstance(work, PrefillWork) or verdict is None or work.round_.proposal is None:
        return [*range(rows)]
    facts, proposal = work.session.facts, work.round_.proposal
    node = acceptance.decide(facts.acceptance, work.round_, verdict, facts.noise).node
    behind_root = rows - len(proposal)
    return [*range(behind_root), *(behind_root + each for each in proposal.path(node))]


def _feature_messages(
    engine: Engine, work: RoundWork | PrefillWork, request: FeatureRequest, rows: list[int]
) -> Iterator[Features]:
    first = work.item.base_length
    skip = max(0, request.first_position - first)
    if rows[skip:]:
        values = feature_source(engine).features(work.session.key)[rows[skip:]]
        yield from encode_features(work.session.id, first + skip, values, len(request.need.layers), request.dtype)
