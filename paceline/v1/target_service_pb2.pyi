from paceline.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("hello", "commands")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    commands: _containers.RepeatedCompositeFieldContainer[TargetCommand]
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., commands: _Optional[_Iterable[_Union[TargetCommand, _Mapping]]] = ...) -> None: ...

class TargetCommand(_message.Message):
    __slots__ = ("round", "open", "close", "prefetch")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    round: Round
    open: TargetOpen
    close: _types_pb2.Close
    prefetch: Prefetch
    def __init__(self, round: _Optional[_Union[Round, _Mapping]] = ..., open: _Optional[_Union[TargetOpen, _Mapping]] = ..., close: _Optional[_Union[_types_pb2.Close, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ...) -> None: ...

class TargetOpen(_message.Message):
    __slots__ = ("session_id", "spec", "feature_layers", "prompt_logprobs", "prompt_logprobs_known", "features")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    spec: _types_pb2.SessionSpec
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    prompt_logprobs_known: int
    features: _types_pb2.FeatureRequest
    def __init__(self, session_id: _Optional[int] = ..., spec: _Optional[_Union[_types_pb2.SessionSpec, _Mapping]] = ..., feature_layers: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., prompt_logprobs_known: _Optional[int] = ..., features: _Optional[_Union[_types_pb2.FeatureRequest, _Mapping]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("session_id", "base_length", "accepted_node", "committed", "proposal", "trace", "lease", "drafting")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    base_length: int
    accepted_node: int
    committed: _containers.RepeatedScalarFieldContainer[int]
    proposal: _types_pb2.Proposal
    trace: _types_pb2.TraceContext
    lease: int
    drafting: bool
    def __init__(self, session_id: _Optional[int] = ..., base_length: _Optional[int] = ..., accepted_node: _Optional[int] = ..., committed: _Optional[_Iterable[int]] = ..., proposal: _Optional[_Union[_types_pb2.Proposal, _Mapping]] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., lease: _Optional[int] = ..., drafting: _Optional[bool] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("session_id", "base_length", "proposals")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    base_length: int
    proposals: _containers.RepeatedCompositeFieldContainer[PrefetchedProposal]
    def __init__(self, session_id: _Optional[int] = ..., base_length: _Optional[int] = ..., proposals: _Optional[_Iterable[_Union[PrefetchedProposal, _Mapping]]] = ...) -> None: ...

class PrefetchedProposal(_message.Message):
    __slots__ = ("node", "next_token", "token_ids", "parents")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    node: int
    next_token: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node: _Optional[int] = ..., next_token: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("welcome", "events", "costs", "at_work")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    AT_WORK_FIELD_NUMBER: _ClassVar[int]
    welcome: _types_pb2.Welcome
    events: _containers.RepeatedCompositeFieldContainer[TargetEvent]
    costs: TargetCosts
    at_work: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, welcome: _Optional[_Union[_types_pb2.Welcome, _Mapping]] = ..., events: _Optional[_Iterable[_Union[TargetEvent, _Mapping]]] = ..., costs: _Optional[_Union[TargetCosts, _Mapping]] = ..., at_work: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetCosts(_message.Message):
    __slots__ = ("alone", "beside", "sessions", "rows", "queue")
    ALONE_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    alone: _types_pb2.CostLine
    beside: _types_pb2.CostLine
    sessions: int
    rows: int
    queue: int
    def __init__(self, alone: _Optional[_Union[_types_pb2.CostLine, _Mapping]] = ..., beside: _Optional[_Union[_types_pb2.CostLine, _Mapping]] = ..., sessions: _Optional[int] = ..., rows: _Optional[int] = ..., queue: _Optional[int] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("verdict", "opened", "failure", "features", "prompt_piece")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PIECE_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    opened: TargetOpened
    failure: _types_pb2.Failure
    features: _types_pb2.Features
    prompt_piece: PromptPiece
    def __init__(self, verdict: _Optional[_Union[Verdict, _Mapping]] = ..., opened: _Optional[_Union[TargetOpened, _Mapping]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ..., features: _Optional[_Union[_types_pb2.Features, _Mapping]] = ..., prompt_piece: _Optional[_Union[PromptPiece, _Mapping]] = ...) -> None: ...

class PromptPiece(_message.Message):
    __slots__ = ("session_id", "first_position", "rows")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    first_position: int
    rows: _containers.RepeatedCompositeFieldContainer[_types_pb2.RowLogprobs]
    def __init__(self, session_id: _Optional[int] = ..., first_position: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[_types_pb2.RowLogprobs, _Mapping]]] = ...) -> None: ...

class TargetOpened(_message.Message):
    __slots__ = ("session_id", "reused_tokens", "timings")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    reused_tokens: int
    timings: _types_pb2.StepTimings
    def __init__(self, session_id: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., timings: _Optional[_Union[_types_pb2.StepTimings, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("session_id", "base_length", "token_ids", "target_probabilities", "residual_masses", "logprobs", "timings", "self_started")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_MASSES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SELF_STARTED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    target_probabilities: _containers.RepeatedScalarFieldContainer[float]
    residual_masses: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.RowLogprobs]
    timings: _types_pb2.StepTimings
    self_started: SelfStarted
    def __init__(self, session_id: _Optional[int] = ..., base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., target_probabilities: _Optional[_Iterable[float]] = ..., residual_masses: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.RowLogprobs, _Mapping]]] = ..., timings: _Optional[_Union[_types_pb2.StepTimings, _Mapping]] = ..., self_started: _Optional[_Union[SelfStarted, _Mapping]] = ...) -> None: ...

class SelfStarted(_message.Message):
    __slots__ = ("base_length", "nodes")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    nodes: int
    def __init__(self, base_length: _Optional[int] = ..., nodes: _Optional[int] = ...) -> None: ...

class GetTargetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTargetStatusResponse(_message.Message):
    __slots__ = ("status", "costs")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    status: _types_pb2.ServiceStatus
    costs: TargetCosts
    def __init__(self, status: _Optional[_Union[_types_pb2.ServiceStatus, _Mapping]] = ..., costs: _Optional[_Union[TargetCosts, _Mapping]] = ...) -> None: ...
