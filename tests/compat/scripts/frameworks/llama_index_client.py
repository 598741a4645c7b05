"""llama_index: runs in an environment of its own."""

import asyncio

from asked import ASK_TEXT, ASK_TOOL, MODEL, URL, add, tell
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True
)


async def main() -> None:
    asked = [ChatMessage(role="user", content=ASK_TEXT)]
    tell("text", (await llm.achat(asked)).message.content)
    tell("text, streamed", "".join([piece.delta or "" async for piece in await llm.astream_chat(asked)]))
    agent = FunctionAgent(tools=[add], llm=llm, system_prompt="Obey.")
    tell("tool, streamed", await agent.run(ASK_TOOL))


asyncio.run(main())
