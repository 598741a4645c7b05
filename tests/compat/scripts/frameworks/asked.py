"""What every framework is asked, URL MODEL ASKED, and how it tells what it got: one line of JSON a call."""

import json
import sys

URL, MODEL = sys.argv[1:3]
ASKED = json.loads(sys.argv[3])
TEXT, ASK_TEXT, ASK_TOOL = ASKED["said"], ASKED["text"], ASKED["tool"]
ASK_SCHEMA, ASK_SCHEMA_BY_TOOL = ASKED["schema"], ASKED["schema by tool"]
ASK_SCHEMA_AND_TOOL = ASKED["schema and tool"]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def tell(call: str, text: object) -> None:
    """One line for the driver."""
    sys.stdout.write(json.dumps({"call": call, "text": str(text)}) + "\n")
