"""Serves a recording target in a process of its own; prints its port."""

from __future__ import annotations

import asyncio
import sys

from tests.rpc.harness import Servicer, serving


async def main() -> None:
    async with serving(Servicer()) as port:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
