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
"""Names that clients send if their user named no model; the second is huggingface_hub's."""


@dataclass(frozen=True)
class Services:
    """The services of one process, which are closed with it."""

    config: GatewayConfig
    tokenizer: Tokenizer
    prompts: PromptReader
    coordinators: Coordinators
    reply_format: ReplyFormat

    @classmethod
    def of(cls, config: GatewayConfig, tokenizer: Tokenizer) -> Services:
        """Build the services without opening anything yet; they belong to the running event loop."""
        coordinators = Coordinators(config, tokenizer.fingerprint)
        return cls(config, tokenizer, PromptReader(tokenizer), coordinators, read_reply_format(tokenizer))

    @cached_property
    def named_roles(self) -> frozenset[str]:
        """Roles in whose turns the model's template writes a name; some milliseconds, once."""
        return named_roles(self.tokenizer)

    def served_name(self, description: ModelDescription) -> str:
        """Return the name by which requests call the model."""
        return self.config.served_model_name or description.name

    def check_model(self, model: str | None, description: ModelDescription) -> None:
        """Refuse another model than the served one.

        Raises:
            UnknownModel: naming both.
        """
        name = self.served_name(description)
        if model not in (None, *NO_MODEL, name):
            raise UnknownModel(f"model = {model[:200]!r}: must be {name!r}, the one served here")

    async def token_ids(self, text: str, max_length: int, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return a prompt's ids; a long prompt is read beside the event loop.

        Raises:
            InvalidInput: more bytes than the context can hold.
        """
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self.prompts.read(encode, len(text.encode()), max_length, "prompt bytes")

    async def text(self, token_ids: Sequence[int], field: str) -> str:
        """Return the text of ids; many ids are read beside the event loop.

        Raises:
            InvalidInput: an id is not in the vocabulary; naming the field.
        """
        size = PIECE_BYTES * len(token_ids)
        return await self.prompts.run(partial(self._text, token_ids, field), size)

    def _text(self, token_ids: Sequence[int], field: str) -> str:
        require_ids(field, token_ids, self.tokenizer.vocab_size)
        return self.tokenizer.decode(token_ids)

    async def close(self) -> None:
        """Close threads and channels."""
        self.prompts.close()
        await self.coordinators.close()
