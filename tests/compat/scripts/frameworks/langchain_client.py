"""langchain: runs in an environment of its own."""

from asked import ASK_SCHEMA, ASK_TEXT, ASK_TOOL, MODEL, URL, add, tell
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    city: str
    bridges: int


model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL)
tell("text", model.invoke(ASK_TEXT).content)
tell("text, streamed", "".join(chunk.content for chunk in model.stream(ASK_TEXT)))
agent = create_agent(model, [add], name="adder")
asked = {"messages": [{"role": "user", "content": ASK_TOOL}]}
tell("tool", agent.invoke(asked)["messages"][-1].content)
pieces = [piece for piece, _ in agent.stream(asked, stream_mode="messages") if piece.type.startswith("AIMessage")]
tell("tool, streamed", "".join(piece.content for piece in pieces))
city = model.with_structured_output(City, method="json_schema").invoke(ASK_SCHEMA)
tell("schema", f"{city.city} {city.bridges}")
