from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.drafting.prefetch import MAX_PREFETCHED_NODES
from paceline.protocol import codec
from paceline.protocol import sampling as t
from paceline.protocol.draft import (
    Commit,
    DraftBudget,
    DraftCommand,
    DraftedProposal,
    DraftEvent,
    DraftOpen,
    DraftOpened,
    Shadow,
    Verifying,
)
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.features import MAX_FEATURE_BYTES, FeatureNeed, FeatureOffer, Features
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.handshake import MAX_FRAME_BYTES
from paceline.protocol.proposal import Acceptance, Outcome, Proposal, SparseDistribution
from paceline.protocol.records import StepTimings
from paceline.protocol.session import Close, Failure, SessionSpec
from paceline.protocol.target import (
    MAX_PIECE_ROWS,
    AtWork,
    Prefetch,
    PromptPiece,
    Round,
    RowLogprobs,
    SelfStarted,
    TargetCommand,
    TargetEvent,
    TargetOpen,
    TargetOpened,
    Verdict,
)
from paceline.rpc.cost_messages import DRAFT_COSTS, TARGET_COSTS
from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import types_pb2 as pb
from tests.protocol import strategies as some

Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]

PAIRS: dict[str, tuple[Encode, Decode, st.SearchStrategy[Any]]] = {
    "hello": (codec.encode_hello, codec.decode_hello, some.hellos),
    "welcome": (codec.encode_welcome, codec.decode_welcome, some.welcomes),
    "target_command": (codec.encode_target_command, codec.decode_target_command, some.target_commands),
    "target_event": (codec.encode_target_event, codec.decode_target_event, some.target_events),
    "draft_command": (codec.encode_draft_command, codec.decode_draft_command, some.draft_commands),
    "draft_event": (codec.encode_draft_event, codec.decode_draft_event, some.draft_events),
    "generate_request": (codec.encode_generate_request, codec.decode_generate_request, some.generate_requests()),
    "generate_event": (codec.encode_generate_event, codec.decode_generate_event, some.generate_events),
    "service_status": (codec.encode_service_status, codec.decode_service_status, some.service_statuses),
    "model_description": (codec.encode_model_description, codec.decode_model_description, some.model_descriptions),
}
DECODERS: dict[type[Message], Decode] = {
    pb.Hello: codec.decode_hello,
    pb.Welcome: codec.decode_welcome,
    pb.ServiceStatus: codec.decode_service_status,
    target_pb.TargetCommand: codec.decode_target_command,
    target_pb.TargetEvent: codec.decode_target_event,
    draft_pb.DraftCommand: codec.decode_draft_command,
    draft_pb.DraftEvent: codec.decode_draft_event,
    generation_pb.GenerateRequest: codec.decode_generate_request,
    generation_pb.GenerateResponse: codec.decode_generate_event,
    generation_pb.DescribeModelsResponse: codec.decode_models,
    target_pb.TargetCosts: TARGET_COSTS.decode,
    draft_pb.DraftCosts: DRAFT_COSTS.decode,
}
"""All that reads what a peer sent, by what it reads."""
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@settings(max_examples=60, deadline=None)
@given(temperature=st.floats(0.01, 100), top_p=st.floats(0.01, 1))
def test_float32_rounding_happens_once(temperature: float, top_p: float) -> None:
    request = GenerateRequest(prompt="x", sampling=t.SamplingParams(temperature, top_p=top_p))
    first = codec.decode_generate_request(codec.encode_generate_request(request)).sampling
    opened = TargetOpen(1, SessionSpec((1,), 1, first, t.NoiseKey(1), Acceptance.COUPLED))
    second = codec.decode_target_command(codec.encode_target_command(opened))
    assert isinstance(second, TargetOpen)
    assert second.spec.sampling == first
    assert first.temperature == struct.unpack("f", struct.pack("f", temperature))[0]


