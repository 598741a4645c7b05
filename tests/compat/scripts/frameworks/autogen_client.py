"""autogen: runs in an environment of its own."""

import asyncio

from asked import ASK_TEXT, ASK_TOOL, MODEL, URL, add, tell
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def main() -> None:
    info = dict.fromkeys(("function_calling", "json_output", "structured_output"), True)
    info |= {"vision": False, "family": "unknown"}
    client = OpenAIChatCompletionClient(model=MODEL, base_url=f"{URL}/v1", api_key="none", model_info=info)
    for kind, stream in (("", False), (", streamed", True)):
        options = {"tools": [add], "reflect_on_tool_use": True, "model_client_stream": stream}
        agent, fresh = (AssistantAgent("adder", client, **options) for _ in range(2))
        tell(f"text{kind}", (await agent.run(task=ASK_TEXT)).messages[-1].content)
        last = [event async for event in fresh.run_stream(task=ASK_TOOL)][-1]
        assert isinstance(last, TaskResult)
        tell(f"tool{kind}", last.messages[-1].content)
    await client.close()


asyncio.run(main())
