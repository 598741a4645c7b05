"""One end of a link in a process of its own: keeps a link to the port given, or serves and prints its port."""

from __future__ import annotations

import asyncio
import sys

from tests.rpc.harness import Client, Servicer, serving


async def main() -> None:
    async with serving(Servicer()) as port:
        if sys.argv[1:]:
            client = await Client(int(sys.argv[1])).__aenter__()
            await client.link.wait_up(20)
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