def test_unset_sampling_means_temperature_1_and_everything_kept() -> None:
    message = generation_pb.GenerateRequest(prompt="x")
    request = codec.decode_generate_request(message)
    assert request == GenerateRequest(prompt="x")
    assert request.sampling == t.SamplingParams(1.0, 0, 1.0, 0.0, None)
    assert request.acceptance is Acceptance.COUPLED
    greedy = generation_pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(temperature=0), seed=0)
    assert codec.decode_generate_request(greedy).sampling.greedy
    assert codec.decode_generate_request(greedy).seed == 0


def _proposal(**changes: Any) -> pb.Proposal:
    return pb.Proposal(**dict[str, Any](proposal_id=1, token_ids=[4, 5], draft_probabilities=[0.5, 0.5]) | changes)


def _supported(*supports: tuple[tuple[int, float], ...], **changes: Any) -> target_pb.TargetCommand:
    """A round whose proposal has these supports."""
    columns = (zip(*entries, strict=True) for entries in supports)
    messages = [pb.SparseDistribution(token_ids=ids, probabilities=qs) for ids, qs in columns]
    return _round(proposal=_proposal(supports=messages, **changes))


def _round(**changes: Any) -> target_pb.TargetCommand:
    values = dict[str, Any](session_id=3, base_length=2, accepted_node=-1, committed=[1]) | changes
    return target_pb.TargetCommand(round=target_pb.Round(**values))


def _spec(**changes: Any) -> pb.SessionSpec:
    facts = {"sampling": pb.SamplingParams(), "acceptance": pb.ACCEPTANCE_COUPLED} | changes
    return pb.SessionSpec(**dict[str, Any](token_ids=[1, 2], prompt_length=1) | facts)


def _open(session_id: int = 3, features: dict[str, Any] | None = None, **changes: Any) -> target_pb.TargetCommand:
    opened = target_pb.TargetOpen(session_id=session_id, spec=_spec(**changes), features=features)
    return target_pb.TargetCommand(open=opened)


def _draft_open(budget: dict[str, Any] | None = None, **changes: Any) -> draft_pb.DraftCommand:
    return draft_pb.DraftCommand(open=draft_pb.DraftOpen(session_id=3, spec=_spec(**changes), budget=budget))


def _commit(**changes: Any) -> draft_pb.DraftCommand:
    values = dict[str, Any](session_id=3, outcome=pb.Outcome(node=-1), token_ids=[1]) | changes
    return draft_pb.DraftCommand(commit=draft_pb.Commit(**values))


def _verifying(**changes: Any) -> draft_pb.DraftCommand:
    return draft_pb.DraftCommand(verifying=draft_pb.Verifying(session_id=1, proposal_id=2, **changes))


def _shadow(**changes: Any) -> draft_pb.DraftEvent:
    values = dict[str, Any](session_id=3, first_position=5, ranks=[1, 0], probabilities=[0.5, 0.25]) | changes
    return draft_pb.DraftEvent(shadow=draft_pb.Shadow(**values))


def _prefetch(*others: dict[str, Any], **changes: Any) -> target_pb.TargetCommand:
    prefetched = [dict[str, Any](node=-1, token_ids=[1, 2]) | changes, *others]
    return target_pb.TargetCommand(prefetch=target_pb.Prefetch(session_id=3, base_length=4, proposals=prefetched))


def _verdict(**changes: Any) -> target_pb.TargetEvent:
    return target_pb.TargetEvent(verdict=target_pb.Verdict(**dict[str, Any](session_id=3, token_ids=[1]) | changes))


def _generate(**changes: Any) -> generation_pb.GenerateRequest:
    return generation_pb.GenerateRequest(**dict[str, Any](prompt="x") | changes)


def _sampled(**values: Any) -> generation_pb.GenerateRequest:
    more = {name: values.pop(name) for name in ("max_new_tokens", "ignore_eos") if name in values}
    return _generate(sampling=pb.SamplingParams(**values), **more)


