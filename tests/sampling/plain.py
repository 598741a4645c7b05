"""Plain references, written from the definitions and sharing no code with the package."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.sampling import NoiseKey, SamplingParams

Text = tuple[int, ...]
Table = dict[tuple[int, ...], NDArray[np.float64]]
"""A distribution [V] for each prefix."""


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Philox4x32-10 on Python integers (Salmon et al., SC11)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def words(key: NoiseKey, stream: int, position: int, ids: Sequence[int], round_key: int = 0) -> list[int]:
    """The integer of each vocabulary id."""
    seed = (key.seed & 0xFFFFFFFF, key.seed >> 32)
    tag = stream | key.sample_index << 8
    return [philox((i >> 2, position, round_key, tag), seed)[i & 3] for i in ids]


def exponential(word: int) -> np.float32:
    """E of one integer."""
    return np.float32(-math.log1p(-(word + 0.5) / 2**32))


def ranking(scores: NDArray[np.floating], drawn: NDArray[np.float32]) -> list[int]:
    """Finite ids by score - log E, best first, ties to the lowest id."""
    finite = [i for i, score in enumerate(scores) if score > -math.inf]
    return sorted(finite, key=lambda i: (-(float(scores[i]) - math.log(float(drawn[i]))), i))


def coupled_match(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """P(both draw the same token from shared noise) = Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i) (2408.07978)."""
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1.0 / np.maximum(p / p[i], q / q[i]).sum() for i in both))


def texts(row: Callable[[Text], Sequence[float]], length: int, end: int | None = None) -> dict[Text, float]:
    """The chance of every text up to its end token, or of `length` tokens; `row`: p of the token after a text."""
    ended: dict[Text, float] = {}
    running: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Text, float] = {}
        for text, mass in running.items():
            for token, p in enumerate(row(text)):
                if p > 0:
                    (ended if token == end else longer)[(*text, token)] = mass * float(p)
        running = longer
    return ended | running


def processed_row(
    logits: Sequence[float], prompt: Text, output: Text, params: SamplingParams, end: int, endings: Sequence[str] = ()
) -> list[float]:
    """p after an output whose ids are letters, a grammar a regex; `endings` complete its beginnings."""
    history, biases = (*prompt, *output), dict(params.logit_bias)
    scores = [float(logit) + biases.get(token, 0.0) for token, logit in enumerate(logits)]
    for token in range(len(scores)):
        if token in history:
            scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
        count = output.count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        bad = any((*history, token)[-len(word) :] == word for word in params.bad_words)
        early = token == end and len(output) < params.min_tokens
        if bad or early or (params.grammar and not _may_come(params.grammar.text, output, token, end, endings)):
            scores[token] = -math.inf
    weights = [math.exp(score / params.temperature) for score in scores]
    return [weight / sum(weights) for weight in weights]


def _may_come(language: str, output: Text, token: int, end: int, endings: Sequence[str]) -> bool:
    text = "".join(chr(97 + each) for each in output)
    if token == end:
        return re.fullmatch(language, text) is not None
    return any(re.fullmatch(language, text + chr(97 + token) + ending) for ending in endings)


def random_table(rng: np.random.Generator, vocab_size: int, depth: int, alpha: float = 1.0) -> Table:
    """Random distributions for every prefix shorter than `depth`."""
    table: Table = {}
    prefixes: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        for prefix in prefixes:
            table[prefix] = rng.dirichlet([alpha] * vocab_size)
        prefixes = [(*prefix, v) for prefix in prefixes for v in range(vocab_size)]
    return table


def coupled_joint(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """P(draft draws x, target draws y) when both race one field of Exp(1) noise, in closed form. [V, V].

    For x = i, y = j != i let r = E_i / E_j: it lies in (p_i / p_j, q_i / q_j), every other E_v exceeds
    E_j max(r q_v / q_i, p_v / p_j), and the density of r is C(r)^-2 with C piecewise linear.
    """
    size = len(p)
    joint = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            if q[i] == 0 or p[j] == 0:
                continue
            if i == j:
                joint[i, i] = 1 / sum(max(p[v] / p[i], q[v] / q[i]) for v in range(size))
            else:
                joint[i, j] = _mismatch(p, q, i, j)
    return joint


def _mismatch(p: NDArray[np.float64], q: NDArray[np.float64], i: int, j: int) -> float:
    low, high = p[i] / p[j], (math.inf if q[j] == 0 else q[i] / q[j])
    if low >= high:
        return 0.0
    others = [v for v in range(len(p)) if v not in (i, j)]
    kinks = {p[v] / p[j] * q[i] / q[v] for v in others if q[v] > 0}
    edges = [low, *sorted(k for k in kinks if low < k < high), high]
    total = 0.0
    for left, right in pairwise(edges):
        middle = left + 1 if math.isinf(right) else (left + right) / 2
        alpha, beta = 1.0, 1.0
        for v in others:
            if middle * q[v] / q[i] > p[v] / p[j]:
                beta += q[v] / q[i]
            else:
                alpha += p[v] / p[j]
        end = 0.0 if math.isinf(right) else 1 / (alpha + beta * right)
        total += (1 / (alpha + beta * left) - end) / beta
    return total


def last_in_draft(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """V = 3: P(the target's token is the draft's third), in closed form: each other E_i / E_j lies in an interval."""
    total = 0.0
    for j in range(3):
        a, b = (i for i in range(3) if i != j)
        bounds = [(p[i] / p[j], q[i] / q[j]) for i in (a, b)]
        if any(low >= high for low, high in bounds):
            continue
        (low_a, high_a), (low_b, high_b) = bounds
        total += (
            1 / (1 + low_a + low_b) - 1 / (1 + low_a + high_b) - 1 / (1 + high_a + low_b) + 1 / (1 + high_a + high_b)
        )
    return total
