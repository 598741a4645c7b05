"""pydantic-ai: runs in an environment of its own."""

import asyncio

from asked import ASK_SCHEMA_AND_TOOL, ASK_TEXT, ASK_TOOL, MODEL, URL, add, tell
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: str
    bridges: int


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    for kind, api in (("", OpenAIChatModel), ("responses ", OpenAIResponsesModel)):
        model = api(MODEL, provider=provider)
        agent = Agent(model, tools=[add])
        tell(f"{kind}text", (await agent.run(ASK_TEXT)).output)
        async with agent.run_stream(ASK_TEXT) as stream:
            tell(f"{kind}text, streamed", await stream.get_output())
        tell(f"{kind}tool", (await agent.run(ASK_TOOL)).output)
        native = Agent(model, tools=[add], output_type=NativeOutput(City))
        city = (await native.run(ASK_SCHEMA_AND_TOOL)).output
        tell(f"{kind}schema and tool", f"{city.city} {city.bridges}")


asyncio.run(main())
