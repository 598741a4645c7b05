"""Tiny engines with written-down distributions, and engines that take a stated time.

A row's logits depend on the hash of its whole token path, and the hash is kept
per row where a real model keeps keys and values. So a wrong rollback, a wrong
compaction or crossed sessions give wrong logits, as they would there.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from paceline.engine.features import FeatureRows
from paceline.engine.interface import Engine, EngineInfo, Logits, StepItem, StepPlan
from paceline.engine.paths import PathEngine
from paceline.engine.wrapped import WrappedEngine
from paceline.models.table_names import TableSpec
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.features import FINAL, FeatureNeed, FeatureOffer
from paceline.protocol.handshake import Fingerprint
from paceline.runtime.config import EngineSettings

_SET_TIMERSLACK = 29
"""prctl's option; its argument is in nanoseconds."""
_MODULUS = (1 << 61) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15 % _MODULUS
_EMPTY_PATH = 0x243F6A8885A308D3 % _MODULUS


TABLE_FEATURES = FeatureOffer(layers=4, hidden=8)
"""A table model has no hidden states; it makes them of its path's hash, so that tests can tell whose they are."""
_Row = tuple[int, tuple[int, ...]]
"""A row's state, from its ancestors: the hash, and with a finite order the last tokens."""
_MANY_SESSIONS = EngineSettings(max_num_seqs=65536)


class TableModel:
    """The distribution: logits after a history are row `context_of(history)` of one table."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        table = _normal_table(spec.seed, spec)
        if spec.noise > 0:
            table = (1 - spec.noise) * table + spec.noise * _normal_table(spec.noise_seed, spec)
        table *= spec.sharpness * _levels(spec.seed, spec.sharpness_spread, spec.contexts)
        if spec.disturb > 0:
            table += _disturbance(spec)
        if spec.invert:
            table *= -1
        self._table: NDArray[np.float32] = table.astype(np.float32)  # [contexts, V]

    def logits(self, history: Sequence[int]) -> NDArray[np.float32]:
        """Logits [V] of the token that follows `history` (at least one token)."""
        return self.row(_hash_of(history[-self.spec.order :] if self.spec.order else history))

    def row(self, path_hash: int) -> NDArray[np.float32]:
        """Logits [V] for a path's hash; a view, not to be written to."""
        return self.context(_mix(path_hash) % self.spec.contexts)

    def context(self, number: int) -> NDArray[np.float32]:
        """Logits [V] of one of the `contexts` rows of the table; a view, not to be written to."""
        row: NDArray[np.float32] = self._table[number]
        return row


def _hash_of(tokens: Sequence[int], path_hash: int = _EMPTY_PATH) -> int:
    """Hash of a path with some tokens more."""
    for token in tokens:
        path_hash = (path_hash * _MULTIPLIER + token + 1) % _MODULUS
    return path_hash


def table_features(tokens: Sequence[int], need: FeatureNeed, order: int = 0) -> FeatureRows:
    """A table model's features of the last of these tokens: [layers · hidden], exact in float16."""
    path = _hash_of(tokens[-order:] if order else tokens)
    features: FeatureRows = np.concatenate([_state(path, layer) for layer in need.layers])
    return features


