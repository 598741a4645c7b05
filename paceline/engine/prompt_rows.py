"""The limit of prompt rows that have logits in one step."""

from __future__ import annotations

PROMPT_LOGITS = 64 * 160 * 1024
"""Logits of prompts' rows in one step, at most: 40 MiB in float32.

That is 64 rows, a reproducible prompt's pass and the largest chunk that is a graph, of the largest vocabulary in use
here (151,936 ids). A smaller one has more rows, SmolLM2's 213: the default chunk of 128 is never cut. What they
add to a step is bounded, too: log-softmax and the best 20 take 2.5 ns an id on one core of an AMD EPYC, 26 ms in all.
"""


def prompt_logit_rows(vocab_size: int) -> int:
    """Rows of prompts that have logits in one step, at most."""
    return max(1, PROMPT_LOGITS // vocab_size)
