"""Hypothesis strategies for every object that crosses the wire. Floats that the wire holds as float32 are float32."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from paceline.protocol import sampling as t
from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, DraftOpen, DraftOpened, Shadow, Verifying
from paceline.protocol.errors import Code
from paceline.protocol.explanation import EXPLAINED_ROWS, PlanExplanation
from paceline.protocol.features import FeatureNeed, FeatureOffer, FeatureRequest, Features, FeatureType
from paceline.protocol.generation import (
    ChatMessage,
    Finished,
    GenerateRequest,
    ModelDescription,
    PromptLogprobs,
    Provenance,
    SpeculationSettings,
    Started,
    Tokens,
)
from paceline.protocol.handshake import Hello, ServiceStatus, Welcome
from paceline.protocol.proposal import Acceptance, Outcome, Proposal, SparseDistribution
from paceline.protocol.records import RoundRecord
from paceline.protocol.session import Close, Failure, SessionSpec
from paceline.protocol.target import (
    MAX_LEASE,
    Prefetch,
    PromptPiece,
    Round,
    RowLogprobs,
    TargetOpen,
    TargetOpened,
    Verdict,
)

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
LIMIT = st.integers(1, (1 << 32) - 1)
BOOL = st.booleans()
IDS = st.lists(U32, max_size=12).map(tuple)
SOME_IDS = st.lists(U32, min_size=1, max_size=12).map(tuple)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SOME_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
MS = st.floats(0, 1e6, width=32, allow_subnormal=False)
UNIT = st.floats(0.0009765625, 1, width=32)
TRACE = st.sampled_from(["", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"])
NODE, COUNT = st.integers(-1, 63), st.integers(0, 64)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {int: U32, float: MS, str: TEXT, bool: BOOL, tuple[int, ...]: IDS}
"""Any value of a type that the wire holds."""
SAMPLE = st.integers(0, (1 << 24) - 1)
NAMED: dict[str, st.SearchStrategy[Any]] = {"session_id": LIMIT, "traceparent": TRACE, "sample_index": SAMPLE}


def of(kind: type[Any], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects of a class: fields that are not special have any value of their type."""
    hints, chosen = get_type_hints(kind), NAMED | special
    names = [each.name for each in fields(kind) if each.init]
    return st.builds(kind, **{name: chosen[name] if name in chosen else any_of(hints[name]) for name in names})


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation."""
    if hint in PLAIN:
        return PLAIN[hint]
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return st.lists(any_of(arguments[0]), max_size=3).map(tuple)
    if NoneType in arguments:
        return st.none() | any_of(arguments[0])
    return st.sampled_from([*hint]) if issubclass(hint, Enum) else of(hint)


needs = st.lists(st.integers(-2, 100), max_size=4).map(lambda layers: FeatureNeed(tuple(layers)))
noises = of(t.NoiseKey, seed=U64)
samplings = of(
    t.SamplingParams,
    temperature=st.floats(0, 100, width=32),
    top_p=UNIT,
    min_p=st.floats(0, 1, width=32),
    logprobs=st.none() | st.integers(0, 20),
    repetition_penalty=st.floats(0.015625, 100, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(U32, st.floats(-100, 100, width=32), max_size=3).map(lambda bias: tuple(bias.items())),
    bad_words=st.lists(st.lists(U32, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
    min_tokens=st.just(0),
    grammar=st.none() | of(t.Grammar, text=st.just("{}")),
) | st.builds(t.SamplingParams, min_tokens=U32)
outcomes = of(Outcome, node=NODE)
budgets = of(
    DraftBudget,
    max_tokens=COUNT,
    tree_widths=st.lists(st.integers(1, 64), max_size=5).map(tuple),
    max_nodes=COUNT,
    fan_out=COUNT,
    least_chance=st.just(0.0) | UNIT,
)
logprob_rows = st.lists(st.tuples(U32, st.floats(-1e4, 0, width=32)), max_size=5).map(
    lambda pairs: RowLogprobs(tuple(i for i, _ in pairs), tuple(x for _, x in pairs))
)
PLAIN |= {
    FeatureNeed: needs,
    FeatureOffer: of(FeatureOffer, layers=LIMIT, hidden=LIMIT),
    t.NoiseKey: noises,
    t.SamplingParams: samplings,
    Outcome: outcomes,
    DraftBudget: budgets,
    RowLogprobs: logprob_rows,
}
hellos = of(Hello)
welcomes = st.lists(st.tuples(TEXT, needs), max_size=3).flatmap(
    lambda drafters: of(
        Welcome,
        max_length=LIMIT,
        max_sessions=LIMIT,
        max_proposal_nodes=LIMIT,
        max_frame_bytes=LIMIT,
        drafters=st.just(tuple(name for name, _ in drafters)),
        protocol_version=st.just(1),
        drafter_needs=st.sampled_from([(), tuple(need for _, need in drafters)]),
    )
)


@st.composite
def supports(draw: st.DrawFn) -> SparseDistribution:
    """Powers of two are float32 and sum to 1."""
    ids = sorted(draw(st.sets(U32, min_size=1, max_size=9)))
    halves = [2.0 ** -(i + 1) for i in range(len(ids) - 1)]
    return SparseDistribution(tuple(ids), (*halves, 2.0 ** -(len(ids) - 1)))


@st.composite
def chains(draw: st.DrawFn) -> Proposal:
    with_supports = draw(st.lists(supports(), max_size=8))
    picks = [draw(st.integers(0, len(s.token_ids) - 1)) for s in with_supports]
    return Proposal(
        draw(st.integers(1, (1 << 64) - 1)),
        tuple(s.token_ids[i] for s, i in zip(with_supports, picks, strict=True)),
        tuple(s.probabilities[i] for s, i in zip(with_supports, picks, strict=True)),
        supports=tuple(with_supports),
        drafter=draw(TEXT),
    )


@st.composite
def trees(draw: st.DrawFn) -> Proposal:
    nodes = draw(COUNT)
    return Proposal(
        draw(st.integers(1, (1 << 64) - 1)),
        tuple(draw(st.lists(U32, min_size=nodes, max_size=nodes))),
        tuple(draw(st.lists(UNIT, min_size=nodes, max_size=nodes))),
        tuple(draw(st.integers(-1, node - 1)) for node in range(nodes)),
        drafter=draw(TEXT),
    )


proposals = chains() | trees()
PLAIN[Proposal] = proposals


@st.composite
def features(draw: st.DrawFn) -> Features:
    dtype = draw(st.sampled_from(FeatureType))
    rows, layers, hidden = (draw(st.integers(1, 3)) for _ in range(3))
    count, scales = rows * layers * hidden * dtype.size, rows * layers if dtype is FeatureType.INT8 else 0
    return Features(
        draw(LIMIT),
        draw(U32),
        dtype,
        (rows, layers, hidden),
        draw(st.binary(min_size=count, max_size=count)),
        tuple(draw(st.lists(st.floats(0, 1024, width=32), min_size=scales, max_size=scales))),
    )


failures = of(
    Failure,
    session_id=U32,
    code=st.sampled_from([int(code) for code in Code]),
    metadata=st.dictionaries(TEXT, TEXT, max_size=3),
)
closes = of(Close)
specs = SOME_IDS.flatmap(
    lambda ids: of(
        SessionSpec,
        token_ids=st.just(ids),
        prompt_length=st.integers(1, len(ids)),
        max_length=st.just(0) | st.integers(len(ids), (1 << 32) - 1),
        tenant=st.text(st.characters(codec="utf-8"), max_size=16),
    )
)
PLAIN[SessionSpec] = specs
target_opens = specs.flatmap(
    lambda spec: of(
        TargetOpen,
        spec=st.just(spec),
        prompt_logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs_known=st.integers(0, spec.prompt_length - 1),
        features=st.none() | of(FeatureRequest, need=needs.filter(lambda need: need.any)),
    )
)
prompt_pieces = of(PromptPiece, first_position=LIMIT, rows=st.lists(logprob_rows, min_size=1, max_size=3).map(tuple))
lone = {"accepted_node": NODE, "committed": SOME_IDS, "proposal": st.none()}
rounds = of(Round, **lone, lease=st.integers(0, MAX_LEASE)) | of(
    Round, **(lone | {"proposal": st.none() | proposals}), lease=st.just(0)
)
masses = st.lists(st.floats(0, 1), max_size=8).map(tuple)
verdicts = of(Verdict, token_ids=SOME_IDS, target_probabilities=masses, residual_masses=masses)


@st.composite
def prefetches(draw: st.DrawFn) -> Prefetch:
    """What is prefetched is tokens and their parents."""
    base_length = draw(U32)
    prefetched = []
    for proposal in draw(st.lists(trees().filter(len), max_size=3)):
        outcome = Outcome(base_length, draw(NODE), draw(U32))
        certain = (1.0,) * len(proposal)
        prefetched.append((outcome, Proposal(0, proposal.token_ids, certain, proposal.parents)))
    return Prefetch(draw(LIMIT), base_length, tuple(prefetched))


target_commands = target_opens | rounds | prefetches() | closes
target_events = verdicts | of(TargetOpened) | features() | failures | prompt_pieces
commits = of(Commit, token_ids=SOME_IDS)
verifyings = of(Verifying, proposal_id=U64, node_count=COUNT, proposal=st.none()) | of(
    Verifying, proposal_id=st.just(0), node_count=COUNT, proposal=proposals
)
draft_commands = of(DraftOpen) | commits | verifyings | closes | features()
shadowed = st.lists(st.tuples(st.integers(0, 65535), st.floats(0, 1, width=32)), min_size=1, max_size=9)
shadows = st.builds(
    lambda session, position, tokens: Shadow(session, position, *zip(*tokens, strict=True)), LIMIT, LIMIT, shadowed
)
draft_events = of(DraftOpened) | of(DraftedProposal) | shadows | failures

messages = of(ChatMessage, role=st.sampled_from(["system", "user", "assistant"]))
inputs = (
    st.fixed_dictionaries({"prompt": SOME_TEXT})
    | st.fixed_dictionaries({"messages": st.lists(messages, min_size=1, max_size=3).map(tuple)})
    | st.fixed_dictionaries({"token_ids": SOME_IDS})
)
speculations = of(
    SpeculationSettings,
    num_draft_tokens=st.none() | COUNT,
    tree_widths=st.lists(st.just(1), max_size=3).map(tuple),
)
predictions = st.fixed_dictionaries({"prediction": IDS}) | st.fixed_dictionaries({"prediction_text": TEXT})


@st.composite
def generate_requests(draw: st.DrawFn) -> GenerateRequest:
    return GenerateRequest(
        **draw(inputs),
        model=draw(TEXT),
        sampling=(sampling := draw(samplings)),
        seed=draw(U64),
        max_new_tokens=draw(st.none() | st.integers(max(1, sampling.min_tokens), (1 << 32) - 1)),
        stop=tuple(draw(st.lists(SOME_TEXT, max_size=3))),
        ignore_eos=draw(BOOL) and sampling.grammar is None,
        acceptance=draw(any_of(Acceptance)),
        speculation=draw(speculations),
        resume_token_ids=draw(IDS),
        sample_index=draw(SAMPLE),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        stop_token_ids=() if sampling.grammar else draw(IDS),
        **draw(predictions),
    )


four_ms = st.just(()) | st.lists(MS, min_size=len(EXPLAINED_ROWS), max_size=len(EXPLAINED_ROWS)).map(tuple)
chances = st.lists(st.floats(0, 1, width=32), max_size=8).map(tuple)
PLAIN[PlanExplanation] = of(
    PlanExplanation,
    target_alone_ms=four_ms,
    target_beside_ms=four_ms,
    acceptance=chances,
    ngram_acceptance=chances,
    account_ms=st.floats(-1e6, 1e6, width=32),
)


@st.composite
def generated_tokens(draw: st.DrawFn) -> Tokens:
    count = draw(st.integers(0, 4))
    rows = count if draw(BOOL) else 0
    provenance = draw(st.lists(st.sampled_from(Provenance), min_size=count, max_size=count))
    replaced = provenance.count(Provenance.RECOVERED) if draw(BOOL) else 0
    return Tokens(
        tuple(draw(st.lists(U32, min_size=count, max_size=count))),
        draw(TEXT),
        tuple(provenance),
        tuple(draw(st.lists(logprob_rows, min_size=rows, max_size=rows))),
        replaced_token_ids=tuple(draw(st.lists(U32, min_size=replaced, max_size=replaced))),
        records=tuple(draw(st.lists(of(RoundRecord), max_size=2))),
    )


generate_events = of(Started, seed=U64) | generated_tokens() | of(PromptLogprobs) | of(Finished)
service_statuses = of(ServiceStatus, steps=U64, resident_bytes=U64, frames_sent=U64)
model_descriptions = of(ModelDescription)
