from paceline.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class PeerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_KIND_UNSPECIFIED: _ClassVar[PeerKind]
    PEER_KIND_TARGET: _ClassVar[PeerKind]
    PEER_KIND_DRAFT: _ClassVar[PeerKind]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
PEER_KIND_UNSPECIFIED: PeerKind
PEER_KIND_TARGET: PeerKind
PEER_KIND_DRAFT: PeerKind

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "chat", "tokens", "sampling", "seed", "max_new_tokens", "stop", "ignore_eos", "acceptance", "speculation", "resume_token_ids", "sample_index", "prompt_logprobs", "stop_token_ids", "prediction", "prediction_text")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TEXT_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    chat: ChatInput
    tokens: TokenInput
    sampling: _types_pb2.SamplingParams
    seed: int
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    acceptance: _types_pb2.Acceptance
    speculation: SpeculationSettings
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sample_index: int
    prompt_logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prediction: _containers.RepeatedScalarFieldContainer[int]
    prediction_text: str
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., tokens: _Optional[_Union[TokenInput, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., acceptance: _Optional[_Union[_types_pb2.Acceptance, str]] = ..., speculation: _Optional[_Union[SpeculationSettings, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., sample_index: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., prediction: _Optional[_Iterable[int]] = ..., prediction_text: _Optional[str] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class TokenInput(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculationSettings(_message.Message):
    __slots__ = ("off", "drafter", "num_draft_tokens", "tree_widths", "explain", "report_rounds")
    OFF_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TREE_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    REPORT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    off: bool
    drafter: str
    num_draft_tokens: int
    tree_widths: _containers.RepeatedScalarFieldContainer[int]
    explain: bool
    report_rounds: bool
    def __init__(self, off: _Optional[bool] = ..., drafter: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., tree_widths: _Optional[_Iterable[int]] = ..., explain: _Optional[bool] = ..., report_rounds: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "tokens", "finished", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: GenerationStarted
    tokens: GeneratedTokens
    finished: GenerationFinished
    prompt_logprobs: PromptLogprobs
    def __init__(self, started: _Optional[_Union[GenerationStarted, _Mapping]] = ..., tokens: _Optional[_Union[GeneratedTokens, _Mapping]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("seed", "prompt_token_ids", "model", "sampling")
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    seed: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    model: str
    sampling: _types_pb2.SamplingParams
    def __init__(self, seed: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "rows")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    rows: _containers.RepeatedCompositeFieldContainer[_types_pb2.RowLogprobs]
    def __init__(self, first_position: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[_types_pb2.RowLogprobs, _Mapping]]] = ...) -> None: ...

class GeneratedTokens(_message.Message):
    __slots__ = ("token_ids", "text", "provenance", "logprobs", "text_ends", "replaced_token_ids", "records")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_ENDS_FIELD_NUMBER: _ClassVar[int]
    REPLACED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    provenance: _containers.RepeatedScalarFieldContainer[_types_pb2.Provenance]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.RowLogprobs]
    text_ends: _containers.RepeatedScalarFieldContainer[int]
    replaced_token_ids: _containers.RepeatedScalarFieldContainer[int]
    records: _containers.RepeatedCompositeFieldContainer[RoundRecord]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., provenance: _Optional[_Iterable[_Union[_types_pb2.Provenance, str]]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.RowLogprobs, _Mapping]]] = ..., text_ends: _Optional[_Iterable[int]] = ..., replaced_token_ids: _Optional[_Iterable[int]] = ..., records: _Optional[_Iterable[_Union[RoundRecord, _Mapping]]] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("reason", "text", "stats")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    text: str
    stats: GenerationStats
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., text: _Optional[str] = ..., stats: _Optional[_Union[GenerationStats, _Mapping]] = ...) -> None: ...

class GenerationStats(_message.Message):
    __slots__ = ("rounds", "committed", "cache_hits", "cache_misses", "time_to_first_token_ms", "tokens_per_second", "verify_ms_p50", "draft_wait_ms_p50", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram", "num_spec_tokens", "records", "explanation", "prediction_accepted", "prediction_rejected", "cached_prompt_tokens", "feature_bytes", "reasoning", "answer")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    CACHE_MISSES_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_P50_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_MS_P50_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_REJECTED_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    committed: int
    cache_hits: int
    cache_misses: int
    time_to_first_token_ms: float
    tokens_per_second: float
    verify_ms_p50: float
    draft_wait_ms_p50: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_spec_tokens: int
    records: _containers.RepeatedCompositeFieldContainer[RoundRecord]
    explanation: PlanExplanation
    prediction_accepted: int
    prediction_rejected: int
    cached_prompt_tokens: int
    feature_bytes: int
    reasoning: RoundStats
    answer: RoundStats
    def __init__(self, rounds: _Optional[int] = ..., committed: _Optional[int] = ..., cache_hits: _Optional[int] = ..., cache_misses: _Optional[int] = ..., time_to_first_token_ms: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., verify_ms_p50: _Optional[float] = ..., draft_wait_ms_p50: _Optional[float] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., num_spec_tokens: _Optional[int] = ..., records: _Optional[_Iterable[_Union[RoundRecord, _Mapping]]] = ..., explanation: _Optional[_Union[PlanExplanation, _Mapping]] = ..., prediction_accepted: _Optional[int] = ..., prediction_rejected: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., feature_bytes: _Optional[int] = ..., reasoning: _Optional[_Union[RoundStats, _Mapping]] = ..., answer: _Optional[_Union[RoundStats, _Mapping]] = ...) -> None: ...

class PlanExplanation(_message.Message):
    __slots__ = ("target_alone_ms", "target_beside_ms", "draft_ms", "target_trip_ms", "draft_trip_ms", "target_sessions", "positions", "acceptance", "ngram_acceptance", "candidates", "account_ms", "account_bound_ms", "group")
    TARGET_ALONE_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_BESIDE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TRIP_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TRIP_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    NGRAM_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_MS_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_BOUND_MS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    target_alone_ms: _containers.RepeatedScalarFieldContainer[float]
    target_beside_ms: _containers.RepeatedScalarFieldContainer[float]
    draft_ms: float
    target_trip_ms: float
    draft_trip_ms: float
    target_sessions: int
    positions: int
    acceptance: _containers.RepeatedScalarFieldContainer[float]
    ngram_acceptance: _containers.RepeatedScalarFieldContainer[float]
    candidates: _containers.RepeatedCompositeFieldContainer[CandidateExplanation]
    account_ms: float
    account_bound_ms: float
    group: GroupReport
    def __init__(self, target_alone_ms: _Optional[_Iterable[float]] = ..., target_beside_ms: _Optional[_Iterable[float]] = ..., draft_ms: _Optional[float] = ..., target_trip_ms: _Optional[float] = ..., draft_trip_ms: _Optional[float] = ..., target_sessions: _Optional[int] = ..., positions: _Optional[int] = ..., acceptance: _Optional[_Iterable[float]] = ..., ngram_acceptance: _Optional[_Iterable[float]] = ..., candidates: _Optional[_Iterable[_Union[CandidateExplanation, _Mapping]]] = ..., account_ms: _Optional[float] = ..., account_bound_ms: _Optional[float] = ..., group: _Optional[_Union[GroupReport, _Mapping]] = ...) -> None: ...

class GroupReport(_message.Message):
    __slots__ = ("mode", "mode_steps", "sessions", "promise", "promise_bound", "modes")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PROMISE_FIELD_NUMBER: _ClassVar[int]
    PROMISE_BOUND_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    mode: str
    mode_steps: float
    sessions: int
    promise: float
    promise_bound: float
    modes: _containers.RepeatedCompositeFieldContainer[ModeReport]
    def __init__(self, mode: _Optional[str] = ..., mode_steps: _Optional[float] = ..., sessions: _Optional[int] = ..., promise: _Optional[float] = ..., promise_bound: _Optional[float] = ..., modes: _Optional[_Iterable[_Union[ModeReport, _Mapping]]] = ...) -> None: ...

class ModeReport(_message.Message):
    __slots__ = ("name", "state", "gain", "wait_steps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    WAIT_STEPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    gain: float
    wait_steps: float
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., gain: _Optional[float] = ..., wait_steps: _Optional[float] = ...) -> None: ...

class CandidateExplanation(_message.Message):
    __slots__ = ("name", "draft_tokens", "tokens", "ms", "rounds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    draft_tokens: int
    tokens: float
    ms: float
    rounds: int
    def __init__(self, name: _Optional[str] = ..., draft_tokens: _Optional[int] = ..., tokens: _Optional[float] = ..., ms: _Optional[float] = ..., rounds: _Optional[int] = ...) -> None: ...

class RoundRecord(_message.Message):
    __slots__ = ("base_length", "round_ms", "draft_wait_ms", "wire_ms", "target", "accept_ms", "proposed", "accepted", "cache_hit", "drafter", "draft", "cache_miss", "self_started", "begun_ms", "feature_bytes", "reasoning", "mode")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROUND_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    WIRE_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_MS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CACHE_MISS_FIELD_NUMBER: _ClassVar[int]
    SELF_STARTED_FIELD_NUMBER: _ClassVar[int]
    BEGUN_MS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    round_ms: float
    draft_wait_ms: float
    wire_ms: float
    target: _types_pb2.StepTimings
    accept_ms: float
    proposed: int
    accepted: int
    cache_hit: bool
    drafter: str
    draft: _types_pb2.StepTimings
    cache_miss: bool
    self_started: bool
    begun_ms: float
    feature_bytes: int
    reasoning: bool
    mode: str
    def __init__(self, base_length: _Optional[int] = ..., round_ms: _Optional[float] = ..., draft_wait_ms: _Optional[float] = ..., wire_ms: _Optional[float] = ..., target: _Optional[_Union[_types_pb2.StepTimings, _Mapping]] = ..., accept_ms: _Optional[float] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., cache_hit: _Optional[bool] = ..., drafter: _Optional[str] = ..., draft: _Optional[_Union[_types_pb2.StepTimings, _Mapping]] = ..., cache_miss: _Optional[bool] = ..., self_started: _Optional[bool] = ..., begun_ms: _Optional[float] = ..., feature_bytes: _Optional[int] = ..., reasoning: _Optional[bool] = ..., mode: _Optional[str] = ...) -> None: ...

class RoundStats(_message.Message):
    __slots__ = ("rounds", "committed", "tokens_per_second", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    committed: int
    tokens_per_second: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    def __init__(self, rounds: _Optional[int] = ..., committed: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class DescribeModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelDescription]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelDescription, _Mapping]]] = ...) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("name", "target", "draft", "max_length", "drafters", "target_ready", "draft_ready", "peers", "sampling", "max_new_tokens", "tenant")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_READY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_READY_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    name: str
    target: _types_pb2.Fingerprint
    draft: _types_pb2.Fingerprint
    max_length: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    target_ready: bool
    draft_ready: bool
    peers: _containers.RepeatedCompositeFieldContainer[PeerDescription]
    sampling: _types_pb2.SamplingParams
    max_new_tokens: int
    tenant: str
    def __init__(self, name: _Optional[str] = ..., target: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., draft: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., max_length: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., target_ready: _Optional[bool] = ..., draft_ready: _Optional[bool] = ..., peers: _Optional[_Iterable[_Union[PeerDescription, _Mapping]]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class PeerDescription(_message.Message):
    __slots__ = ("kind", "address", "up", "problem", "fingerprint", "sessions", "step_sessions", "step_rows", "queue", "step_ms", "group")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    kind: PeerKind
    address: str
    up: bool
    problem: str
    fingerprint: _types_pb2.Fingerprint
    sessions: int
    step_sessions: int
    step_rows: int
    queue: int
    step_ms: float
    group: GroupReport
    def __init__(self, kind: _Optional[_Union[PeerKind, str]] = ..., address: _Optional[str] = ..., up: _Optional[bool] = ..., problem: _Optional[str] = ..., fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., sessions: _Optional[int] = ..., step_sessions: _Optional[int] = ..., step_rows: _Optional[int] = ..., queue: _Optional[int] = ..., step_ms: _Optional[float] = ..., group: _Optional[_Union[GroupReport, _Mapping]] = ...) -> None: ...
