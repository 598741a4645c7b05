"""instructor: runs in an environment of its own."""

import instructor
from asked import ASK_SCHEMA, ASK_SCHEMA_BY_TOOL, MODEL, URL, tell
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    city: str
    bridges: int


for mode, asked in (
    (instructor.Mode.TOOLS, ASK_SCHEMA_BY_TOOL),
    (instructor.Mode.JSON, ASK_SCHEMA),
    (instructor.Mode.JSON_SCHEMA, ASK_SCHEMA),
):
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    messages = [{"role": "user", "content": asked}]
    city = client.chat.completions.create(model=MODEL, messages=messages, response_model=City)
    tell(f"{mode.name} schema", f"{city.city} {city.bridges}")
    *_, city = client.chat.completions.create_partial(model=MODEL, messages=messages, response_model=City)
    tell(f"{mode.name} schema, streamed", f"{city.city} {city.bridges}")