def _state(path_hash: int, layer: int) -> NDArray[np.float32]:
    """Bytes of a hash of path and layer, as numbers in [-8, 8)."""
    digest = _mix(_hash_of((layer - FINAL,), path_hash)).to_bytes(TABLE_FEATURES.hidden, "little")
    return (np.frombuffer(digest, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(16)


class TableEngine(PathEngine[_Row]):
    """A table model behind the engine interface; `Engine` says what its methods promise."""

    def __init__(self, spec: TableSpec, settings: EngineSettings = _MANY_SESSIONS) -> None:
        self._model = TableModel(spec)
        self._order = spec.order
        tokenizer = TableTokenizer(spec.vocab, spec.eos_token_id, spec.added_tokens)
        fingerprint = Fingerprint(
            spec.distribution, tokenizer.fingerprint, spec.vocab, f"table-1 {spec.distribution}"
        )
        super().__init__(EngineInfo(fingerprint, spec.max_length, spec.max_kv_rows, TABLE_FEATURES), settings)
        self._paths: dict[int, list[_Row]] = {}
        self._needs: dict[int, FeatureNeed] = {}
        self._latest: dict[int, list[int]] = {}
        """Hashes of the new rows of the latest step, by session."""

    def close(self, session: int) -> None:  # noqa: D102
        super().close(session)
        self._needs.pop(session, None)

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._extend_paths(plan)
        self._latest = {
            item.session: [path_hash for path_hash, _ in self._paths[item.session][item.base_length :]]
            for item in plan.items
        }
        return [self._logits_of(item) for item in plan.items]

    def keep_features(self, session: int, need: FeatureNeed) -> None:
        """As `FeatureSource`."""
        self._needs[session] = need

    def features(self, session: int) -> FeatureRows:
        """As `FeatureSource`."""
        layers = self._needs[session].layers
        rows = [np.concatenate([_state(path, layer) for layer in layers]) for path in self._latest[session]]
        return np.stack(rows)

    def _logits_of(self, item: StepItem) -> Logits:
        logits = np.empty((len(item.logit_rows), self._model.spec.vocab), np.float32)
        for out, (path_hash, _) in enumerate(self._logit_states(item)):
            logits[out] = self._model.row(path_hash)
        return logits

    def _next_state(self, state: _Row | None, token: int) -> _Row:
        path_hash, recent = state or (_EMPTY_PATH, ())
        if not self._order:
            return _hash_of((token,), path_hash), ()
        recent = (*recent, token)[-self._order :]
        return _hash_of(recent), recent


class SimulatedEngine(WrappedEngine):
    """Another engine whose step lasts at least `step_ms + row_ms · rows`.

    The wait is a sleep in the executor's thread, so several simulated services keep
    their times on one core. Linux may end a sleep 50 µs late to spare wake-ups;
    not this one.
    """

    def __init__(self, inner: Engine, step_ms: float, row_ms: float = 0.0) -> None:
        super().__init__(inner)
        self._step_ms = step_ms
        self._row_ms = row_ms

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        ends = time.perf_counter() + (self._step_ms + self._row_ms * plan.rows) / 1e3
        logits = self._inner.step(plan)
        _wake_on_time(threading.get_ident())
        time.sleep(max(0.0, ends - time.perf_counter()))
        return logits


@lru_cache
def _wake_on_time(thread_id: int) -> None:
    """Let no sleep of the calling thread last longer than it must."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_TIMERSLACK, 1)


def load_table(model: str, settings: EngineSettings = _MANY_SESSIONS) -> Engine:
    """Build the engine of a `table:` name, simulated if the name states a time."""
    spec = TableSpec.parse(model)
    engine = TableEngine(spec, settings)
    if spec.step_ms or spec.row_ms:
        return SimulatedEngine(engine, spec.step_ms, spec.row_ms)
    return engine


def _normal_table(seed: int, spec: TableSpec) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal((spec.contexts, spec.vocab))


def _disturbance(spec: TableSpec) -> NDArray[np.float64]:
    """The errors of a draft's logits [contexts, V]; heavy-tailed where `disturb_tail` says so."""
    rng = np.random.default_rng((spec.noise_seed, spec.seed))
    shape = (spec.contexts, spec.vocab)
    errors = rng.standard_normal(shape)
    if spec.disturb_tail > 0:
        # E[exp(2(t z - t²))] = 1, so the tail leaves the standard deviation as it is.
        errors *= np.exp(spec.disturb_tail * rng.standard_normal(shape) - spec.disturb_tail**2)
    errors *= spec.disturb * _levels(spec.noise_seed, spec.disturb_spread, spec.contexts)
    return errors


def _levels(seed: int, spread: float, contexts: int) -> NDArray[np.float64]:
    """exp(spread · z) [contexts, 1] with z the normal quantiles in a seeded order.

    Quantiles and not draws, so that every seed gives the same mixture of contexts.
    """
    if not spread:
        return np.ones((contexts, 1))
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / contexts) for i in range(contexts)])
    order = np.random.default_rng((seed, contexts)).permutation(contexts)
    levels: NDArray[np.float64] = np.exp(spread * quantiles[order])[:, np.newaxis]
    return levels


def _mix(value: int) -> int:
    """Spread a path hash over all bits, so that `% contexts` sees every token of the path."""
    value ^= value >> 31
    value = value * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 29
