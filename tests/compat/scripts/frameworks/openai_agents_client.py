"""openai_agents: runs in an environment of its own."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import ASK_SCHEMA_AND_TOOL, ASK_TEXT, ASK_TOOL, MODEL, URL, add, tell
from openai import AsyncOpenAI
from pydantic import BaseModel


class City(BaseModel):
    city: str
    bridges: int


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    tool = function_tool(add)
    models = {"": OpenAIChatCompletionsModel(MODEL, client), "responses ": OpenAIResponsesModel(MODEL, client)}
    for kind, model in models.items():
        agent = Agent("a", instructions="Obey.", tools=[tool], model=model)
        tell(f"{kind}text", (await Runner.run(agent, ASK_TEXT)).final_output)
        streamed = Runner.run_streamed(agent, ASK_TOOL)
        async for _ in streamed.stream_events():
            pass
        tell(f"{kind}tool, streamed", streamed.final_output)
        tell(f"{kind}tool", (await Runner.run(agent, ASK_TOOL)).final_output)
        typed = Agent("a", instructions="Obey.", tools=[tool], model=model, output_type=City)
        city = (await Runner.run(typed, ASK_SCHEMA_AND_TOOL)).final_output
        tell(f"{kind}schema and tool", f"{city.city} {city.bridges}")


asyncio.run(main())
