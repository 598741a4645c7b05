from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Acceptance(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_UNSPECIFIED: _ClassVar[Acceptance]
    ACCEPTANCE_COUPLED: _ClassVar[Acceptance]
    ACCEPTANCE_REJECTION: _ClassVar[Acceptance]
    ACCEPTANCE_BLOCK: _ClassVar[Acceptance]

class Provenance(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROVENANCE_UNSPECIFIED: _ClassVar[Provenance]
    PROVENANCE_ACCEPTED: _ClassVar[Provenance]
    PROVENANCE_RECOVERED: _ClassVar[Provenance]
    PROVENANCE_BONUS: _ClassVar[Provenance]
    PROVENANCE_TARGET: _ClassVar[Provenance]
ACCEPTANCE_UNSPECIFIED: Acceptance
ACCEPTANCE_COUPLED: Acceptance
ACCEPTANCE_REJECTION: Acceptance
ACCEPTANCE_BLOCK: Acceptance
PROVENANCE_UNSPECIFIED: Provenance
PROVENANCE_ACCEPTED: Provenance
PROVENANCE_RECOVERED: Provenance
PROVENANCE_BONUS: Provenance
PROVENANCE_TARGET: Provenance

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logprobs: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    min_tokens: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., logprobs: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class NoiseKey(_message.Message):
    __slots__ = ("seed", "sample_index")
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    seed: int
    sample_index: int
    def __init__(self, seed: _Optional[int] = ..., sample_index: _Optional[int] = ...) -> None: ...

class SessionSpec(_message.Message):
    __slots__ = ("token_ids", "prompt_length", "sampling", "noise", "acceptance", "time_left_ms", "trace", "max_length", "end_token_ids", "tenant")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: SamplingParams
    noise: NoiseKey
    acceptance: Acceptance
    time_left_ms: int
    trace: TraceContext
    max_length: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., noise: _Optional[_Union[NoiseKey, _Mapping]] = ..., acceptance: _Optional[_Union[Acceptance, str]] = ..., time_left_ms: _Optional[int] = ..., trace: _Optional[_Union[TraceContext, _Mapping]] = ..., max_length: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("model", "tokenizer", "vocab_size", "numeric")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer: str
    vocab_size: int
    numeric: str
    def __init__(self, model: _Optional[str] = ..., tokenizer: _Optional[str] = ..., vocab_size: _Optional[int] = ..., numeric: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "fingerprint")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: str
    fingerprint: Fingerprint
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "fingerprint", "max_length", "max_sessions", "max_proposal_nodes", "max_frame_bytes", "drafters", "max_lease", "max_prefetched", "reports_prompts", "drafter_needs", "features", "default_name", "mixed_leases")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROPOSAL_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    REPORTS_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_NEEDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_NAME_FIELD_NUMBER: _ClassVar[int]
    MIXED_LEASES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: str
    fingerprint: Fingerprint
    max_length: int
    max_sessions: int
    max_proposal_nodes: int
    max_frame_bytes: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    max_lease: int
    max_prefetched: int
    reports_prompts: bool
    drafter_needs: _containers.RepeatedCompositeFieldContainer[FeatureNeed]
    features: FeatureOffer
    default_name: str
    mixed_leases: bool
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., max_length: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_proposal_nodes: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., max_lease: _Optional[int] = ..., max_prefetched: _Optional[int] = ..., reports_prompts: _Optional[bool] = ..., drafter_needs: _Optional[_Iterable[_Union[FeatureNeed, _Mapping]]] = ..., features: _Optional[_Union[FeatureOffer, _Mapping]] = ..., default_name: _Optional[str] = ..., mixed_leases: _Optional[bool] = ...) -> None: ...

class FeatureNeed(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[_Iterable[int]] = ...) -> None: ...

class FeatureOffer(_message.Message):
    __slots__ = ("layers", "hidden")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    layers: int
    hidden: int
    def __init__(self, layers: _Optional[int] = ..., hidden: _Optional[int] = ...) -> None: ...

class FeatureRequest(_message.Message):
    __slots__ = ("need", "dtype", "first_position")
    NEED_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    need: FeatureNeed
    dtype: str
    first_position: int
    def __init__(self, need: _Optional[_Union[FeatureNeed, _Mapping]] = ..., dtype: _Optional[str] = ..., first_position: _Optional[int] = ...) -> None: ...

class SparseDistribution(_message.Message):
    __slots__ = ("token_ids", "probabilities")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("proposal_id", "token_ids", "parents", "draft_probabilities", "supports", "drafter")
    PROPOSAL_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    proposal_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    draft_probabilities: _containers.RepeatedScalarFieldContainer[float]
    supports: _containers.RepeatedCompositeFieldContainer[SparseDistribution]
    drafter: str
    def __init__(self, proposal_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., draft_probabilities: _Optional[_Iterable[float]] = ..., supports: _Optional[_Iterable[_Union[SparseDistribution, _Mapping]]] = ..., drafter: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("base_length", "node", "next_token")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    node: int
    next_token: int
    def __init__(self, base_length: _Optional[int] = ..., node: _Optional[int] = ..., next_token: _Optional[int] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("traceparent",)
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    def __init__(self, traceparent: _Optional[str] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queue_ms", "forward_ms", "sample_ms", "service_ms", "rows", "sessions", "prefix_rows")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_MS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_MS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ROWS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    forward_ms: float
    sample_ms: float
    service_ms: float
    rows: int
    sessions: int
    prefix_rows: int
    def __init__(self, queue_ms: _Optional[float] = ..., forward_ms: _Optional[float] = ..., sample_ms: _Optional[float] = ..., service_ms: _Optional[float] = ..., rows: _Optional[int] = ..., sessions: _Optional[int] = ..., prefix_rows: _Optional[int] = ...) -> None: ...

class CostLine(_message.Message):
    __slots__ = ("rows", "ms")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[float]
    ms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[_Iterable[float]] = ..., ms: _Optional[_Iterable[float]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("session_id", "first_position", "dtype", "shape", "layer_ids", "data", "scales")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    first_position: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    scales: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, session_id: _Optional[int] = ..., first_position: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., layer_ids: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., scales: _Optional[_Iterable[float]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("session_id", "code", "reason", "message", "metadata", "retry_after_ms", "retry_safe", "session_closed")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_SAFE_FIELD_NUMBER: _ClassVar[int]
    SESSION_CLOSED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    code: int
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    retry_after_ms: int
    retry_safe: bool
    session_closed: bool
    def __init__(self, session_id: _Optional[int] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., retry_after_ms: _Optional[int] = ..., retry_safe: _Optional[bool] = ..., session_closed: _Optional[bool] = ...) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("incarnation", "fingerprint", "sessions", "kv_rows", "max_kv_rows", "queue_length", "steps", "resident_bytes", "frames_sent")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_KV_ROWS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_SENT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    fingerprint: Fingerprint
    sessions: int
    kv_rows: int
    max_kv_rows: int
    queue_length: int
    steps: int
    resident_bytes: int
    frames_sent: int
    def __init__(self, incarnation: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., sessions: _Optional[int] = ..., kv_rows: _Optional[int] = ..., max_kv_rows: _Optional[int] = ..., queue_length: _Optional[int] = ..., steps: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., frames_sent: _Optional[int] = ...) -> None: ...
