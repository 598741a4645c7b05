"""vLLM as far as our plugins touch it: its modules, its configuration, and the contract of a speculator, restated."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.drafting import server_client
from tests.drafting.foreign_server import TOKENS, Judge
from tests.services.harness import SPEC


class BaseSpeculator(ABC):
    num_query_per_req = 1

    @abstractmethod
    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None: ...

    @abstractmethod
    def capture(self) -> None: ...

    @abstractmethod
    def propose(self, *arguments: Any) -> torch.Tensor: ...


def parameters(method: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters)


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> ModuleType:
    """A module of this name with these attributes; those above it are empty where there are none yet."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if not isinstance(sys.modules.get(path), ModuleType) or getattr(sys.modules[path], "__file__", None):
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    vars(sys.modules[name]).update(attributes)
    return sys.modules[name]


def put_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of the table's size, whose fingerprint nobody checks; and a judge that always offers."""
    vocabulary = {f"t{each}": each for each in range(SPEC.vocab)}
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary)
    put_module(monkeypatch, "vllm.tokenizers", cached_tokenizer_from_config=lambda model: tokenizer)
    monkeypatch.setattr("paceline.models.vocabulary.vocabulary_fingerprint", lambda vocabulary: "")
    monkeypatch.setattr(server_client, "GoodputJudge", Judge)


def config(address: str, rank: int = 0, **settings: object) -> Any:
    model = SimpleNamespace(get_vocab_size=lambda: SPEC.vocab, max_model_len=SPEC.max_length)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2, prefill_context_parallel_size=1),
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=TOKENS, use_ngram=lambda: True),
        additional_config={"paceline": {"draft": {"address": address}, **settings}},
    )
