"""Stream a text as it is written, then say how it came about.

python examples/sync_client.py --coordinator 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import sys

from paceline.client import Client, Finished, SamplingParams, Started, Tokens


def main() -> None:
    """Run one request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--prompt", default="Once upon a time")
    arguments = parser.parse_args()

    with Client(arguments.coordinator) as client:
        for event in client.stream(
            prompt=arguments.prompt,
            sampling=SamplingParams(temperature=0.8, top_p=0.95),
            max_new_tokens=48,
            seed=7,  # the same seed gives the same text, whatever drafts it
        ):
            if isinstance(event, Started):
                print(f"model {event.model}, seed {event.seed}", file=sys.stderr)
            elif isinstance(event, Tokens):
                print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                print(event.text)  # text that was held back, for example since a stop string might have begun
                stats = event.stats
                print(
                    f"{stats.committed} tokens in {stats.rounds} rounds, "
                    f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafted tokens accepted, "
                    f"finished by {event.reason.value}",
                    file=sys.stderr,
                )


if __name__ == "__main__":
    main()
