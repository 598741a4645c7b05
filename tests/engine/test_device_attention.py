"""The attention kernel, interpreted on a CPU, beside attention over gathered keys."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.attention import SINKS, SOFTCAP, AttentionFacts, LayerKind, whole_context
from paceline.engine.cuda import kernels
from paceline.engine.cuda.attention import gathered_attention
from paceline.engine.cuda.buckets import PAGE_ROWS, GroupShape, StepShape
from paceline.engine.cuda.layout import layout_of
from paceline.engine.cuda.pages import PagePool
from paceline.engine.forward import AttentionCall
from paceline.engine.kv import KVShape, LayerShape
from paceline.protocol.errors import Unsupported
from tests.engine import tiny
from tests.engine.tiny import DEVICE

ROOM = 8 * PAGE_ROWS
HELD = (70, 44, 128)
"""Rows of each session, the new ones included."""


@dataclass(frozen=True)
class Case:
    """New rows of each session, and what a layer asks for; `width`: of a head."""

    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    rows: int = 5
    has_trees: bool = False
    horizon: int = 0
    extras: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


CASES = {
    "one row each": Case(rows=1),
    "chunks of several tiles, windows": Case(kv_heads=1, rows=17, horizon=9),
    "trees": Case(has_trees=True),
    "windows, soft-caps and sinks, three heads of an odd width a key head": Case(
        heads=6,
        width=20,
        horizon=9,
        extras={SOFTCAP: 2.0, SINKS: torch.tensor([0.5, -1.0, 2.0, 3.0, 0.0, 1.0], device=DEVICE)},
    ),
}
SMALL = Case(heads=2, kv_heads=1, rows=3)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """The kernel's module, in blocks so small that sessions have several, in parts."""
    with pytest.MonkeyPatch.context() as patch:
        from paceline.engine.cuda import attention_kernel

        if DEVICE.type == "cpu":
            patch.setattr(attention_kernel, "BLOCK_KEYS", 32)
            patch.setattr(attention_kernel, "PROGRAMS", 24)
        yield attention_kernel


@dataclass(frozen=True, eq=False)
class Step:
    """A step of three sessions in two groups, and one layer's call."""

    shape: StepShape
    pool: PagePool
    inputs: torch.Tensor
    call: AttentionCall
    facts: AttentionFacts

    def attention(self, made_by: Any) -> np.ndarray[Any, Any]:
        attention = made_by(self.inputs, layout_of(self.shape), self.shape.groups, self.pool, self.facts)
        rows: np.ndarray[Any, Any] = attention.attend(self.call)[0].float().numpy(force=True)
        return rows


