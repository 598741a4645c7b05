"""Get JSON that fits a schema, whatever the model would rather write.

Grammars need `paceline[grammar]` where the target service runs; the client needs nothing.

python examples/json_schema.py --coordinator 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import json

from paceline.client import Client, Grammar, GrammarKind, SamplingParams

# Bounds keep the document within max_new_tokens, which would cut it anywhere.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "price": {"type": "integer", "minimum": 0, "maximum": 999},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "price", "colour"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # no free white space, of which small models write much
}


def main() -> None:
    """Ask for one document and parse it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", metavar="HOST:PORT")
    arguments = parser.parse_args()

    with Client(arguments.coordinator) as client:
        generation = client.generate(
            prompt="Extract JSON with name, price and colour: The red kettle costs 25 dollars.\n",
            sampling=SamplingParams(temperature=0.6, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))),
            max_new_tokens=256,
            seed=7,
        )
    document = json.loads(generation.text)
    print(json.dumps(document, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