def _features(**changes: Any) -> target_pb.TargetEvent:
    values = dict[str, Any](session_id=3, dtype="float16", shape=[2, 1, 2], data=b"12345678") | changes
    return target_pb.TargetEvent(features=pb.Features(**values))


BAD: list[tuple[Any, str]] = [
    (target_pb.TargetCommand(), "target command"),
    (target_pb.TargetEvent(), "target event"),
    (draft_pb.DraftCommand(), "draft command"),
    (draft_pb.DraftEvent(), "draft event"),
    (generation_pb.GenerateResponse(), "generate event"),
    (generation_pb.GenerateRequest(), "input"),
    (_generate(prompt=""), "prompt"),
    (generation_pb.GenerateRequest(chat={}), "chat messages"),
    (generation_pb.GenerateRequest(tokens={}), "token_ids"),
    (_sampled(temperature=-1), "temperature"),
    (_sampled(temperature=math.nan), "temperature"),
    (_sampled(top_p=1.5), "top_p"),
    (_sampled(top_p=0), "top_p"),
    (_sampled(min_p=math.nan), "min_p"),
    (_sampled(logprobs=21), "logprobs"),
    (_sampled(repetition_penalty=0), "repetition_penalty"),
    (_sampled(presence_penalty=3), "presence_penalty"),
    (_sampled(frequency_penalty=math.nan), "frequency_penalty"),
    (_sampled(logit_bias={7: 101}), "logit_bias of 7"),
    (_sampled(bad_words=[{}]), "bad_words tokens"),
    (_sampled(min_tokens=9, max_new_tokens=8), "min_tokens"),
    (_sampled(grammar=pb.Grammar()), "grammar"),
    (_sampled(grammar=pb.Grammar(regex="")), "regex bytes"),
    (_sampled(grammar={"json_schema": "{"}), "json_schema"),
    (_sampled(grammar=pb.Grammar(regex="a"), min_tokens=1), "min_tokens"),
    (_sampled(grammar=pb.Grammar(regex="a"), ignore_eos=True), "ignore_eos"),
    (_generate(sample_index=1 << 24), "sample_index"),
    (_generate(max_new_tokens=0), "max_new_tokens"),
    (_generate(acceptance=99), "acceptance"),
    (_generate(stop=[""]), "stop string"),
    (_generate(resume_token_ids=[1]), "seed"),
    (_generate(speculation={"num_draft_tokens": 65}), "num_draft_tokens"),
    (_generate(speculation={"tree_widths": [0]}), "tree_widths"),
    (_open(session_id=0), "session_id"),
    (_open(token_ids=[]), "prefix length"),
    (_open(prompt_length=0), "prompt_length"),
    (_open(prompt_length=3), "prompt_length"),
    (_open(acceptance=pb.ACCEPTANCE_UNSPECIFIED), "acceptance"),
    (_open(noise=pb.NoiseKey(sample_index=1 << 24)), "sample_index"),
    (_open(features={"need": {"layers": range(17)}, "dtype": "int8"}), "layers"),
    (_open(features={"need": {"layers": [-3]}, "dtype": "int8"}), "feature layer"),
    (_open(features={"dtype": "int8"}), "feature request layers"),
    (_open(features={"need": {"layers": [1]}}), "features dtype"),
    (_prefetch(node=-2), "prefetched node"),
    (_prefetch(token_ids=[]), "prefetched proposal nodes"),
    (_prefetch(token_ids=[1] * 65), "proposal nodes"),
    (_prefetch(parents=[-1, 7]), "proposal parent of node 1"),
    (_round(committed=[]), "round committed tokens"),
    (_round(accepted_node=-2), "accepted_node"),
    (_round(proposal=_proposal(proposal_id=0)), "proposal_id"),
    (_round(proposal=_proposal(drafter="é" * 257)), "proposal drafter bytes"),
    (_round(proposal=_proposal(parents=[-1, 7])), "proposal parent of node 1"),
    (_round(proposal=_proposal(parents=[-1])), "proposal parents"),
    (_round(proposal=_proposal(draft_probabilities=[0.5])), "draft_probabilities"),
    (_round(proposal=_proposal(draft_probabilities=[0.5, 0.0])), "draft_probability"),
    (_round(proposal=_proposal(token_ids=[1] * 65, draft_probabilities=[1] * 65)), "proposal nodes"),
    (_supported(((4, 0.5), (9, 0.4)), ((5, 0.5), (9, 0.5))), "sum of support probabilities"),
    (_supported(((3, 0.5), (9, 0.5)), ((5, 0.5), (9, 0.5))), "q of drafted token 4"),
    (_supported(((9, 0.5), (4, 0.5)), ((5, 0.5), (9, 0.5))), "support token_ids"),
    (_supported(*[tuple((i, 1 / 257) for i in range(257))] * 2), "support entries"),
    (_supported(((4, 1.0),)), "proposal supports"),
    (_supported(*[((4, 0.5), (5, 0.5))] * 2, parents=[-1, -1]), "proposal parents"),
    (_draft_open(budget={"max_tokens": 65}), "budget max_tokens"),
    (_draft_open(budget={"max_nodes": 65}), "budget max_nodes"),
    (_draft_open(budget={"fan_out": 65}), "budget fan_out"),
    (_draft_open(budget={"tree_widths": [1] * 65}), "tree_widths"),
    (_draft_open(budget={"least_chance": 1.5}), "budget least_chance"),
    (_shadow(session_id=0), "session_id"),
    (_shadow(first_position=0), "shadow first_position"),
    (_shadow(ranks=[], probabilities=[]), "shadow ranks"),
    (_shadow(ranks=[1]), "shadow probabilities"),
    (_shadow(ranks=[1, 65536]), "shadow rank"),
    (_shadow(probabilities=[0.5, 1.5]), "shadow probability"),
    (_shadow(probabilities=[math.nan, 1]), "shadow probability"),
    (draft_pb.DraftCommand(commit=draft_pb.Commit(session_id=1)), "commit outcome"),
    (_commit(token_ids=[]), "commit token_ids"),
    (_commit(outcome=pb.Outcome(node=64)), "outcome node"),
    (_verifying(proposal=_proposal()), "verifying proposal_id"),
    (_verifying(node_count=65), "verifying node_count"),
    (draft_pb.DraftEvent(proposal=draft_pb.DraftedProposal(session_id=1)), "drafted proposal"),
    (_verdict(token_ids=[]), "verdict token_ids"),
    (_verdict(target_probabilities=[math.nan]), "target_probability"),
    (_verdict(residual_masses=[-0.5]), "residual_mass"),
    (_verdict(logprobs=[pb.RowLogprobs(token_ids=[1], logprobs=[])]), "row logprobs"),
    (_verdict(timings=pb.StepTimings(queue_ms=math.inf)), "timings queue_ms"),
    (_features(dtype="float32"), "features dtype"),
    (_features(shape=[1, 2]), "features shape"),
    (_features(shape=[0, 1, 2], data=b""), "features shape"),
    (_features(shape=[2, 1, 1, 2]), "features shape"),
    (_features(shape=[1, 17, 1]), "features layers"),
    (_features(data=b"1"), "features bytes"),
    (_features(shape=[1 << 17, 1, 2], data=bytes(1 << 19)), "features bytes"),
    (_features(scales=[1.0]), "features scales"),
    (_features(dtype="int8", data=b"1234", scales=[1.0, -1.0]), "features scale"),
    (_features(dtype="int8", data=b"1234", scales=[1, math.nan]), "features scale"),
    (pb.Welcome(drafters=["a", "b"], drafter_needs=[{"layers": [1]}]), "welcome drafter_needs"),
    (pb.Welcome(features={"layers": 1}), "feature offer hidden"),
    (pb.Welcome(protocol_version=1), "welcome.max_length"),
]


