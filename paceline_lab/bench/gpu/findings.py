"""What the GPU engine was expected to show, read off its code before it ran on a GPU, beside what a run shows.

A finding that says what is slow is confirmed where it is, one that was mended where it no longer shows
(docs/operations.md#gpus lists all). What needs a second GPU, or no measurement, is not here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from paceline.engine.cuda.buckets import PAGE_ROWS, common_shapes
from paceline.engine.cuda.candidates import RacedRows
from paceline.engine.cuda.footprint import static_bytes
from paceline.engine.cuda.graphs import GraphRunner
from paceline.engine.cuda.kernels import triton_kernels
from paceline.engine.cuda.noise import Race, check_race, race_candidates
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.interface import NO_FILTERS, Filters, Ranking, StepItem, StepPlan
from paceline.engine.memory import workspace_bytes
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.runtime.config import EngineSettings
from paceline.sampling.distribution import processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race_rows
from paceline_lab.bench.gpu.cases import median_ms

REPEATS = 10
MIXED_STEPS = 200
PLAN_MS, CAPTURE_MS, RACE_MS, TREE_MS, TOP_P_MS = 5.0, 50.0, 0.4, 0.2, 2.0
"""What the reading expects at least: of a plan of cuDNN's, a capture, a race, a tree's moves, top-p of a row."""


Finding = dict[str, object]
"""A row of the report's table: number, claim, what was measured, and whether it confirms the claim."""


