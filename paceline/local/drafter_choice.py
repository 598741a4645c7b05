"""What `--drafter` may say: auto, ngram, model, none; auto and model with `:PATH` for a draft model of one's own."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.resolve import DEFAULT_DRAFT, is_pulled, pullable_draft, resolve, resolve_draft, shipped_draft
from paceline.protocol.errors import require
from paceline.protocol.proposal import AUTO, NGRAM, NONE

MODEL = "model"
_LIMIT = "auto, ngram, model or none; auto:PATH or model:PATH names a draft model"


@dataclass(frozen=True)
class DrafterChoice:
    """How requests are drafted for unless they choose: the kind, and the draft model if one was named."""

    kind: str
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> DrafterChoice:
        """Read `KIND` or `KIND:PATH`.

        Raises:
            InvalidInput: neither.
        """
        kind, separator, model = text.partition(":")
        takes_model = kind in (AUTO, MODEL)
        known = takes_model or kind in (NGRAM, NONE)
        require(known and (not separator or (takes_model and model != "")), "drafter", text, _LIMIT)
        return cls(kind, model)

    def draft_model(self, target: str) -> str | None:
        """What the draft service loads beside a target; None: none is needed.

        `auto` for a target whose own draft isn't there, or that has none, is content with n-grams.
        """
        if self.kind not in (AUTO, MODEL):
            return None
        if not self.model and self.kind == AUTO and not _has_own_draft(target):
            return None
        return self.model or DEFAULT_DRAFT

    def missing_draft(self, target: str) -> str | None:
        """The pullable model that `auto` would draft with if it were pulled."""
        chosen = self.kind == AUTO and not self.model and not _has_own_draft(target)
        return pullable_draft(target) if chosen else None

    def check(self, target: str) -> None:
        """Refuse a draft model that isn't there.

        Raises:
            InvalidInput: naming it.
        """
        model = self.draft_model(target)
        if model is not None:
            resolve(resolve_draft(model, target))


def _has_own_draft(target: str) -> bool:
    pulled = pullable_draft(target)
    return shipped_draft(target) is not None or (pulled is not None and is_pulled(pulled))
