"""Memory of the static engine on its device beside weights and KV. Pure.

Sizes are chosen, not tuned. Bytes are upper bounds of what the code allocates by torch's kernels; ours take less.
"""

from __future__ import annotations

from paceline.engine.attention import PRODUCT_COPIES, AttentionFacts
from paceline.engine.cuda.buckets import FEW_ROWS, GATHERED_ROWS, PAGE_ROWS, count_bucket, length_bucket
from paceline.engine.cuda.graphs import MAX_GRAPHS
from paceline.protocol.features import MAX_FEATURE_LAYERS, FeatureOffer
from paceline.runtime.config import EngineSettings

INPUT_INTEGERS = 1 << 20
"""Integers of the static input buffer."""
STATIC_ROWS = 1024
"""Most rows with logits up to which a step has static outputs, and so a graph: 64 sessions of 16 rows."""
CANDIDATE_NUMBERS = 2 + 3 * 128
"""Numbers of the static buffer of candidates for each of these rows."""
STATIC_STATES = 256 * MAX_FEATURE_LAYERS
"""Hidden states, of all rows and feature layers, up to which a step has static buffers for them, and so a graph."""
RACED_AT_ONCE = 32
"""Rows that race together; more would only need more memory."""
_RACE_BYTES = 96
"""Bytes of one id of one racing row: its block of noise as 64-bit integers, and a few floats."""
_MASK_BYTES = 24
"""Bytes of one key of one query, while its mask is made."""
_GRAPH_BYTES = 2 << 20
"""Bytes of one graph's own launches."""


def static_rows(settings: EngineSettings) -> int:
    """Rows with logits that have static outputs: no more than a step can have, padded."""
    return min(STATIC_ROWS, count_bucket(settings.max_step_rows))


def static_bytes(
    settings: EngineSettings,
    attention: AttentionFacts,
    max_length: int,
    vocab_size: int,
    features: FeatureOffer | None,
) -> int:
    """An upper bound of the static buffers, the padding page, and one step's gathered keys, mask and race.

    Graphs take as much again, one pool as large as a step, which they share, and their launches. Hidden states that
    the static buffers have no room for go to the host.
    """
    shape = attention.shape
    outputs = static_rows(settings) * (4 * vocab_size + 8 * CANDIDATE_NUMBERS)
    buffers = 8 * INPUT_INTEGERS + outputs + shape.row_bytes * PAGE_ROWS
    if features is not None:
        buffers += STATIC_STATES * features.hidden * shape.dtype.itemsize
    longest = length_bucket(max_length)
    keys = max(GATHERED_ROWS, longest) * shape.row_bytes // len(shape.layers)
    chunk = count_bucket(max(settings.prefill_chunk, FEW_ROWS))
    queries = max(GATHERED_ROWS * FEW_ROWS, longest * chunk)
    mask = queries * (len(attention.kinds) * shape.groups * shape.dtype.itemsize + _MASK_BYTES)
    scores = queries * shape.heads * 4 * PRODUCT_COPIES if attention.terms else 0
    step = buffers + keys + mask + scores + RACED_AT_ONCE * vocab_size * _RACE_BYTES
    graphs = settings.cuda_graphs and shape.device.type == "cuda"
    return 2 * step + MAX_GRAPHS * _GRAPH_BYTES if graphs else step