def step_of(case: Case, elsewhere: float) -> Step:
    """Sessions whose pages lie anywhere; `elsewhere`: what rows hold that nobody wrote."""
    generator = torch.Generator().manual_seed(1)
    source = np.random.default_rng(1)
    layer = LayerShape(case.kv_heads, case.width, case.width, case.heads // case.kv_heads)
    facts = whole_context(KVShape((layer,), case.dtype, DEVICE))
    facts = replace(facts, kinds=(LayerKind(None, layer.groups),))
    pool = PagePool(facts.shape, 4 * ROOM)
    pool.rows[:, :, : 4 * ROOM] = elsewhere
    pages = source.permutation(4 * ROOM // PAGE_ROWS)
    words = int(case.has_trees)
    groups = (GroupShape(2, case.rows, ROOM, words), GroupShape(2, case.rows, ROOM, words))
    rows = len(HELD) * case.rows
    shape = StepShape(rows, groups, 0, 0, 0)
    layout = layout_of(shape)
    integers = np.zeros(layout.size, np.int64)

    def view(place: Any) -> np.ndarray[Any, Any]:
        return integers[place.start : place.end].reshape(place.shape)

    for fields in layout.groups:
        view(fields.pages)[:] = pool.pages
        view(fields.end)[:] = 1
    for session, held in enumerate(HELD):
        group, place = divmod(session, 2)
        fields, base = layout.groups[group], held - case.rows
        own = pages[session * ROOM // PAGE_ROWS : (session + 1) * ROOM // PAGE_ROWS]
        view(fields.pages)[place] = own
        packed = np.arange(case.rows) + session * case.rows
        view(fields.source)[place * case.rows : (place + 1) * case.rows] = packed
        view(layout.query)[packed] = group * groups[0].queries + place * case.rows + np.arange(case.rows)
        view(fields.length)[place], view(fields.trunk)[place] = held, base
        view(fields.end)[place] = base if case.has_trees else base + 1 + np.arange(case.rows)
        if case.horizon:
            view(fields.first)[0, place] = np.maximum(base + 1 + np.arange(case.rows) - case.horizon, 0)
        if case.has_trees:
            view(fields.bits)[0, place, :, 0] = [1 << row | 1 << row // 2 for row in range(case.rows)]
        places = own[np.arange(held) // PAGE_ROWS] * PAGE_ROWS + np.arange(held) % PAGE_ROWS
        view(layout.write)[packed] = places[base:]
        written = torch.randn((1, 2, held, case.kv_heads, case.width), generator=generator).to(pool.rows)
        pool.rows[:, :, torch.from_numpy(places).to(DEVICE)] = written

    def random(heads: int) -> torch.Tensor:  # as projections are: rows before heads
        return torch.randn((1, rows, heads, case.width), generator=generator).to(pool.rows).transpose(1, 2)

    module: Any = torch.nn.Module()
    module.layer_idx = 0
    call = AttentionCall(
        module, random(case.heads), random(case.kv_heads), random(case.kv_heads), None, dict(case.extras)
    )
    return Step(shape, pool, torch.from_numpy(integers).to(DEVICE), call, facts)


def difference(kernel: Any, case: Case, elsewhere: float = float("nan")) -> float:
    """The largest, of all rows."""
    step = step_of(case, elsewhere)
    return float(np.abs(step.attention(kernel.paged_attention) - step.attention(gathered_attention)).max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_see_what_they_see_in_gathered_keys(kernel: Any, case: Case) -> None:
    assert difference(kernel, case) < 1e-5


@pytest.mark.skipif(DEVICE.type == "cpu", reason="numpy, which interprets, has no bfloat16")
def test_bfloat16_is_near(kernel: Any) -> None:
    assert difference(kernel, Case(rows=8, dtype=torch.bfloat16)) < 0.03


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("pages", SMALL),
        ("first", replace(SMALL, horizon=9)),
        ("end", SMALL),
        ("bits", replace(SMALL, has_trees=True)),
        ("trunk", replace(SMALL, has_trees=True)),
    ],
)
def test_the_comparison_catches(kernel: Any, monkeypatch: pytest.MonkeyPatch, name: str, case: Case) -> None:
    """A step whose integers are read one place too far: what they say is another's."""
    whole = kernel.PagedGroup

    def shifted(*fields: Any) -> Any:
        group = whole(*fields)
        return replace(group, **{name: getattr(group, name).roll(1, -2 if name == "bits" else -1)})

    monkeypatch.setattr(kernel, "PagedGroup", shifted)
    assert difference(kernel, case, elsewhere=7.0) > 1e-2


def specialization(interpreted: Any, start: int, count: int, integers: Sequence[str], **rules: Any) -> Any:
    """What Triton compiles a kernel for, where its integers begin at `start` of an array and counts are `count`."""
    jit = importlib.import_module("triton.runtime.jit")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    function = jit.JITFunction(interpreted.fn, **rules)
    backend = importlib.import_module("triton.compiler").make_backend(target)
    bind = jit.create_function_from_signature(function.signature, function.params, backend)
    array, floats = torch.zeros(64, dtype=torch.int64), torch.zeros(64)
    numbers = {"scaling": 1.0, "softcap": 1.0, "head_stride": 64, "values_offset": 64, "vocab_size": 7, "stride": 7}
    pointers = {"query", "layer_kv", "partial", "log_sums", "sinks", "output", "logits", "keys"}
    values: dict[str, Any] = {each.name: numbers.get(each.name, count) for each in function.params}
    values |= dict.fromkeys(pointers & {*values}, floats) | dict.fromkeys(integers, array[start:])
    values |= {each.name: 4 for each in function.params if each.is_constexpr}
    return bind(**values)[1]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there kernels are compiled, not interpreted")
@pytest.mark.parametrize("forgets", [False, True])
def test_where_integers_lie_and_how_many_there_are_compiles_no_other_kernel(kernel: Any, forgets: bool) -> None:
    race = importlib.import_module("paceline.engine.cuda.race_kernel")
    for each, integers in (
        (kernel._attend, kernel.INTEGERS),
        (kernel._combine, ("query",)),
        (race._race, race.NUMBERS),
    ):
        rules = {} if forgets else each.kwargs  # a mutant
        kinds = [specialization(each, start, count, integers, **rules) for start, count in ((0, 16), (1, 5))]
        assert (kinds[1] == kinds[0]) is not forgets


def test_where_kernels_do_not_compile_steps_use_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "triton_kernels", failing)
    monkeypatch.setattr(kernels, "check_race", lambda device, race: None)
    assert kernels.kernels_of("auto", torch.device("cuda")) == kernels.TORCH
    assert "Triton's kernels fail on cuda (Failed to find C compiler); steps use torch's" in caplog.text
    with pytest.raises(RuntimeError, match="C compiler"):
        kernels.kernels_of("triton", torch.device("cuda"))


def test_a_model_that_kernels_do_not_compile_for_is_refused(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = importlib.import_module("triton.runtime.errors")

    def out_of_memory(*_: Any) -> Any:
        raise errors.OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(kernel.PagedGroup, "attend", out_of_memory)
    with pytest.raises(Unsupported, match=r"our kernels don't compile for it .*set kernels = torch"):
        tiny.static(tiny.random_model(tiny.llama(num_hidden_layers=1)), kv_bytes=1 << 20, kernels="triton")
