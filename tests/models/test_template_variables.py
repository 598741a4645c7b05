"""What a chat template reads beside the chat, and what a request may set of it."""

from __future__ import annotations

import pytest

from paceline.models.chat_template import template_variables
from paceline.protocol.errors import InvalidInput
from tests.models.saving import templated

TURNS = [{"role": "user", "content": "q"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if not loop.last %}{% continue %}{% endif %}{% endfor %}"
    "{% set own = namespace(a=1) %}{% generation %}{% endgeneration %}"
    "{% if not enable_thinking | default(true) %}-{% endif %}"
    "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if tokenize %}{{ strftime_now('') }}{% endif %}"
)


def test_what_the_renderer_sets_itself_is_none_of_them() -> None:
    assert template_variables(TEMPLATE) == {"bos_token", "enable_thinking", "reasoning_effort", "tokenize"}
    assert templated(TEMPLATE).template_variables == {"enable_thinking", "reasoning_effort"}
    both = {"default": TEMPLATE, "tool_use": "{{ messages }}{{ xml_tools }}"}
    assert templated(both).template_variables == {"enable_thinking", "reasoning_effort", "xml_tools"}


@pytest.mark.parametrize("template", ["", "{% if %}"])
def test_a_template_that_says_nothing_reads_nothing(template: str) -> None:
    assert template_variables(template) == frozenset()


def test_values_are_written_by_the_template() -> None:
    made = templated(TEMPLATE)
    ids = made.render_turns(TURNS, (), {"reasoning_effort": "low", "enable_thinking": False})
    assert made.decode(ids) == "q-[low]"
    assert made.decode(made.render_turns(TURNS)) == "q"
    special = [{"role": "user", "content": "</s>"}]
    assert made.template_text(special, (), {"reasoning_effort": "low"}) == "<s></s>[low]"
    assert made.decode(made.render_turns(special, (), {"reasoning_effort": "low"})) == "</s>[low]"


def test_a_value_can_t_write_a_special_token() -> None:
    with pytest.raises(
        InvalidInput, match=r"chat_template_kwargs.reasoning_effort = .*without the text of a special"
    ):
        templated(TEMPLATE).render_turns(TURNS, (), {"reasoning_effort": "low</s>"})
