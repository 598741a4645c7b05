"""litellm: runs in an environment of its own."""

import json

import litellm
from asked import ASK_SCHEMA, ASK_TEXT, ASK_TOOL, MODEL, URL, add, tell

to = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
said = [{"role": "user", "content": ASK_TEXT}]
tell("text", litellm.completion(messages=said, **to).choices[0].message.content)
chunks = litellm.completion(messages=said, stream=True, **to)
tell("text, streamed", "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
messages = [{"role": "user", "content": ASK_TOOL}]
for _ in range(2):
    message = litellm.completion(messages=messages, tools=[tool], **to).choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        result = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "name": "add", "content": str(result)})
tell("tool", messages[-1].content)
schema = {"type": "object", "properties": {"city": {"type": "string"}, "bridges": {"type": "integer"}}}
form = {"type": "json_schema", "json_schema": {"name": "City", "schema": schema}}
schema_asked = [{"role": "user", "content": ASK_SCHEMA}]
answer = litellm.completion(messages=schema_asked, response_format=form, **to).choices[0].message.content
city = json.loads(answer)
tell("schema", f"{city['city']} {city['bridges']}")
anthropic = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
tell("anthropic text", litellm.completion(messages=said, max_tokens=99, **anthropic).choices[0].message.content)
