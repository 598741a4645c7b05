"""The public Python client: `Client` and `AsyncClient`, and all that a request is made of.

    with Client("127.0.0.1:50051") as client:
        for event in client.stream(prompt="Once upon a time", max_new_tokens=64):
            ...
        generation = client.generate(messages=[ChatMessage("user", "Hello")], seed=7)

A stream that breaks is resumed with the token ids that have arrived: they keep
their absolute positions and are never retokenised, so the joined text is what
an undisturbed stream would have been.
"""

from __future__ import annotations

from paceline.client.clients import AsyncClient, Client
from paceline.client.shared import DEFAULT_ADDRESS, Collector, Generation, Patience, Progress
from paceline.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    Unauthenticated,
    UnknownModel,
    Unsupported,
    VocabularyMismatch,
)
from paceline.protocol.generation import (
    ChatMessage,
    Finished,
    FinishReason,
    GenerateEvent,
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
from paceline.protocol.proposal import Acceptance
from paceline.protocol.records import GenerationStats
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.protocol.target import RowLogprobs
from paceline.runtime.config import PeerSettings

__all__ = [
    "DEFAULT_ADDRESS",
    "Acceptance",
    "AsyncClient",
    "Cancelled",
    "ChatMessage",
    "Client",
    "Collector",
    "DeadlineExceeded",
    "FinishReason",
    "Finished",
    "GenerateEvent",
    "GenerateRequest",
    "Generation",
    "GenerationStats",
    "Grammar",
    "GrammarKind",
    "InternalError",
    "InvalidInput",
    "ModelDescription",
    "Overloaded",
    "PacelineError",
    "Patience",
    "PeerDescription",
    "PeerKind",
    "PeerSettings",
    "PeerUnavailable",
    "Progress",
    "PromptLogprobs",
    "Provenance",
    "RowLogprobs",
    "SamplingParams",
    "SpeculationSettings",
    "Started",
    "Tokens",
    "Unauthenticated",
    "UnknownModel",
    "Unsupported",
    "VocabularyMismatch",
]
