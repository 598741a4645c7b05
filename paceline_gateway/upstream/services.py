"""What every route needs: configuration, tokenizer, coordinators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from paceline.models.prompts import PIECE_BYTES, PromptReader
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import UnknownModel, require_ids
from paceline.protocol.generation import ModelDescription
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.reply.format import ReplyFormat
from paceline_gateway.reply.template_probes import named_roles, read_reply_format
from paceline_gateway.upstream.coordinators import Coordinators

NO_MODEL = ("", "dummy")
"""What clients send that were given no model: huggingface_hub's the latter."""


@dataclass(frozen=True)
class Services:
    """Made once for a process, and closed with it."""

    config: GatewayConfig
    tokenizer: Tokenizer
    prompts: PromptReader
    coordinators: Coordinators
    form: ReplyFormat

    @classmethod
    def of(cls, config: GatewayConfig, tokenizer: Tokenizer) -> Services:
        """Open nothing yet; belongs to the running event loop."""
        coordinators = Coordinators(config, tokenizer.fingerprint)
        return cls(config, tokenizer, PromptReader(tokenizer), coordinators, read_reply_format(tokenizer))

    @cached_property
    def named_roles(self) -> frozenset[str]:
        """Roles in whose turns the model's template writes a name; some milliseconds, once."""
        return named_roles(self.tokenizer)

    def served_name(self, description: ModelDescription) -> str:
        """What requests call the model."""
        return self.config.served_model_name or description.name

    def check_model(self, wanted: str | None, description: ModelDescription) -> None:
        """Refuse another model than the served one.

        Raises:
            UnknownModel: naming both.
        """
        served = self.served_name(description)
        if wanted not in (None, *NO_MODEL, served):
            raise UnknownModel(f"model = {wanted[:200]!r}: must be {served!r}, the one served here")

    async def token_ids(self, text: str, max_length: int, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """A prompt's ids, read beside the event loop where it is long.

        Raises:
            InvalidInput: more bytes than the context can hold.
        """
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self.prompts.read(encode, len(text.encode()), max_length, "prompt bytes")

    async def text(self, token_ids: Sequence[int], field: str) -> str:
        """The text of ids, read likewise.

        Raises:
            InvalidInput: one is none of the vocabulary's; naming the field.
        """
        size = PIECE_BYTES * len(token_ids)
        return await self.prompts.beside(partial(self._text, token_ids, field), size)

    def _text(self, token_ids: Sequence[int], field: str) -> str:
        require_ids(field, token_ids, self.tokenizer.vocab_size)
        return self.tokenizer.decode(token_ids)

    async def close(self) -> None:
        """Let go of threads and channels."""
        self.prompts.close()
        await self.coordinators.close()