@pytest.mark.parametrize(("message", "field"), BAD, ids=[f"{i}-{field}" for i, (_, field) in enumerate(BAD)])
def test_bad_input_names_field_value_and_limit(message: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        DECODERS[type(message)](message)
    error = caught.value
    assert error.metadata["field"] == field
    assert error.metadata["value"]
    assert error.metadata["limit"]
    assert error.message == f"{field} = {error.metadata['value']}: must be {error.metadata['limit']}"


A, B = "a" * 32, "b" * 16


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (f"00-{A}-{B}-01", f"00-{A}-{B}-01"),
        (f"00-{A}-{B}-00", f"00-{A}-{B}-00"),
        (f"cc-{A}-{B}-01", f"00-{A}-{B}-01"),
        (f"cc-{A}-{B}-01-what the future brings{'x' * 1000}", f"00-{A}-{B}-01"),
        (f"cc-{A}-{B}-01.", ""),
        (f"00-{A}-{B}-01-x", ""),
        (f"ff-{A}-{B}-01", ""),
        (f"00-{A.upper()}-{B}-01", ""),
        (f"00-{'0' * 32}-{B}-01", ""),
        (f"00-{A}-{'0' * 16}-01", ""),
        (f"00-{A}-{B}-1", ""),
        (f"00-{A}-{B}-01\n", ""),
        ("x" * 65, ""),
        ("", ""),
    ],
)
def test_a_trace_context_is_taken_as_w3c_says_and_ignored_where_it_is_not_valid(sent: str, taken: str) -> None:
    trace = pb.TraceContext(traceparent=sent)
    messages = (_open(trace=trace), _round(trace=trace), _draft_open(trace=trace), _commit(trace=trace))
    commands = [DECODERS[type(message)](message) for message in messages]
    assert [getattr(command, "spec", command).traceparent for command in commands] == [taken] * 4


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": None, "token_ids": (-1,)}, "token_ids"),
        ({"prompt": None, "token_ids": (1 << 32,)}, "token_ids"),
        ({"sampling": t.SamplingParams(top_k=1 << 32)}, "top_k"),
        ({"max_new_tokens": 1 << 32}, "max_new_tokens"),
        ({"sampling": t.SamplingParams(min_tokens=1 << 32)}, "min_tokens"),
        ({"sampling": t.SamplingParams(logit_bias=((1 << 32, 1.0),))}, "logit_bias id"),
        ({"sampling": t.SamplingParams(bad_words=((1, 1 << 32),))}, "bad_words id"),
        ({"sampling": t.SamplingParams(grammar=t.Grammar(t.GrammarKind.LARK, "\ud800"))}, "lark"),
        ({"stop": ("\udfff",)}, "stop"),
        ({"prediction": (1 << 32,)}, "prediction"),
        ({"prediction_text": "\ud800"}, "prediction_text"),
    ],
)
def test_what_the_wire_cannot_hold_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    request = GenerateRequest(**{"prompt": "x", **changes})
    with pytest.raises(InvalidInput) as caught:
        codec.encode_generate_request(request)
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize("name", ["generate request", "sampling"])
def test_a_parameter_of_another_version_is_refused_and_never_ignored(name: str) -> None:
    field_99 = b"\x98\x06\x01"
    message = _generate()
    (message.sampling if name == "sampling" else message).MergeFromString(field_99)
    with pytest.raises(Unsupported, match=f"{name} field number 99"):
        codec.decode_generate_request(message)
    with pytest.raises(Unsupported, match="sampling field number 99"):
        codec.decode_target_command(_open(sampling=pb.SamplingParams.FromString(field_99)))


