"""The values of `--drafter`: auto, ngram, model, mtp, none; `auto:PATH` and `model:PATH` name a draft of one's own.

`:PATH+PATH` names several drafts, which one draft service offers; `auto` finds the one that suits a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.resolve import (
    DEFAULT_DRAFT,
    is_pulled,
    missing_draft,
    pullable_draft,
    resolve,
    resolve_draft,
    shipped_draft,
)
from paceline.protocol.errors import require
from paceline.protocol.proposal import AUTO, MODEL, NGRAM, NONE, OWN_MTP

_SEVERAL = "+"
_LIMIT = "auto, ngram, model, mtp or none; auto:PATH or model:PATH names a draft model, PATH+PATH several"


@dataclass(frozen=True)
class DrafterChoice:
    """The default drafter of requests: its kind, and the named draft models."""

    kind: str
    models: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> DrafterChoice:
        """Read `KIND` or `KIND:PATH`; `mtp` is `model:mtp`.

        Raises:
            InvalidInput: neither.
        """
        if text == OWN_MTP:
            return cls(MODEL, (OWN_MTP,))
        kind, separator, model = text.partition(":")
        takes_model = kind in (AUTO, MODEL)
        is_known = takes_model or kind in (NGRAM, NONE)
        models = tuple(model.split(_SEVERAL)) if separator else ()
        require(is_known and (not models or (takes_model and all(models))), "drafter", text, _LIMIT)
        return cls(kind, models)

    def draft_models(self, target: str) -> tuple[str, ...]:
        """The models that the draft service loads for a target, its default first; empty: no draft service.

        With `auto`, a target that has no draft of its own on this machine is drafted for with n-grams alone.
        """
        if self.kind not in (AUTO, MODEL):
            return ()
        if not self.models and self.kind == AUTO and not _has_own_draft(target):
            return ()
        return self.models or (DEFAULT_DRAFT,)

    def missing_draft(self, target: str) -> str | None:
        """The missing part of the draft that `auto` would choose, with the command that gets it; None: nothing."""
        return missing_draft(target) if self.kind == AUTO and not self.models else None

    def check(self, target: str) -> None:
        """Refuse a missing draft model.

        Raises:
            InvalidInput: naming it.
        """
        for model in self.draft_models(target):
            resolve(resolve_draft(model, target))


def _has_own_draft(target: str) -> bool:
    draft = pullable_draft(target)
    return shipped_draft(target) is not None or (draft is not None and is_pulled(draft))
