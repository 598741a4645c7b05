"""Hypothesis strategies for every object that crosses the wire. Floats that the wire holds as float32 are float32."""

from __future__ import annotations

from hypothesis import strategies as st

from paceline.protocol import sampling as t
from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, DraftOpen, DraftOpened, Shadow, Verifying
from paceline.protocol.errors import Code
from paceline.protocol.explanation import EXPLAINED_ROWS, CandidateExplanation, PlanExplanation
from paceline.protocol.features import FeatureNeed, FeatureOffer, FeatureRequest, Features, FeatureType
from paceline.protocol.generation import (
    ChatMessage,
    Finished,
    FinishReason,
    GenerateRequest,
    ModelDescription,
    PeerDescription,
    PeerKind,
    PromptLogprobs,
    Provenance,
    SpeculationSettings,
    Started,
    Tokens,
)
from paceline.protocol.handshake import Fingerprint, Hello, ServiceStatus, Welcome
from paceline.protocol.proposal import Acceptance, Outcome, Proposal, SparseDistribution
from paceline.protocol.records import GenerationStats, RoundRecord, RoundStats, StepTimings
from paceline.protocol.session import Close, Failure, SessionSpec
from paceline.protocol.target import (
    MAX_LEASE,
    Prefetch,
    PromptPiece,
    Round,
    RowLogprobs,
    SelfStarted,
    TargetOpen,
    TargetOpened,
    Verdict,
)

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
SESSION = st.integers(1, (1 << 32) - 1)
IDS = st.lists(U32, max_size=12).map(tuple)
SOME_IDS = st.lists(U32, min_size=1, max_size=12).map(tuple)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
MS = st.floats(0, 1e6, width=32, allow_subnormal=False)
UNIT = st.floats(0.0009765625, 1, width=32)
TRACE = st.sampled_from(["", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"])
WIDTHS = st.lists(st.integers(1, 64), max_size=5).map(tuple)
needs = st.lists(st.integers(-2, 100), max_size=4).map(lambda layers: FeatureNeed(tuple(layers)))
dtypes = st.sampled_from(list(FeatureType))

fingerprints = st.builds(Fingerprint, TEXT, TEXT, U32, TEXT)
hellos = st.builds(Hello, TEXT, fingerprints, U32)
LIMIT = st.integers(1, (1 << 32) - 1)
welcomes = st.lists(st.tuples(TEXT, needs), max_size=3).flatmap(
    lambda drafters: st.builds(
        Welcome,
        TEXT,
        fingerprints,
        LIMIT,
        LIMIT,
        LIMIT,
        LIMIT,
        st.just(tuple(name for name, _ in drafters)),
        st.just(1),
        U32,
        U32,
        st.booleans(),
        st.sampled_from([(), tuple(need for _, need in drafters)]),
        st.none() | st.builds(FeatureOffer, LIMIT, LIMIT),
    )
)
samplings = st.builds(
    t.SamplingParams,
    st.floats(0, 100, width=32),
    U32,
    UNIT,
    st.floats(0, 1, width=32),
    st.none() | st.integers(0, 20),
    st.floats(0.015625, 100, width=32),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    st.dictionaries(U32, st.floats(-100, 100, width=32), max_size=3).map(lambda bias: tuple(bias.items())),
    st.lists(st.lists(U32, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
    st.just(0),
    st.none() | st.builds(t.Grammar, st.sampled_from(list(t.GrammarKind)), st.just("{}")),
) | st.builds(t.SamplingParams, min_tokens=U32)
noises = st.builds(t.NoiseKey, U64, st.integers(0, (1 << 24) - 1))
acceptances = st.sampled_from(list(Acceptance))
timings = st.builds(StepTimings, MS, MS, MS, MS, U32, U32)
outcomes = st.builds(Outcome, U32, st.integers(-1, 63), U32)
budgets = st.builds(
    DraftBudget,
    st.integers(0, 64),
    WIDTHS,
    st.integers(0, 64),
    st.integers(0, 64),
    st.none() | U32,
    st.booleans(),
    st.just(0.0) | UNIT,
)
logprob_rows = st.lists(st.tuples(U32, st.floats(-1e4, 0, width=32)), max_size=5).map(
    lambda pairs: RowLogprobs(tuple(i for i, _ in pairs), tuple(x for _, x in pairs))
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
    nodes = draw(st.integers(0, 64))
    return Proposal(
        draw(st.integers(1, (1 << 64) - 1)),
        tuple(draw(st.lists(U32, min_size=nodes, max_size=nodes))),
        tuple(draw(st.lists(UNIT, min_size=nodes, max_size=nodes))),
        tuple(draw(st.integers(-1, node - 1)) for node in range(nodes)),
        drafter=draw(TEXT),
    )


proposals = chains() | trees()


@st.composite
def features(draw: st.DrawFn) -> Features:
    dtype = draw(dtypes)
    rows, layers, hidden = (draw(st.integers(1, 3)) for _ in range(3))
    count, scales = rows * layers * hidden * dtype.size, rows * layers if dtype is FeatureType.INT8 else 0
    return Features(
        draw(SESSION),
        draw(U32),
        dtype,
        (rows, layers, hidden),
        draw(st.binary(min_size=count, max_size=count)),
        tuple(draw(st.lists(st.floats(0, 1024, width=32), min_size=scales, max_size=scales))),
    )


failures = st.builds(
    Failure,
    U32,
    st.sampled_from([int(code) for code in Code]),
    TEXT,
    TEXT,
    st.dictionaries(TEXT, TEXT, max_size=3),
    st.none() | U32,
    st.booleans(),
    st.booleans(),
)
closes = st.builds(Close, SESSION)


@st.composite
def specs(draw: st.DrawFn) -> SessionSpec:
    ids = draw(SOME_IDS)
    return SessionSpec(
        ids,
        draw(st.integers(1, len(ids))),
        draw(samplings),
        draw(noises),
        draw(acceptances),
        draw(st.none() | U32),
        draw(TRACE),
        draw(st.just(0) | st.integers(len(ids), (1 << 32) - 1)),
        draw(IDS),
        draw(st.text(st.characters(codec="utf-8"), max_size=16)),
    )


target_opens = specs().flatmap(
    lambda spec: st.builds(
        TargetOpen,
        SESSION,
        st.just(spec),
        st.none() | st.integers(0, 20),
        st.integers(0, spec.prompt_length - 1),
        st.none() | st.builds(FeatureRequest, needs.filter(lambda need: need.any), dtypes, U32),
    )
)
prompt_pieces = st.builds(PromptPiece, SESSION, LIMIT, st.lists(logprob_rows, min_size=1, max_size=3).map(tuple))
rounds = st.builds(Round, SESSION, U32, st.integers(-1, 63), SOME_IDS, st.none() | proposals, TRACE) | st.builds(
    Round, SESSION, U32, st.integers(-1, 63), SOME_IDS, st.none(), TRACE, st.integers(0, MAX_LEASE), st.booleans()
)
verdicts = st.builds(
    Verdict,
    SESSION,
    U32,
    SOME_IDS,
    st.lists(st.floats(0, 1), max_size=8).map(tuple),
    st.lists(st.floats(0, 1), max_size=8).map(tuple),
    st.lists(logprob_rows, max_size=3).map(tuple),
    timings,
    st.none() | st.builds(SelfStarted, U32, U32),
)


@st.composite
def prefetches(draw: st.DrawFn) -> Prefetch:
    """What is prefetched is tokens and their parents."""
    base_length = draw(U32)
    prefetched = []
    for proposal in draw(st.lists(trees().filter(len), max_size=3)):
        outcome = Outcome(base_length, draw(st.integers(-1, 63)), draw(U32))
        certain = (1.0,) * len(proposal)
        prefetched.append((outcome, Proposal(0, proposal.token_ids, certain, proposal.parents)))
    return Prefetch(draw(SESSION), base_length, tuple(prefetched))


target_openeds = st.builds(TargetOpened, SESSION, U32, timings)
target_commands = target_opens | rounds | prefetches() | closes
target_events = verdicts | target_openeds | features() | failures | prompt_pieces
draft_opens = st.builds(DraftOpen, SESSION, specs(), TEXT, budgets, st.booleans())
commits = st.builds(Commit, SESSION, outcomes, SOME_IDS, U32, budgets, TRACE)
verifyings = st.builds(Verifying, SESSION, U32, U64, st.integers(0, 64), st.none(), budgets) | st.builds(
    Verifying, SESSION, U32, st.just(0), st.integers(0, 64), proposals, budgets
)
draft_commands = draft_opens | commits | verifyings | closes | features()
draft_openeds = st.builds(DraftOpened, SESSION, TEXT, U32)
drafteds = st.builds(DraftedProposal, SESSION, st.none() | outcomes, proposals, timings)
shadowed = st.lists(st.tuples(st.integers(0, 65535), st.floats(0, 1, width=32)), min_size=1, max_size=9)
shadows = st.builds(
    lambda session, position, tokens: Shadow(session, position, *zip(*tokens, strict=True)),
    SESSION,
    LIMIT,
    shadowed,
)
draft_events = draft_openeds | drafteds | shadows | failures

PROMPT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
messages = st.builds(ChatMessage, st.sampled_from(["system", "user", "assistant"]), TEXT)
inputs = (
    st.fixed_dictionaries({"prompt": PROMPT})
    | st.fixed_dictionaries({"messages": st.lists(messages, min_size=1, max_size=3).map(tuple)})
    | st.fixed_dictionaries({"token_ids": SOME_IDS})
)
speculations = st.builds(
    SpeculationSettings,
    st.booleans(),
    TEXT,
    st.none() | st.integers(0, 64),
    st.lists(st.just(1), max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
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
        stop=tuple(draw(st.lists(PROMPT, max_size=3))),
        ignore_eos=draw(st.booleans()) and sampling.grammar is None,
        acceptance=draw(acceptances),
        speculation=draw(speculations),
        resume_token_ids=draw(IDS),
        sample_index=draw(st.integers(0, (1 << 24) - 1)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        stop_token_ids=() if sampling.grammar else draw(IDS),
        **draw(predictions),
    )


BOOL = st.booleans()
records = st.builds(
    RoundRecord,
    U32,
    MS,
    MS,
    MS,
    timings,
    MS,
    U32,
    U32,
    BOOL,
    TEXT,
    timings,
    self_started=BOOL,
    feature_bytes=U32,
    reasoning=BOOL,
)
four_ms = st.just(()) | st.lists(MS, min_size=len(EXPLAINED_ROWS), max_size=len(EXPLAINED_ROWS)).map(tuple)
chances = st.lists(st.floats(0, 1, width=32), max_size=8).map(tuple)
candidates = st.builds(CandidateExplanation, TEXT, U32, MS, MS, U32)
explanations = st.builds(
    PlanExplanation,
    four_ms,
    four_ms,
    MS,
    MS,
    MS,
    U32,
    U32,
    chances,
    chances,
    st.lists(candidates, max_size=3).map(tuple),
    st.floats(-1e6, 1e6, width=32),
    MS,
)
of_rounds = {
    "rounds": U32,
    "committed": U32,
    "tokens_per_second": MS,
    "num_spec_steps": U32,
    "num_draft_tokens": U32,
    "num_accepted_draft_tokens": U32,
}
parts = st.builds(RoundStats, **of_rounds)
statistics = st.builds(
    GenerationStats,
    **of_rounds,
    cache_hits=U32,
    cache_misses=U32,
    time_to_first_token_ms=MS,
    verify_ms_p50=MS,
    draft_wait_ms_p50=MS,
    acceptance_histogram=IDS,
    num_spec_tokens=U32,
    records=st.lists(records, max_size=3).map(tuple),
    explanation=st.none() | explanations,
    prediction_accepted=U32,
    prediction_rejected=U32,
    cached_prompt_tokens=st.none() | U32,
    feature_bytes=U32,
    reasoning=st.none() | parts,
    answer=st.none() | parts,
)


@st.composite
def generated_tokens(draw: st.DrawFn) -> Tokens:
    count = draw(st.integers(0, 4))
    rows = count if draw(st.booleans()) else 0
    provenance = draw(st.lists(st.sampled_from(list(Provenance)), min_size=count, max_size=count))
    replaced = provenance.count(Provenance.RECOVERED) if draw(st.booleans()) else 0
    return Tokens(
        tuple(draw(st.lists(U32, min_size=count, max_size=count))),
        draw(TEXT),
        tuple(provenance),
        tuple(draw(st.lists(logprob_rows, min_size=rows, max_size=rows))),
        replaced_token_ids=tuple(draw(st.lists(U32, min_size=replaced, max_size=replaced))),
        records=tuple(draw(st.lists(records, max_size=2))),
    )


generate_events = (
    st.builds(Started, U64, IDS, TEXT)
    | generated_tokens()
    | st.builds(PromptLogprobs, U32, st.lists(logprob_rows, max_size=3).map(tuple))
    | st.builds(Finished, st.sampled_from(list(FinishReason)), TEXT, statistics)
)
service_statuses = st.builds(ServiceStatus, TEXT, fingerprints, U32, U32, U32, U32, U64, U64, U64)
peer_descriptions = st.builds(
    PeerDescription,
    st.sampled_from(list(PeerKind)),
    TEXT,
    st.booleans(),
    fingerprints,
    TEXT,
    U32,
    U32,
    U32,
    U32,
    MS,
)
model_descriptions = st.builds(
    ModelDescription,
    TEXT,
    fingerprints,
    fingerprints,
    U32,
    st.lists(TEXT, max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
    st.lists(peer_descriptions, max_size=3).map(tuple),
)
