"""The variables that a chat template reads beside the chat."""

from __future__ import annotations

import re

_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags of transformers' own around an answer, which Jinja doesn't know; they read nothing."""
_OURS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception")
)
"""Variables that rendering itself sets, and no request may."""


def template_variables(template: str) -> frozenset[str]:
    """Names that a template reads and a request may set; none, if the template can't be parsed.

    Names of special tokens are not told from others.
    """
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701 - it renders nothing
    try:
        tree = environment.parse(_GENERATION_TAGS.sub("", template))
    except TemplateError:
        return frozenset()
    return frozenset(meta.find_undeclared_variables(tree)) - _OURS - environment.globals.keys() - {"strftime_now"}
