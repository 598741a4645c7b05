"""What every route needs: configuration, tokenizer, coordinators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from gateway.coordinators import Coordinators
from gateway.named_roles import named_roles
from gateway.reply_format import ReplyFormat, read_reply_format
from paceline.models.prompts import PromptReader
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import UnknownModel
from paceline.protocol.generation import ModelDescription
from paceline.runtime.gateway_config import GatewayConfig


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

    async def close(self) -> None:
        """Let go of threads and channels."""
        self.prompts.close()
        await self.coordinators.close()
