"""Small chat templates in the shapes that models have them, on a tokenizer of bytes."""

from __future__ import annotations

from tokenizers import AddedToken

from paceline.models.tokenizer import TransformersTokenizer
from tests.models.saving import byte_level_tokenizer

_TURN = "<s>{{ m.role }}\n{{ m.content }}</s>\n"
_JSON_CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_HERMES_CALLS = "{% for c in m.tool_calls %}{{ '\n<tool_call>\n' }}" + _JSON_CALL + "\n</tool_call>{% endfor %}"
_LISTED = "{% if tools %}<s>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}</s>\n{% endif %}"
_ANSWER = "{% if add_generation_prompt %}<s>assistant\n{% endif %}"

PLAIN = "{% for m in messages %}" + _TURN + "{% endfor %}" + _ANSWER
HERMES = (
    _LISTED
    + "{% for m in messages %}{% if m.tool_calls %}<s>assistant{% if m.content %}\n{{ m.content }}{% endif %}"
    + _HERMES_CALLS
    + "</s>\n{% elif m.role == 'tool' %}<s>user\n<tool_response>\n{{ m.content }}\n</tool_response></s>\n{% else %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _ANSWER
)
THINKING = (
    _LISTED
    + "{% for m in messages %}{% if m.role == 'assistant' %}<s>assistant\n"
    + "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    + _HERMES_CALLS
    + "</s>\n{% else %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _ANSWER
)
OPENED = THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}"
LLAMA = (
    "{% for m in messages %}{% if loop.last and tools %}{% for t in tools %}{{ t | tojson(indent=4) }}\n\n"
    "{% endfor %}{% endif %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call only') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}<s>assistant\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}</s>'
    "{% else %}<s>{{ m.role }}\n{{ m.content }}</s>{% endif %}{% endfor %}" + _ANSWER
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}"
    '{% if c.id | length != 9 %}{{ raise_exception(\'nine letters\') }}{% endif %}, "id": "{{ c.id }}"}'
    "{% if loop.last %}]</s>{% else %}, {% endif %}{% endfor %}"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% endif %}{% endfor %}"
)
NAMED = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}"
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    "{% endfor %}</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
QWEN = HERMES.replace(
    _JSON_CALL,
    (
        "{{ '<function=' + c.function.name + '>\n' }}{% for k, v in c.function.arguments | items %}"
        "{{ '<parameter=' + k + '>\n' }}{{ v | tojson if v is mapping or (v is sequence and v is not string) "
        "else v | string }}{{ '\n</parameter>\n' }}{% endfor %}</function>"
    ),
)
GLM = HERMES.replace("{{ '\n<tool_call>\n' }}", "{{ '\n<tool_call>' }}").replace(
    _JSON_CALL,
    (
        "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ '\n<arg_key>' + k }}</arg_key>"
        "{{ '\n<arg_value>' }}{{ v if v is string else v | tojson }}</arg_value>{% endfor %}"
    ),
)
LINES = HERMES.replace(
    _JSON_CALL, "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}, {% endfor %})"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "<|User|>{{ m.content }}"
    "{% elif m.tool_calls %}<|Assistant|><|calls|>{% for c in m.tool_calls %}<|call|>function<|sep|>"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```<|end|>' }}{% if not loop.last %}\n{% endif %}"
    "{% endfor %}<|ends|></s>{% else %}<|Assistant|>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<|python_tag|>")
ORDINARY = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def templated(template: str) -> TransformersTokenizer:
    """A tokenizer of bytes with this template, markers as tokens where models have them."""
    inner = byte_level_tokenizer()
    inner.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL], special_tokens=True)
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ORDINARY])
    inner.chat_template = template
    return TransformersTokenizer(inner)