def test_session_of_a_malformed_message_is_readable() -> None:
    assert codec.session_id_of(_round(committed=[])) == 3
    assert codec.session_id_of(_verdict(token_ids=[])) == 3
    assert codec.session_id_of(_draft_open(token_ids=[])) == 3
    assert codec.session_id_of(draft_pb.DraftEvent(failure=pb.Failure(session_id=5))) == 5
    assert codec.session_id_of(target_pb.TargetCommand()) == 0


def test_unknown_failure_codes_are_internal() -> None:
    event = codec.decode_target_event(target_pb.TargetEvent(failure=pb.Failure(session_id=1, code=77)))
    assert isinstance(event, Failure)
    assert event.code == 13


LARGE_ID = 131_071
K = 8
TIMINGS = StepTimings(1.5, 20.25, 0.75, 22.5, 576, 64)


def _chain(entries: int) -> Proposal:
    if not entries:
        return Proposal(1 << 20, (LARGE_ID,) * K, (0.123,) * K, drafter="model:smollm2-135m")
    ids = tuple(range(LARGE_ID - entries + 1, LARGE_ID + 1))
    q = struct.unpack("f", struct.pack("f", 1 / entries))[0]
    support = SparseDistribution(ids, (q,) * entries)
    return Proposal(1 << 20, (LARGE_ID,) * K, (q,) * K, supports=(support,) * K, drafter="model:smollm2-135m")


