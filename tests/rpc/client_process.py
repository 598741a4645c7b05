"""Keeps a link to the port given; prints "up" once it stands."""

from __future__ import annotations

import asyncio
import sys

from tests.rpc.harness import Client


async def main() -> None:
    async with Client(int(sys.argv[1])) as client:
        await client.link.wait_up(20)
        sys.stdout.write("up\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
