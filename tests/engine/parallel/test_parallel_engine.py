"""Tensor parallelism over ranks that are threads: the logits, sessions and draws of one engine."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from paceline.engine.checks import PlainReference
from paceline.engine.cpu.fused import FusedLayer
from paceline.engine.cpu.linear import PackedLinear, can_pack
from paceline.engine.cpu.row_products import PanelLinear
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.interface import Draw, Engine, Logits, StepItem, StepPlan
from paceline.engine.parallel.decoder import build_share, check_ranks
from paceline.engine.parallel.engine import ParallelEngine, follow
from paceline.engine.parallel.group import RankGroup
from paceline.engine.parallel.place import Place, place_from
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput, PrefixMismatch, Unsupported
from paceline.protocol.proposal import ROOT, Acceptance, Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round, Verdict
from target_service.verifier import draw_of, drawn_verdict, verify
from tests.engine import tiny
from tests.engine.parallel.ranks import ThreadRanks, run_ranks

T = TypeVar("T")
CPU = torch.device("cpu")
SETTINGS = tiny.THREAD.model_copy(update={"kv_bytes": 1 << 20, "max_num_seqs": 8})


def share_of(
    model: PreTrainedModel, group: RankGroup, *, static: bool = False
) -> tuple[Engine, PlainReference | None]:
    return build_share(model, TableTokenizer(tiny.VOCAB, None), SETTINGS, "tiny", group, CPU, static=static)


def in_parallel(
    config: Callable[[], Any],
    degree: int,
    work: Callable[[ParallelEngine, ThreadRanks], T],
    file_dtype: torch.dtype = torch.float32,
    *,
    static: bool = False,
) -> T:
    """Run `work` on rank 0's engine, which has passed the check that every engine must."""
    model = tiny.random_model(config())
    for weight in model.parameters():
        weight.data = weight.data.to(file_dtype)
    copies = [copy.deepcopy(model) for _ in range(degree)]

    def leader(group: ThreadRanks) -> T:
        own, reference = share_of(copies[0], group, static=static)
        engine = ParallelEngine(own, group)
        assert reference is not None
        try:
            check_ranks(engine, own, reference)
            group.exchanged = 0
            return work(engine, group)
        finally:
            engine.stop()

    return run_ranks(
        degree, leader, lambda group: follow(share_of(copies[group.rank], group, static=static)[0], group)
    )


def four_heads(**more: Any) -> Any:
    return tiny.llama(num_key_value_heads=4, **more)


SHARDED: dict[str, Callable[[], Any]] = {
    "llama": four_heads,
    "llama with biases, which are added once": partial(four_heads, attention_bias=True, mlp_bias=True),
    "qwen3, padded vocabulary": tiny.qwen3_padded,
    "gpt_neox": tiny.gpt_neox,
    "gemma 2, soft-capped": partial(
        tiny.gemma2, num_key_value_heads=4, head_dim=8, sliding_window=tiny.CONTEXT, attn_logit_softcapping=2.0
    ),
}


def schedule(engine: Engine) -> list[Logits]:
    """Chunks, a tree, a kept path and a second session beside them."""
    source = random.Random(3)
    first, second = (source.choices(range(tiny.VOCAB), k=24) for _ in range(2))
    made: list[Logits] = []
    for session in (1, 2):
        engine.open(session, 40)

    def step(*items: StepItem) -> None:
        made.extend(logits.copy() for logits in engine.step(StepPlan(items)))

    step(StepItem(1, 0, tuple(first[:7]), logit_rows=(6,)), StepItem(2, 0, tuple(second[:1]), logit_rows=(0,)))
    step(StepItem(1, 7, (1, 2, 3), (ROOT, ROOT, 1), logit_rows=(0, 1, 2)))
    step(
        StepItem(1, 9, tuple(first[9:14]), kept_rows=(8, 9), logit_rows=(0, 4)),
        StepItem(2, 1, tuple(second[1:20]), logit_rows=(18,)),
    )
    for session in (1, 2):
        engine.close(session)
    return made


def _case(family: str, degree: int, static: bool) -> Any:
    """Of each family, both degrees and both engines run in CI, not each with each."""
    in_ci = degree > 1 and static == (list(SHARDED).index(family) % 2 == (degree == 2))
    return pytest.param(family, degree, static, marks=() if in_ci else pytest.mark.full)


