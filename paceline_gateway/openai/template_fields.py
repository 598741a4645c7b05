"""The variables of a chat template that a request sets: `reasoning_effort`, `verbosity`, and any other by its name.

An effort is a hint: a template that has no such variable leaves it to the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from paceline.models.rendering import Scalar
from paceline.protocol.errors import Unsupported, require
from paceline_gateway.openai.types import TemplateFields
from paceline_gateway.upstream.services import Services

EFFORT = "reasoning_effort"
NO_EFFORT = "none"
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables that can switch reasoning off: the first in Qwen, SmolLM3 and GLM, the second in DeepSeek and Granite."""


@dataclass(frozen=True)
class TemplateSettings:
    """The variables that a chat is rendered with, and the names of fields that the template doesn't read."""

    variables: Mapping[str, Scalar] = field(default_factory=dict)
    ignored_fields: frozenset[str] = frozenset()


def thinking_switch(variables: Collection[str]) -> str | None:
    """Return the variable of a template that can switch reasoning off; None: it has none."""
    return next((name for name in THINKING_SWITCHES if name in variables), None)


def template_settings(services: Services, body: TemplateFields) -> TemplateSettings:
    """Read the fields of a request that set variables.

    Raises:
        Unsupported: the template doesn't read a variable of `chat_template_kwargs`.
        InvalidInput: two fields set one variable to different values.
    """
    settings = dict(body.chat_template_kwargs or {})
    names = services.tokenizer.template_variables
    for name in settings:
        if name not in names:
            reason = f"the model's chat template reads {_name_list(names)}"
            raise Unsupported.of(f"chat_template_kwargs.{name}", reason)
    ignored_fields = set[str]()
    for name, value in ((EFFORT, body.reasoning_effort), ("verbosity", body.verbosity)):
        variable, setting = _variable(name, value, names)
        if value is not None and variable is None:
            ignored_fields.add(name)
        elif variable is not None:
            earlier = settings.get(variable, setting)
            require(earlier == setting, f"chat_template_kwargs.{variable}", earlier, f"left out, or as {name} says")
            settings[variable] = setting
    return TemplateSettings(settings, frozenset(ignored_fields))


def _variable(name: str, value: str | None, variables: Collection[str]) -> tuple[str | None, Scalar]:
    """Return the variable that a field sets, and its value; None: the field is null, or the template reads none."""
    if value is None or name in variables:
        return (name if value is not None else None), value
    return (thinking_switch(variables) if (name, value) == (EFFORT, NO_EFFORT) else None), False


def _name_list(names: frozenset[str]) -> str:
    return f"{', '.join(sorted(names))} alone" if names else "no variables"
