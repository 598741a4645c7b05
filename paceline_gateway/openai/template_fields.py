"""What a request sets of what the model's chat template reads: `reasoning_effort`, `verbosity`, and any by its name.

An effort is a hint: a template that has no such switch leaves it to the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from paceline.models.turns import Scalar
from paceline.protocol.errors import Unsupported, require
from paceline_gateway.openai.types import TemplateFields
from paceline_gateway.upstream.services import Services

EFFORT = "reasoning_effort"
NO_EFFORT = "none"
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""What templates read that can leave reasoning out: Qwen's, SmolLM3's, GLM's; DeepSeek's, Granite's."""


@dataclass(frozen=True)
class TemplateSettings:
    """The variables to render a chat with, and names of fields that the template doesn't read."""

    variables: Mapping[str, Scalar] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


def thinking_switch(known: Collection[str]) -> str | None:
    """The one of a template's variables that can leave reasoning out."""
    return next((name for name in THINKING_SWITCHES if name in known), None)


def template_settings(services: Services, body: TemplateFields) -> TemplateSettings:
    """Read a request's fields.

    Raises:
        Unsupported: the template doesn't read a variable of `chat_template_kwargs`.
        InvalidInput: one is given twice.
    """
    settings = dict(body.chat_template_kwargs or {})
    known = services.tokenizer.template_variables
    for name in settings:
        if name not in known:
            raise Unsupported.of(f"chat_template_kwargs.{name}", f"the model's chat template reads {_listed(known)}")
    ignored = set[str]()
    for name, value in ((EFFORT, body.reasoning_effort), ("verbosity", body.verbosity)):
        variable, setting = _variable(name, value, known)
        if value is not None and variable is None:
            ignored.add(name)
        elif variable is not None:
            once = settings.get(variable, setting) == setting
            require(once, f"chat_template_kwargs.{variable}", settings.get(variable), f"left out, or as {name} says")
            settings[variable] = setting
    return TemplateSettings(settings, frozenset(ignored))


def _variable(name: str, value: str | None, known: Collection[str]) -> tuple[str | None, Scalar]:
    """The variable that a field sets, and to what; None: none, the field is left out or the template reads none."""
    if value is None or name in known:
        return (name if value is not None else None), value
    return (thinking_switch(known) if (name, value) == (EFFORT, NO_EFFORT) else None), False


def _listed(names: frozenset[str]) -> str:
    return f"{', '.join(sorted(names))} alone" if names else "no variables"
