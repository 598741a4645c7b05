"""huggingface_hub: runs in an environment of its own."""

import json

from asked import ASK_TEXT, ASK_TOOL, URL, add, tell
from huggingface_hub import InferenceClient

client = InferenceClient(base_url=f"{URL}/v1", api_key="none")
said = [{"role": "user", "content": ASK_TEXT}]
tell("text", client.chat_completion(said).choices[0].message.content)
tell("text, streamed", "".join(c.choices[0].delta.content or "" for c in client.chat_completion(said, stream=True)))
numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
function = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": numbers}}
messages = [{"role": "user", "content": ASK_TOOL}]
for _ in range(2):
    message = client.chat_completion(messages, tools=[{"type": "function", "function": function}]).choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        given = call.function.arguments
        result = add(**(json.loads(given) if isinstance(given, str) else given))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
tell("tool", messages[-1].content)