def _prefetched(session: int, base: int, longest: int) -> Prefetch:
    """As many outcomes as may be prefetched for a round, with proposals so long; each is sent once."""
    outcomes = [Outcome(base, node, LARGE_ID) for node in range(MAX_PREFETCHED_NODES // longest)]
    return Prefetch(session, base, tuple((each, _chain(0).first(longest)) for each in outcomes))


def _edges(proposal: Proposal, verdict: Verdict, *prefetched: Prefetch) -> dict[str, int]:
    """Serialised bytes of one session and round on each edge, both ways together."""
    session, base = 1 << 20, 131_000
    round_ = Round(session, base, K - 1, (LARGE_ID,), proposal, TRACE)
    outcome = Outcome(base, K - 1, LARGE_ID)
    commit = Commit(session, outcome, (LARGE_ID,) * (K + 1), base, DraftBudget(K, fan_out=4), traceparent=TRACE)
    verifying = Verifying(session, base, 1 << 20, K, budget=DraftBudget(K, fan_out=4))
    drafted = DraftedProposal(session, outcome, proposal, TIMINGS)
    prefetches = [codec.encode_target_command(each) for each in prefetched]
    target: list[Any] = [codec.encode_target_command(round_), codec.encode_target_event(verdict)]
    draft: list[Any] = [
        codec.encode_draft_command(commit),
        codec.encode_draft_command(verifying),
        codec.encode_draft_event(drafted),
    ]
    return {
        "target": target_pb.VerifyRequest(commands=target[:1]).ByteSize()
        + sum(target_pb.VerifyRequest(commands=[each]).ByteSize() for each in prefetches)
        + target_pb.VerifyResponse(events=target[1:]).ByteSize(),
        "draft": draft_pb.DraftRequest(commands=draft[:2]).ByteSize()
        + draft_pb.DraftResponse(events=draft[2:]).ByteSize(),
    }


def test_coupled_round_takes_less_than_500_bytes_on_each_edge() -> None:
    verdict = Verdict(1 << 20, 131_000, (LARGE_ID,) * (K + 1), timings=TIMINGS)
    for edge, size in _edges(_chain(0), verdict).items():
        assert size < 500, edge
    self_started = replace(verdict, self_started=SelfStarted(131_000 + K + 1, K))
    assert _edges(_chain(0), self_started, _prefetched(1 << 20, 131_000, K))["target"] < 500


@pytest.mark.parametrize(("entries", "limit"), [(32, 3_000), (256, 20_000)])
def test_rejection_round_takes_less_than_20_kilobytes_on_each_edge(entries: int, limit: int) -> None:
    verdict = Verdict(
        1 << 20, 131_000, (LARGE_ID,) * (K + 1), (0.123456789,) * K, (0.123456789,) * K, timings=TIMINGS
    )
    for edge, size in _edges(_chain(entries), verdict).items():
        assert size < limit, edge


def test_the_largest_piece_of_a_report_takes_a_small_part_of_a_frame() -> None:
    row = RowLogprobs(((1 << 32) - 1,) * (t.MAX_TOP_LOGPROBS + 1), (-0.123456789,) * (t.MAX_TOP_LOGPROBS + 1))
    piece = PromptPiece(1 << 31, (1 << 32) - 1, (row,) * MAX_PIECE_ROWS)
    assert codec.encode_target_event(piece).ByteSize() < MAX_FRAME_BYTES / 16
    with pytest.raises(InvalidInput, match=r"prompt piece rows = 257: must be in \[1, 256\]"):
        PromptPiece(1, 1, (row,) * (MAX_PIECE_ROWS + 1))


def test_peers_that_know_no_reports_and_no_features_ask_for_none_and_offer_none() -> None:
    opened = codec.decode_target_command(target_pb.TargetCommand(open={"session_id": 1, "spec": _spec()}))
    assert isinstance(opened, TargetOpen)
    assert (opened.prompt_logprobs, opened.prompt_logprobs_known, opened.features) == (None, 0, None)
    assert codec.decode_generate_request(generation_pb.GenerateRequest(prompt="x")).prompt_logprobs is None
    older = pb.Welcome(
        protocol_version=1, max_length=1, max_sessions=1, max_proposal_nodes=1, max_frame_bytes=1, drafters=["a"]
    )
    welcome = codec.decode_welcome(older)
    assert not welcome.reports_prompts
    assert (welcome.features, welcome.need_of("a").any, welcome.need_of("").any) == (None, False, False)


def test_an_offer_names_the_layer_that_it_lacks_and_the_row_that_no_message_holds() -> None:
    FeatureOffer(4, 8192).check(FeatureNeed((3, -1, -2) + (0,) * 13))
    with pytest.raises(Unsupported, match=r"feature layer = 4: must be below 4"):
        FeatureOffer(4, 8).check(FeatureNeed((4,)))
    with pytest.raises(Unsupported, match=rf"feature row bytes = 262176: must be at most {MAX_FEATURE_BYTES}"):
        FeatureOffer(4, 8193).check(FeatureNeed((0,) * 16))


@settings(max_examples=40, deadline=None)
@given(some.features(), st.integers(0, 3), st.integers(0, 3))
def test_features_are_cut_into_rows(features: Features, low: int, high: int) -> None:
    first, rows = features.first_position, features.rows
    row, scales = len(features.data) // rows, len(features.scales) // rows
    cut = list(features.within(first + low, first + high))
    kept = range(low, min(high, rows))
    assert [each.first_position for each in cut] == ([first + low] if kept else [])
    assert b"".join(each.data for each in cut) == b"".join(features.data[i * row :][:row] for i in kept)
    assert [*(x for each in cut for x in each.scales)] == [
        x for i in kept for x in features.scales[i * scales :][:scales]
    ]


def test_every_wire_type_has_a_round_trip() -> None:
    """A new domain type must get a strategy: its class name appears in one of the unions."""
    covered = {TargetOpen, Round, Prefetch, Close, TargetOpened, Verdict, Features, Failure, PromptPiece}
    covered |= {DraftOpen, Commit, Verifying, DraftOpened, DraftedProposal, Shadow}  # Features go to both
    covered |= {AtWork}  # a number in its frame: `tests/coordinator/test_answer_watch.py`
    unions = (TargetCommand, TargetEvent, DraftCommand, DraftEvent)
    assert {kind for union in unions for kind in union.__args__} == covered
    assert all("session_id" in {field.name for field in fields(kind)} for kind in covered)
