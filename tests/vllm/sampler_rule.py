"""What our plugins rest on in vLLM's V2 runner, restated: the sampler around a logits processor, and a speculator.

Read in vLLM 0.32 and 0.33, below `vllm/v1/worker/gpu`: `sample/penalties.py` before the processor, and
`spec_decode/rejection_sampler_utils.py` behind it. `READ` are the files as they were read: another file may have
another rule. `tests/compat/vllm_v2.py` compares all this with the installed vLLM and its kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROPOSE = (
    *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
    *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds", "dp_sync_state"),
    *("dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens"),
)
"""Parameters of a speculator's `propose`."""
Rows = NDArray[np.floating[Any]]
FILES = (
    *("sample/gumbel.py", "sample/logits_processor/interface.py", "sample/penalties.py", "sample/sampler.py"),
    *("spec_decode/rejection_sampler.py", "spec_decode/rejection_sampler_utils.py"),
    *("spec_decode/ngram/speculator.py", "input_batch.py", "states.py"),
)
READ: dict[str, str] = {
    "0.32.0": "3094367bbd70ea88e87671db943cf2a718e515adca809418d315545ec8825652",
    "0.33.0": "d730c8ef31ff26fe6c71355fa0c126b2498244e55536631cd6814ee8b1770c3c",
}
"""Of a version, the digest of its files."""


def digest(vllm: Path) -> str:
    contents = b"".join((vllm / "v1/worker/gpu" / file).read_bytes() for file in FILES)
    return hashlib.sha256(contents).hexdigest()


def check_source(vllm: Path, version: str) -> str:
    """A line for a report.

    Raises:
        AssertionError: the version's files are not those that were read.
    """
    assert version in READ, f"vLLM {version} was not read: read {', '.join(FILES)} and note {digest(vllm)!r}"
    assert digest(vllm) == READ[version], f"vLLM {version} has other files than were read: {', '.join(FILES)}"
    return f"vLLM {version}: the sampler's source is the one that was read"


def penalised(logits: Rows, prompt: Sequence[int], output: Sequence[int], asked: Any) -> Rows:
    """A row behind these tokens; drafted tokens before it are output."""
    counts = np.bincount(np.array(output, int), minlength=len(logits))
    scale = np.ones(len(logits))
    scale[[*prompt, *output]] = asked.repetition_penalty
    scaled = np.where(logits > 0, logits / scale, logits * scale)
    row: Rows = (scaled - asked.frequency_penalty * counts - asked.presence_penalty * (counts > 0)).astype(
        logits.dtype
    )
    return row


def commit(
    rows: Rows, drafted: Sequence[int], draws: np.random.Generator, drafts: Rows | None = None, *, block: bool = False
) -> list[int]:
    """What a request's step commits at a temperature above 0.

    Args:
        rows: [drafted + 1, V] processed logits.
        drafted: token ids; -1: a place without one.
        draws: of u in (0, 1), and of Gumbel noise.
        drafts: [drafted, V], the draft's own logits; None: it is certain of its tokens.
        block: block verification.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        target = _log_softmax(rows.astype(np.float64))
        draft = None if drafts is None else _log_softmax(drafts.astype(np.float64))
        count = (_accept_block if block else _accept_each)(target, drafted, draft, draws)
        last = _recovered(target, drafted, draft, count, block=block)
    return [*drafted[:count], int((last + draws.gumbel(size=len(last))).argmax())]


def _log_softmax(rows: Rows) -> Rows:
    shifted = rows - rows.max(axis=1, keepdims=True)
    result: Rows = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _ratio(target: Rows, drafted: Sequence[int], draft: Rows | None, place: int) -> float:
    """log p(x) − log q(x) of a drafted token."""
    token = drafted[place]
    return float(target[place, token] - (0.0 if draft is None else draft[place, token]))


def _accept_each(target: Rows, drafted: Sequence[int], draft: Rows | None, draws: np.random.Generator) -> int:
    for place, token in enumerate(drafted):
        if token < 0 or not _ratio(target, drafted, draft, place) > np.log(1 - draws.random()):
            return place
    return len(drafted)


def _joint(target: Rows, drafted: Sequence[int], draft: Rows | None, count: int) -> float:
    """The running ratio of so many tokens, which never passes 1."""
    total = 0.0
    for place in range(count):
        if drafted[place] >= 0:
            total = min(total + _ratio(target, drafted, draft, place), 0.0)
    return float(np.exp(total))


def _accept_block(target: Rows, drafted: Sequence[int], draft: Rows | None, draws: np.random.Generator) -> int:
    count = 0
    for place, token in enumerate(drafted):
        if token < 0:
            break
        joint = _joint(target, drafted, draft, place + 1)
        chance = joint
        if place + 1 < len(drafted) and drafted[place + 1] >= 0:
            p = np.exp(target[place + 1])
            rest = joint * (1 - p[drafted[place + 1]])
            if draft is not None:
                rest = float(np.maximum(joint * p - np.exp(draft[place + 1]), 0).sum())
            whole = rest + 1 - joint
            chance = rest / whole if whole > 0 else 1.0
        if 1 - draws.random() <= chance:
            count = place + 1
    return count


def _recovered(target: Rows, drafted: Sequence[int], draft: Rows | None, count: int, *, block: bool) -> Rows:
    """Log weights of the token behind the accepted ones."""
    row: Rows = target[count].copy()
    if count == len(drafted) or drafted[count] < 0:
        return row
    if draft is None:
        row[drafted[count]] = -np.inf
        return row
    if block and count:
        row += np.log(_joint(target, drafted, draft, count))
    ratio = np.exp(draft[count] - row)
    rest: Rows = np.where(ratio < 1, row + np.log1p(-np.minimum(ratio, 1)), -np.inf)
    return rest
