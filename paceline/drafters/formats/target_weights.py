"""The parts of a target that a drafter takes: its configuration, and an embedding and head if it lacks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.formats.draft_files import TensorFiles
from paceline.engine.weights import load_decoder, load_decoder_config
from paceline.models.resolve import ModelSource, resolve
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.errors import Unsupported
from paceline.runtime.config import EngineSettings

_EMBEDDINGS = tuple(
    f"{prefix}embed_tokens.weight"
    for prefix in ("model.", "model.language_model.", "language_model.model.", "model.text_model.")
)
_HEADS = ("lm_head.weight", "model.language_model.lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, eq=False)
class TargetWeights:
    """A target whose layers are not read; `config` is that of its text model."""

    source: ModelSource
    config: Any
    tokenizer: Tokenizer
    settings: EngineSettings

    @classmethod
    def load(cls, model: str, settings: EngineSettings) -> TargetWeights:
        """Find a target.

        Raises:
            InvalidInput: nothing that transformers loads has that name.
            Unsupported: a table.
        """
        source = resolve(model)
        if source.kind == "table":
            raise Unsupported(f"target {model}: a table model has no hidden states")
        config: Any = load_decoder_config(source, settings)
        tokenizer = load_tokenizer(model, trust_remote_code=settings.trust_remote_code)
        return cls(source, config.get_text_config(), tokenizer, settings)

    @property
    def name(self) -> str:
        """The name shown to users."""
        return self.source.name

    def embedding(self) -> torch.Tensor:
        """[tensor width, hidden]."""
        tensor = self._read(_EMBEDDINGS)
        return self._load_model().get_input_embeddings().weight if tensor is None else tensor

    def head(self) -> torch.Tensor:
        """[tensor width, hidden]; the embedding, where the target uses that twice."""
        tensor = self._read(_HEADS)
        if tensor is None and self.config.tie_word_embeddings:
            return self.embedding()
        return self._load_model().get_output_embeddings().weight if tensor is None else tensor

    def _read(self, names: Sequence[str]) -> torch.Tensor | None:
        """The first of these tensors that the target's files have."""
        folder = Path(self.source.location)
        if self.source.kind != "folder" or not any(folder.glob("*.safetensors")):
            return None
        files = TensorFiles(folder)
        return next((files.read(name) for name in names if name in files), None)

    def _load_model(self) -> Any:
        """The whole model, where its files can't be read one by one."""
        return load_decoder(self.source, self.settings, on_host=True)
