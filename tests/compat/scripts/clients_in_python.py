"""Runs in an environment of its own: URL MODEL PROMPT TOKENS SEED. One line of JSON a call."""

import json
import sys
from typing import Any

import anthropic
import openai

url, model, prompt = sys.argv[1:4]
tokens, seed = map(int, sys.argv[4:6])
messages = [{"role": "user", "content": prompt}]
ours: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
theirs: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def tell(call: str, kind: str, text: str) -> None:
    """For the driver."""
    sys.stdout.write(json.dumps({"call": call, "kind": kind, "text": text}) + "\n")


assert [each.id for each in ours.models.list()] == [model]

asked: Any = {"model": model, "max_tokens": tokens, "seed": seed}
chat = ours.chat.completions.create(**asked, messages=messages)
tell("openai chat", "chat", chat.choices[0].message.content)
with_usage = {"stream": True, "stream_options": {"include_usage": True}}
chunks = list(ours.chat.completions.create(**asked, messages=messages, **with_usage))
tell("openai chat, streamed", "chat", "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices))
assert chunks[-1].usage == chat.usage

completion = ours.completions.create(**asked, prompt=prompt)
tell("openai completion", "completion", completion.choices[0].text)
pieces = ours.completions.create(**asked, prompt=prompt, stream=True)
tell("openai completion, streamed", "completion", "".join(c.text for chunk in pieces for c in chunk.choices))

extra = {"seed": seed}
response = ours.responses.create(model=model, input=prompt, max_output_tokens=tokens, extra_body=extra)
tell("openai response", "chat", response.output_text)
with ours.responses.stream(model=model, input=prompt, max_output_tokens=tokens, extra_body=extra) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
tell("openai response, streamed", "chat", text)

message = theirs.messages.create(model=model, messages=messages, max_tokens=tokens, extra_body=extra)
tell("anthropic message", "chat", message.content[0].text)
with theirs.messages.stream(model=model, messages=messages, max_tokens=tokens, extra_body=extra) as stream:
    tell("anthropic message, streamed", "chat", "".join(stream.text_stream))
try:
    ours.chat.completions.create(model=model, messages=messages, extra_body={"no_such_parameter": 1})
except openai.BadRequestError as error:
    assert error.param == "no_such_parameter"
else:
    raise AssertionError("an unknown parameter was taken")