@dataclass(frozen=True, eq=False)
class Ground:
    """What the measurements share: an engine with graphs, and the bytes per second of a large copy."""

    engine: StaticEngine
    settings: EngineSettings
    bandwidth: float

    @property
    def sessions(self) -> int:
        """Sessions that are used together."""
        return min(16, self.settings.max_num_seqs, self.engine.info.max_kv_rows // PAGE_ROWS)

    @property
    def captures(self) -> int:
        """Graphs captured so far."""
        runner = self.engine._runner
        return runner.captures if isinstance(runner, GraphRunner) else 0

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.engine.attention.shape.device

    def ms(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Return the median time of some work on the device."""

        def whole() -> None:
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return median_ms(whole, repeats)

    def random(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return random numbers."""
        return torch.randn(size, dtype=dtype or self.engine.attention.shape.dtype, device=self.device)

    def attention(self, queries: int, keys: int, *, sessions: int = 1) -> tuple[torch.Tensor, ...]:
        """Return a layer's queries, keys, values and mask; the heads that share keys are rows of one."""
        layer = self.engine.attention.shape.layers[0]
        rows = queries * layer.groups
        query = self.random(sessions, layer.kv_heads, rows, layer.key_width)
        key, value = (self.random(sessions, layer.kv_heads, keys, layer.key_width) for _ in range(2))
        return query, key, value, torch.zeros((sessions, 1, rows, keys), dtype=query.dtype, device=self.device)


Measurement = Callable[[Ground], tuple[str, bool]]


def cudnn_plans(ground: Ground) -> tuple[str, bool]:
    """Attend over ever new lengths, with cuDNN and without."""
    extra_ms = {}
    for with_cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        new_ms = []
        for keys in range(1001, 1001 + REPEATS):
            query, key, value, mask = ground.attention(1, keys + REPEATS * with_cudnn)
            attend = partial(functional.scaled_dot_product_attention, query, key, value, attn_mask=mask)
            start_s = time.perf_counter()
            attend()
            new_ms.append((time.perf_counter() - start_s) * 1e3)
        extra_ms[with_cudnn] = float(np.median(new_ms)) - ground.ms(attend)
    return (
        f"a new length, host, beyond a repeat: {extra_ms[True]:.2f} ms with cuDNN, {extra_ms[False]:.2f} without",
        extra_ms[True] > PLAN_MS,
    )


def gathered_keys(ground: Ground) -> tuple[str, bool]:
    """Gather the keys of 16 sessions of 1,024 rows, and attend over them."""
    pool, sessions, length = ground.engine._pool.rows, 16, 1024
    rows = torch.randint(pool.shape[2], (sessions * length,), device=ground.device)
    copy_ms = ground.ms(lambda: pool[0].index_select(1, rows))
    query, key, value, mask = ground.attention(1, length, sessions=sessions)
    attend_ms = ground.ms(lambda: functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    size = 2 * pool[0].nbytes // pool.shape[2] * len(rows)
    rate = size / copy_ms * 1e3
    text = f"a layer, 16 × 1,024 keys: gather {copy_ms:.3f} ms ({rate / 1e9:.0f} GB/s), attention {attend_ms:.3f} ms"
    return text, copy_ms > attend_ms


def long_session(ground: Ground) -> tuple[str, bool]:
    """Attend one row over many keys."""
    layers = len(ground.engine.attention.shape.layers)
    step_ms = []
    for keys in (1024, 8192):
        query, key, value, mask = ground.attention(1, keys)
        attend = partial(functional.scaled_dot_product_attention, query, key, value, attn_mask=mask)
        step_ms.append(layers * ground.ms(attend))
    size = 2 * key.nbytes * layers
    return (
        f"all layers, one session: {step_ms[0]:.2f} ms at 1,024 keys, {step_ms[1]:.2f} at 8,192, "
        f"floor {size / ground.bandwidth * 1e3:.2f}",
        step_ms[1] > 4 * size / ground.bandwidth * 1e3,
    )


def races(ground: Ground) -> tuple[str, bool]:
    """Race rows of the vocabulary, on a GPU by both kernels."""
    text, shows = _race_ms(ground, race_candidates)
    if ground.device.type == "cuda":
        try:
            race = triton_kernels().race
            check_race(ground.device, race)
            text += f"; in Triton's kernel, which is right: {_race_ms(ground, race)[0]}"
        except Exception as error:  # noqa: BLE001  # what a compiler raises is what a report should tell
            text += f"; Triton's kernel: {error!r}"
    return text, shows


def _race_ms(ground: Ground, race: Race) -> tuple[str, bool]:
    vocab_size, times = ground.engine.info.fingerprint.vocab_size, []
    for rows in (1, 32):
        logits = ground.random(rows, vocab_size, dtype=torch.float32)
        counters = torch.ones((rows, 4), dtype=torch.int64, device=ground.device)
        ones = torch.ones(rows, device=ground.device)
        times.append(ground.ms(partial(race, logits, counters, ones, 16)))
    return f"without a graph: {times[0]:.3f} ms for a row, {times[1]:.3f} for 32", times[0] > RACE_MS


def captures(ground: Ground) -> tuple[str, bool]:
    """Capture the common shapes: with these a service starts."""
    info, kinds = ground.engine.info, len(ground.engine.attention.kinds)
    shapes = common_shapes(16, info.longest_session, info.fingerprint.vocab_size, kinds)
    start_s, before = time.perf_counter(), ground.captures
    ground.engine.warm_up(shapes)
    count = ground.captures - before
    each_ms = (time.perf_counter() - start_s) * 1e3 / max(count, 1)
    return f"{count} of {len(shapes)} common shapes captured, {each_ms:.0f} ms each", each_ms > CAPTURE_MS


def mixed_traffic(ground: Ground) -> tuple[str, bool]:
    """Run steps of mixed sessions and rows, and count what is captured meanwhile."""
    engine, before = ground.engine, ground.captures
    source = random.Random(0)  # noqa: S311  # a load, no secret
    for _ in range(MIXED_STEPS):
        sessions, items, rankings = source.randint(1, ground.sessions), [], []
        for session in range(sessions):
            engine.open(session, PAGE_ROWS)
            rows = source.choice((1, 1, 1, 4, 5))
            items.append(StepItem(session, 0, (1,) * rows, logit_rows=tuple(range(rows))))
            rankings.append(Ranking(NoiseKey(session), 1.0, tuple(range(1, rows + 1))))
        engine.step_and_rank(StepPlan(tuple(items)), rankings)
        for session in range(sessions):
            engine.close(session)
    count = ground.captures - before
    return f"{count} captures in {MIXED_STEPS} steps of 1 to 16 sessions", count > MIXED_STEPS // 10


def filtered_draws(ground: Ground) -> tuple[str, bool]:
    """Draw a token of every session, by temperature alone, with top-p, and with top-p on the host."""
    engine, sessions, noise = ground.engine, range(ground.sessions), NoiseKey(1)
    plan = StepPlan(tuple(StepItem(session, 0, (1,), logit_rows=(0,)) for session in sessions))
    top_p = Filters(top_p=0.95)

    def draw(filters: Filters) -> None:
        rankings = [Ranking(noise, 1.0, (session,), 1, filters) for session in sessions]
        for answer in engine.step_and_rank(plan, rankings):
            assert isinstance(answer, RacedRows)
            answer.drawn_tokens()

    def draw_on_host() -> None:
        for session, logits in zip(sessions, engine.step(plan), strict=True):
            scores = processed_scores(logits, SamplingParams(top_p=top_p.top_p))
            race_rows(scores, 1, noise, Stream.DRAFT, (session,))

    for session in sessions:
        engine.open(session, PAGE_ROWS)
    alone_ms, top_p_ms = (ground.ms(partial(draw, filters)) for filters in (NO_FILTERS, top_p))
    host_ms = ground.ms(draw_on_host)
    for session in sessions:
        engine.close(session)
    text = f"a step of {len(sessions)} rows: temperature alone {alone_ms:.2f} ms, top-p {top_p_ms:.2f}, on the host "
    return f"{text}{host_ms:.2f}", top_p_ms - alone_ms > TOP_P_MS * len(sessions)


def prefill_masks(ground: Ground) -> tuple[str, bool]:
    """Attend a chunk over many keys with a mask, and causally without one."""
    queries, keys = (512, 32_768) if ground.device.type == "cuda" else (8, 64)
    query, key, value, mask = ground.attention(queries, keys)
    masked_ms = ground.ms(lambda: functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    bare_ms = ground.ms(lambda: functional.scaled_dot_product_attention(query, key, value))
    text = f"a layer, {queries} rows over {keys} keys: {masked_ms:.2f} ms with a mask, {bare_ms:.2f} without"
    return text, masked_ms > 2 * bare_ms


def prefill_chunks(ground: Ground) -> tuple[str, bool]:
    """Compute prompts by chunks of several sizes."""
    engine, rates = ground.engine, {}
    longest = min(engine.info.longest_session, 1024)
    for chunk in (min(128, longest // 2), longest):
        engine.open(0, longest)
        rates[chunk] = chunk / ground.ms(partial(engine.step, StepPlan((StepItem(0, 0, (1,) * chunk),)))) * 1e3
        engine.close(0)
    slow, fast = rates.values()
    text = ", ".join(f"{rate:.0f} tokens/s by chunks of {chunk}" for chunk, rate in rates.items())
    return text, fast > 1.5 * slow


def memory_of_graphs(ground: Ground) -> tuple[str, bool]:
    """Compare what the library holds with what was planned, once the graphs are there."""
    engine = ground.engine
    info = engine.info
    weights = sum(weight.nbytes for weight in engine._model.parameters())
    planned_bytes = weights + engine._pool.rows.nbytes
    width = engine._model.get_output_embeddings().weight.shape[0]
    planned_bytes += workspace_bytes(engine._model.config, ground.settings, engine.attention, info.max_length, width)
    planned_bytes += static_bytes(
        ground.settings, engine.attention, info.max_length, info.fingerprint.vocab_size, info.features
    )
    on_gpu = ground.device.type == "cuda"
    own_bytes, used_bytes = (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) if on_gpu else (0, 0)
    sizes = [size / 2**30 for size in (own_bytes, used_bytes, planned_bytes)]
    text = "GiB: {:.2f} reserved, {:.2f} in use, {:.2f} planned at most".format(*sizes)
    return text, own_bytes > planned_bytes


def bits_of_rows(ground: Ground) -> tuple[str, bool]:
    """Compute a row alone, and as the first of four."""
    engine, rows = ground.engine, []
    for count in (1, 4):
        engine.open(0, PAGE_ROWS)
        rows.append(engine.step(StepPlan((StepItem(0, 0, (1,) * count, logit_rows=(0,)),)))[0].copy())
        engine.close(0)
    largest = float(np.abs(rows[0] - rows[1]).max())
    return f"logits of a row alone and beside three differ by {largest:.2g}", largest > 0


def tree_moves(ground: Ground) -> tuple[str, bool]:
    """Make a tree's accepted rows contiguous in 16 sessions."""
    pool = ground.engine._pool
    sessions = range(ground.sessions)
    for session in sessions:
        pool.open(session, PAGE_ROWS)
    ms = ground.ms(lambda: pool.keep([(session, 8, (3, 5, 7, 9)) for session in sessions]))
    for session in sessions:
        pool.close(session)
    return f"four rows each of {len(sessions)} sessions: {ms:.3f} ms", ms > TREE_MS


FINDINGS: tuple[tuple[int, str, Measurement], ...] = (
    (1, "cuDNN makes a plan for each length of keys (mended: off where lengths grow)", cudnn_plans),
    (
        3,
        "torch's kernels: copying keys costs more than attention over them (mended by ours)",
        gathered_keys,
    ),
    (4, "torch's kernels: one long session is far from the bandwidth, unsplit (mended by ours)", long_session),
    (5, "torch's kernels: a race costs .4 ms and more a row (mended by ours)", races),
    (8, "a capture takes 50 ms and more (mended: common ones at the start)", captures),
    (7, "shapes of mixed traffic go on being captured (mended: by use)", mixed_traffic),
    (9, "prompts by chunks of 128 are bound by memory", prefill_chunks),
    (10, "torch's kernels: a mask costs a long prompt more than its attention (mended by ours)", prefill_masks),
    (11, "top-p costs 2 ms a row and more, on the host (mended: tokens are drawn on the device)", filtered_draws),
    (15, "graphs hold more memory than was planned (14: cached parts, mended)", memory_of_graphs),
    (22, "a row's last bits depend on the rows beside it", bits_of_rows),
    (23, "moving a tree's rows costs .2 ms and more", tree_moves),
)


@torch.inference_mode()
def measure_findings(ground: Ground) -> list[Finding]:
    """Measure them all, on the engine's thread."""
    is_figure, had_cudnn = ground.device.type == "cuda", torch.backends.cuda.cudnn_sdp_enabled()
    findings: list[Finding] = []
    try:
        for number, claim, measure in FINDINGS:
            text, shows = measure(ground)
            outcome = ("confirmed" if shows else "not seen") if is_figure else "no GPU"
            findings.append({"finding": number, "it says": claim, "measured": text, "outcome": outcome})
    finally:
        torch.backends.cuda.enable_cudnn_sdp(had_cudnn)
    return findings
