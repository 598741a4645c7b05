"""A trace of running services as a sample: their shadow ranks in place of passes, their own times in place of ours.

`paceline bench record` writes one. Its ranks are single draws, not averages, so they are noisier than passes over as
many tokens. Positions whose shadow never came count as wrong. A trace has no probabilities of the target, so there is
no overlap, KL or entropy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.protocol.errors import require
from paceline.protocol.proposal import NGRAM
from paceline_lab.plan.options import Origin
from paceline_lab.predict.cycle import StepTimes
from paceline_lab.predict.figures import RANKS
from paceline_lab.predict.matching import MATCH_DEPTHS
from paceline_lab.predict.positions import ENDLESS, DrafterPositions
from paceline_lab.predict.rounds import ProposalShape
from paceline_lab.predict.verdict import Candidates
from paceline_lab.simulate.trace import FORMAT, Trace, TracedRequest, TracedSetting, match_shadow, read_trace

_READ_BYTES = 200


def is_trace(file: Path) -> bool:
    """Return whether a sample is a trace, by its first bytes."""
    try:
        with file.open("rb") as stream:
            return f'"format": "{FORMAT}"'.encode() in stream.read(_READ_BYTES)
    except OSError:
        return False


def target_of(sample: Path, name: str) -> str:
    """Return the model that a trace was recorded of; empty: the sample is no trace, or the trace doesn't say.

    Raises:
        InvalidInput: a damaged trace, or one of another model than `name` (empty: of any).
    """
    if not is_trace(sample):
        return ""
    model = read_trace(sample).setting.notes.get("model", "")
    require(not name or not model or name == model, "target", name, f"{model}, of which the trace is")
    return model


def require_texts(file: Path) -> None:
    """Return if a sample may hold texts.

    Raises:
        InvalidInput: it is a trace.
    """
    require(
        not is_trace(file),
        "sample",
        str(file),
        "prompts or texts: a trace has each token's rank in the draft's order, but neither its id in the vocabulary, "
        "which both models have to read, nor their probabilities, by which they part. Write the prompts that were "
        'recorded as lines {"prompt": "…"} and run `paceline branches TARGET --drafter DRAFT '
        "--sample PROMPTS.jsonl`; "
        f"what a trace tells of acceptance, `paceline plan --sample {file}` shows",
    )


def traced_candidates(trace: Trace, drafter: str, shapes: tuple[ProposalShape, ...]) -> Candidates:
    """Return the recorded draft under a name, if there was one, and matches."""
    positions = {NGRAM: [traced_matches(request) for request in trace.requests]}
    if trace.setting.draft.is_known:
        positions[drafter] = [traced_draft(request) for request in trace.requests]
    return Candidates(positions, shapes)


def traced_draft(request: TracedRequest) -> DrafterPositions:
    """Return the draft's positions in a request, from its shadow."""
    ranks = np.array(request.ranks, np.int32)
    ranks[ranks > RANKS] = 0
    hits = (ranks[:, None] > 0) & (ranks[:, None] <= np.arange(1, RANKS + 1))
    return _positions(hits[:, None].astype(float), np.full(ranks.size, ENDLESS, np.int32), ranks, request.chances)


def traced_matches(request: TracedRequest) -> DrafterPositions:
    """Return the positions of matches in a request."""
    tokens = request.tokens
    match_lengths, match_right = match_shadow(request.prompt, request.answer)
    reach = np.zeros((tokens, MATCH_DEPTHS, RANKS))
    for place, right in enumerate(match_right):
        depths = np.arange(min(right, MATCH_DEPTHS, tokens - place))
        reach[place + depths, depths] = 1.0
    lengths = np.where(np.array(match_lengths) > 0, MATCH_DEPTHS, 0).astype(np.int32)
    return _positions(reach, lengths, reach[:, 0, 0].astype(np.int32), reach[:, 0, 0])


def _positions(
    reach: np.ndarray, lengths: np.ndarray, ranks: np.ndarray, confidence: np.ndarray | tuple[float, ...]
) -> DrafterPositions:
    no_ids, nothing = np.full(ranks.size, -1, np.int32), np.zeros(ranks.size)
    first_chances = np.array(confidence, np.float64)
    return DrafterPositions(reach, lengths, ranks, no_ids, no_ids, first_chances, nothing, nothing, nothing, nothing)


def traced_times(setting: TracedSetting, drafter: str, *, apart: bool) -> StepTimes:
    """Return the times of steps and trips in the trace.

    Services don't state their hardware, and a target states the same times beside a draft as alone until a draft has
    worked beside it. So whether drafts are `apart` is an argument.
    """
    drafts = {drafter: setting.draft} if setting.draft.is_known else {}
    return StepTimes(
        setting.alone,
        drafts,
        target_trip_ms=2 * setting.target_one_way_ms + setting.coordinator_ms,
        draft_trip_ms=2 * setting.draft_one_way_ms,
        apart=apart,
        origins={"all times": Origin.RECORDED},
    )