@pytest.mark.parametrize(
    ("family", "degree", "static"), [_case(*each) for each in itertools.product(SHARDED, (1, 2, 4), (False, True))]
)
def test_ranks_make_the_logits_of_one_engine(family: str, degree: int, static: bool) -> None:
    engine, _ = tiny.engine_and_plain(SHARDED[family]())
    together = in_parallel(SHARDED[family], degree, lambda parallel, _: schedule(parallel), static=static)
    for mine, theirs in zip(together, schedule(engine), strict=True):
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, atol=tiny.TOLERANCE, rtol=0)


def test_ranks_that_read_bfloat16_serve_in_float32() -> None:
    """Also where the check is made: rank 0 converts a layer at a time, and what is rounded on the way would show."""
    rounded = tiny.random_model(tiny.gpt_neox())
    for weight in rounded.parameters():
        weight.data = weight.data.bfloat16().float()
    together = in_parallel(tiny.gpt_neox, 2, lambda parallel, _: schedule(parallel), torch.bfloat16)
    for mine, theirs in zip(together, schedule(tiny.build(rounded)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=tiny.TOLERANCE, rtol=0)


WARM = SamplingParams(temperature=0.8)


def drawn_text(engine: ParallelEngine | StaticEngine, sampling: SamplingParams = WARM, tokens: int = 40) -> list[int]:

    def step(plan: StepPlan, draw: Draw) -> Any:
        (answer,) = engine.step_and_draw(plan, (draw,))
        assert not isinstance(answer, np.ndarray), "no logits leave it"
        return answer

    return _text(engine, step, sampling, tokens)


def plain_text(engine: Engine, sampling: SamplingParams = WARM, tokens: int = 40) -> list[int]:
    return _text(engine, lambda plan, _: engine.step(plan)[0], sampling, tokens)


def _text(engine: Engine, step: Callable[[StepPlan, Draw], Any], sampling: SamplingParams, count: int) -> list[int]:
    tokens, base = [5, 6, 7], 0
    facts = SessionSpec((5, 6, 7), 3, sampling, NoiseKey(9), Acceptance.COUPLED)
    engine.open(1, 64)
    for _ in range(count):
        round_ = Round(1, base, ROOT, tuple(tokens[base:]))
        item = StepItem(1, base, round_.committed, logit_rows=(len(round_.committed) - 1,))
        draw = draw_of(facts, round_, tiny.VOCAB)
        assert draw is not None
        answer = step(StepPlan((item,)), draw)
        drawn = verify(answer, facts, round_) if isinstance(answer, np.ndarray) else answer.drawn_tokens()
        base = len(tokens)
        tokens.append(drawn.token_ids[0])
    engine.close(1)
    return tokens


@pytest.mark.parametrize("degree", [2, *tiny.in_full(4)])
@pytest.mark.parametrize("static", [False, True])
def test_ranks_write_the_text_of_one_engine_and_send_a_few_bytes_a_token(degree: int, static: bool) -> None:
    engine, _ = tiny.engine_and_plain(four_heads())
    written, sent = in_parallel(
        four_heads, degree, lambda parallel, group: (drawn_text(parallel), group.exchanged), static=static
    )
    assert written == plain_text(engine)
    assert sent == 40 * 24, "value, id and mass of one row a token; no logits"


def test_rounds_of_every_kind_share_a_step() -> None:
    """Coupled and greedy draws, pre-drawn chains, rows that are gathered, and a prefix that wants none."""
    support = SparseDistribution((3, 40, 96), (0.5, 0.25, 0.25))
    proposal = Proposal(1, (40, 96), (0.25, 0.25), supports=(support, support))
    kinds = (
        (Acceptance.BLOCK, SamplingParams(temperature=0.7), proposal),
        (Acceptance.COUPLED, SamplingParams(temperature=0), Proposal(1, (8, 9), (1.0, 1.0))),
        (Acceptance.COUPLED, SamplingParams(temperature=0.7, top_k=5), None),
        (Acceptance.REJECTION, SamplingParams(temperature=1.3), proposal),
        (Acceptance.COUPLED, SamplingParams(temperature=1.3), None),
    )
    items, work = [], []
    for session, (acceptance, sampling, proposed) in enumerate(kinds):
        round_ = Round(session, 0, ROOT, (5 + session,), proposed)
        nodes = proposed.token_ids if proposed else ()
        items.append(StepItem(session, 0, (5 + session, *nodes), logit_rows=tuple(range(1 + len(nodes)))))
        work.append((SessionSpec((5 + session,), 1, sampling, NoiseKey(session), acceptance), round_))
    plan = StepPlan((*items, StepItem(9, 0, (1, 2, 3))))

    def opened(engine: Engine) -> Engine:
        for item in plan.items:
            engine.open(item.session, 8)
        return engine

    def draw_all(engine: ParallelEngine, _: ThreadRanks) -> list[Verdict]:
        draws = [draw_of(facts, round_, tiny.VOCAB) for facts, round_ in work]
        assert [draw is None for draw in draws] == [False] * 5, "of filters, ranks bring the logits all the same"
        opened(engine)
        answers = engine.step_and_draw(plan, draws)
        return [
            verify(answer, *each) if isinstance(answer, np.ndarray) else drawn_verdict(answer, each[1])
            for answer, each in zip(answers, work, strict=False)
        ]

    whole, _ = tiny.engine_and_plain(four_heads())
    wanted = [verify(rows, *each) for rows, each in zip(opened(whole).step(plan), work, strict=False)]
    for mine, theirs in zip(in_parallel(four_heads, 4, draw_all), wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.target_probabilities == pytest.approx(theirs.target_probabilities, rel=1e-3)
        assert mine.residual_masses == pytest.approx(theirs.residual_masses, rel=1e-3)


def test_what_one_engine_refuses_all_ranks_refuse_and_go_on() -> None:
    def work(engine: ParallelEngine, _: ThreadRanks) -> Logits:
        engine.open(1, 16)
        with pytest.raises(InvalidInput):
            engine.open(1, 16)
        with pytest.raises(PrefixMismatch):
            tiny.step(engine, StepItem(1, 3, (1,), logit_rows=(0,)))
        assert engine.kv_rows == 16
        logits = tiny.step(engine, StepItem(1, 0, (1, 2), logit_rows=(1,)))
        engine.close(1)
        assert engine.kv_rows == 0
        return logits

    tiny.Plain(tiny.random_model(four_heads())).assert_row(in_parallel(four_heads, 2, work)[0], [1, 2])


def test_shares_have_the_layers_that_make_whole_models_fast() -> None:
    whole, part = (tiny.random_model(four_heads()) for _ in range(2))
    if not can_pack(whole):
        pytest.skip("no packed products here")
    tiny.build(whole)
    run_ranks(1, lambda group: share_of(part, group), lambda group: None)
    for kind in (FusedLayer, (PackedLinear, PanelLinear)):
        counts = [sum(isinstance(module, kind) for module in model.modules()) for model in (whole, part)]
        assert counts[0] == counts[1] > 0


def test_a_degree_that_does_not_fit_is_refused() -> None:
    for config, degree, kv_heads in ((tiny.llama, 4, "2 KV heads: 1, 2"), (four_heads, 3, "4 KV heads")):
        limit = f"tensor_parallel_size = {degree}: must be a divisor of the model's 4 heads and {kv_heads}"
        with pytest.raises(InvalidInput, match=limit):
            in_parallel(config, degree, lambda engine, _: None)


def test_splits_that_are_not_built_are_refused() -> None:
    unknown, read = (tiny.random_model(four_heads()) for _ in range(2))
    unknown._tp_plan = {**unknown.tp_plan, "model.layers.*.mlp.up_proj": "packed_colwise"}
    mlp: Any = read.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: plain(hidden.to(mlp.up_proj.weight.dtype))
    for model, reason in (
        (unknown, "is Linear, split packed_colwise"),
        (read, "is split colwise, and other code reads"),
    ):
        with pytest.raises(Unsupported, match=rf"layers\.0\.mlp\.up_proj {reason}"):
            run_ranks(1, partial(share_of, model), lambda group: None)


def test_the_first_sum_of_a_group_is_outside_of_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects in it: once ranks agree on what they have loaded, the next call may be a step."""
    calls: list[str] = []
    for name in ("init_process_group", "new_group", "all_reduce", "all_gather"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
    group = RankGroup(Place(0, 1, 0, 1), CPU)
    with suppress(InvalidInput):  # nobody has answered
        group.agree("facts", 5)
    assert calls == ["init_process_group", *["new_group"] * 3, "all_reduce", "all_gather"]


def test_torchrun_says_which_rank_this_is_and_without_it_ranks_are_ours_to_start() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}
    assert place_from(torchrun, 8) == Place(rank=5, size=8, local_rank=1, local_size=4)
    assert place_from({"LOCAL_RANK": "1"}, 8) is None
    with pytest.raises(InvalidInput, match="tensor_parallel_size = 1: must be 8, the WORLD_SIZE"):
        place_from(torchrun, 1)
