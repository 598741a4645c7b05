from paceline.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("hello", "commands")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    commands: _containers.RepeatedCompositeFieldContainer[DraftCommand]
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., commands: _Optional[_Iterable[_Union[DraftCommand, _Mapping]]] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("commit", "verifying", "open", "close", "features")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    VERIFYING_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    commit: Commit
    verifying: Verifying
    open: DraftOpen
    close: _types_pb2.Close
    features: _types_pb2.Features
    def __init__(self, commit: _Optional[_Union[Commit, _Mapping]] = ..., verifying: _Optional[_Union[Verifying, _Mapping]] = ..., open: _Optional[_Union[DraftOpen, _Mapping]] = ..., close: _Optional[_Union[_types_pb2.Close, _Mapping]] = ..., features: _Optional[_Union[_types_pb2.Features, _Mapping]] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("session_id", "spec", "drafter", "budget", "takes_shadows")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    TAKES_SHADOWS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    spec: _types_pb2.SessionSpec
    drafter: str
    budget: DraftBudget
    takes_shadows: bool
    def __init__(self, session_id: _Optional[int] = ..., spec: _Optional[_Union[_types_pb2.SessionSpec, _Mapping]] = ..., drafter: _Optional[str] = ..., budget: _Optional[_Union[DraftBudget, _Mapping]] = ..., takes_shadows: _Optional[bool] = ...) -> None: ...

class DraftBudget(_message.Message):
    __slots__ = ("max_tokens", "tree_widths", "max_nodes", "fan_out", "deadline_ms", "shadow", "least_chance")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TREE_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    LEAST_CHANCE_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    tree_widths: _containers.RepeatedScalarFieldContainer[int]
    max_nodes: int
    fan_out: int
    deadline_ms: int
    shadow: bool
    least_chance: float
    def __init__(self, max_tokens: _Optional[int] = ..., tree_widths: _Optional[_Iterable[int]] = ..., max_nodes: _Optional[int] = ..., fan_out: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., shadow: _Optional[bool] = ..., least_chance: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("session_id", "outcome", "token_ids", "committed_length", "budget", "features", "trace")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    outcome: _types_pb2.Outcome
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_length: int
    budget: DraftBudget
    features: _types_pb2.Features
    trace: _types_pb2.TraceContext
    def __init__(self, session_id: _Optional[int] = ..., outcome: _Optional[_Union[_types_pb2.Outcome, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., committed_length: _Optional[int] = ..., budget: _Optional[_Union[DraftBudget, _Mapping]] = ..., features: _Optional[_Union[_types_pb2.Features, _Mapping]] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ...) -> None: ...

class Verifying(_message.Message):
    __slots__ = ("session_id", "base_length", "proposal_id", "node_count", "proposal", "budget")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    base_length: int
    proposal_id: int
    node_count: int
    proposal: _types_pb2.Proposal
    budget: DraftBudget
    def __init__(self, session_id: _Optional[int] = ..., base_length: _Optional[int] = ..., proposal_id: _Optional[int] = ..., node_count: _Optional[int] = ..., proposal: _Optional[_Union[_types_pb2.Proposal, _Mapping]] = ..., budget: _Optional[_Union[DraftBudget, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("welcome", "events", "costs")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    welcome: _types_pb2.Welcome
    events: _containers.RepeatedCompositeFieldContainer[DraftEvent]
    costs: DraftCosts
    def __init__(self, welcome: _Optional[_Union[_types_pb2.Welcome, _Mapping]] = ..., events: _Optional[_Iterable[_Union[DraftEvent, _Mapping]]] = ..., costs: _Optional[_Union[DraftCosts, _Mapping]] = ...) -> None: ...

class DraftCosts(_message.Message):
    __slots__ = ("line", "sessions", "rows", "queue", "others", "beside")
    LINE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    line: _types_pb2.CostLine
    sessions: int
    rows: int
    queue: int
    others: _containers.RepeatedCompositeFieldContainer[DrafterLine]
    beside: _containers.RepeatedCompositeFieldContainer[DrafterLine]
    def __init__(self, line: _Optional[_Union[_types_pb2.CostLine, _Mapping]] = ..., sessions: _Optional[int] = ..., rows: _Optional[int] = ..., queue: _Optional[int] = ..., others: _Optional[_Iterable[_Union[DrafterLine, _Mapping]]] = ..., beside: _Optional[_Iterable[_Union[DrafterLine, _Mapping]]] = ...) -> None: ...

class DrafterLine(_message.Message):
    __slots__ = ("drafter", "line")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    line: _types_pb2.CostLine
    def __init__(self, drafter: _Optional[str] = ..., line: _Optional[_Union[_types_pb2.CostLine, _Mapping]] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("proposal", "opened", "failure", "shadow")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    proposal: DraftedProposal
    opened: DraftOpened
    failure: _types_pb2.Failure
    shadow: Shadow
    def __init__(self, proposal: _Optional[_Union[DraftedProposal, _Mapping]] = ..., opened: _Optional[_Union[DraftOpened, _Mapping]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ..., shadow: _Optional[_Union[Shadow, _Mapping]] = ...) -> None: ...

class DraftOpened(_message.Message):
    __slots__ = ("session_id", "reused_tokens", "drafter", "feature_layers")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    reused_tokens: int
    drafter: str
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., drafter: _Optional[str] = ..., feature_layers: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftedProposal(_message.Message):
    __slots__ = ("session_id", "outcome", "proposal", "timings")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    outcome: _types_pb2.Outcome
    proposal: _types_pb2.Proposal
    timings: _types_pb2.StepTimings
    def __init__(self, session_id: _Optional[int] = ..., outcome: _Optional[_Union[_types_pb2.Outcome, _Mapping]] = ..., proposal: _Optional[_Union[_types_pb2.Proposal, _Mapping]] = ..., timings: _Optional[_Union[_types_pb2.StepTimings, _Mapping]] = ...) -> None: ...

class Shadow(_message.Message):
    __slots__ = ("session_id", "first_position", "ranks", "probabilities")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    first_position: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, session_id: _Optional[int] = ..., first_position: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ...) -> None: ...

class GetDraftStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftStatusResponse(_message.Message):
    __slots__ = ("status", "costs")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    status: _types_pb2.ServiceStatus
    costs: DraftCosts
    def __init__(self, status: _Optional[_Union[_types_pb2.ServiceStatus, _Mapping]] = ..., costs: _Optional[_Union[DraftCosts, _Mapping]] = ...) -> None: ...
