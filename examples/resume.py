"""Go on with a text whose reader was interrupted, in a new process if need be.

The client resumes a broken connection by itself. This is for readers that end: keep the seed and the token ids
that have arrived, and send them with the same request.

python examples/resume.py --coordinator 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from paceline.client import Client, GenerateRequest, SamplingParams, Started, Tokens


def read_some(client: Client, request: GenerateRequest, count: int) -> tuple[int, list[int], str]:
    """Read at least `count` tokens and leave; returns the seed in force, token ids and text."""
    seed, text = 0, ""
    token_ids: list[int] = []
    for event in client.stream(request):
        if isinstance(event, Started):
            seed = event.seed
        elif isinstance(event, Tokens):
            token_ids += event.token_ids
            text += event.text
            if len(token_ids) >= count:
                break  # leaving the stream cancels the request
    return seed, token_ids, text


def main() -> None:
    """Interrupt a text, go on with it, and compare with an undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", metavar="HOST:PORT")
    coordinator = parser.parse_args().coordinator
    request = GenerateRequest(prompt="Once upon a time", sampling=SamplingParams(temperature=0.8), max_new_tokens=48)

    with Client(coordinator) as client:
        seed, token_ids, begun = read_some(client, request, 12)
    print(f"read {len(token_ids)} tokens, then left")

    # Tokens keep their absolute positions, so max_new_tokens counts those that have arrived too.
    with Client(coordinator) as client:
        rest = client.generate(replace(request, seed=seed, resume_token_ids=tuple(token_ids)))
        whole = client.generate(replace(request, seed=seed))

    print(f"went on with {len(rest.token_ids)} more")
    print(begun + rest.text)
    print("the same as undisturbed" if begun + rest.text == whole.text else "not the same as undisturbed")


if __name__ == "__main__":
    main()
