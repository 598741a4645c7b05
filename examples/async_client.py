"""Run several requests at once; the target verifies them in the same steps.

python examples/async_client.py --coordinator 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import asyncio

from paceline.client import AsyncClient, SamplingParams

PROMPTS = ("The first river", "The second river", "The third river")


async def generate_all(coordinator: str) -> None:
    """Generate a text for each prompt, and three samples of the first one."""
    sampling = SamplingParams(temperature=0.8)
    async with AsyncClient(coordinator) as client:
        requests = (
            client.generate(prompt=prompt, sampling=sampling, max_new_tokens=24, seed=7) for prompt in PROMPTS
        )
        for prompt, generation in zip(PROMPTS, await asyncio.gather(*requests), strict=True):
            print(f"{prompt!r}: {generation.text!r}")

        # Samples share prompt and seed; each has noise of its own, and sample 0 is the text above.
        for sample in await client.generate_samples(
            3, prompt=PROMPTS[0], sampling=sampling, max_new_tokens=24, seed=7
        ):
            print(f"sample {sample.sample_index}: {sample.text!r}")


def main() -> None:
    """Read the coordinator's address and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", metavar="HOST:PORT")
    asyncio.run(generate_all(parser.parse_args().coordinator))


if __name__ == "__main__":
    main()
