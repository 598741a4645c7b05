"""What a request sets of what the model's chat template reads: `reasoning_effort`, `chat_template_kwargs`."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.openai_types import TemplateFields
from gateway.services import Services
from gateway.unsupported import unsupported
from paceline.models.turns import Scalar
from paceline.protocol.errors import require

EFFORT = "reasoning_effort"


def template_settings(services: Services, body: TemplateFields) -> Mapping[str, Scalar]:
    """The variables to render a chat with.

    Raises:
        Unsupported: the template doesn't read one.
        InvalidInput: one is given twice.
    """
    settings = dict(body.chat_template_kwargs or {})
    known = services.tokenizer.template_variables
    for name in settings:
        if name not in known:
            raise unsupported(f"chat_template_kwargs.{name}", f"the model's chat template reads {_listed(known)}")
    effort = body.reasoning_effort
    if effort is None or (effort == "none" and EFFORT not in known and services.form.reasoning is None):
        return settings
    if EFFORT not in known:
        raise unsupported(EFFORT, "the model's chat template does not read it")
    once = settings.get(EFFORT, effort) == effort
    require(once, f"chat_template_kwargs.{EFFORT}", settings.get(EFFORT), f"left out, or {EFFORT} = {effort!r}")
    return settings | {EFFORT: effort}


def _listed(names: frozenset[str]) -> str:
    return f"{', '.join(sorted(names))} alone" if names else "no variables"
