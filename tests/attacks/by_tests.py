"""D8, D11 to D14: attacks that tests of the suite try, run here for the table."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.attacks.registry import attack

ROOT = Path(__file__).parents[2]


async def _hold(tests: Sequence[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    output, _ = await process.communicate()
    last = output.decode().strip().splitlines()[-1]
    assert process.returncode == 0, last
    passed = re.search(r"\d+ passed", last)
    assert passed is not None, last
    return f"{passed[0]}: {', '.join(sorted({each.partition('::')[0] for each in tests}))}"


@attack("D8", "a frame of 170,000 tiny events, and a backlog of tiny messages")
async def tiny_events(folder: Path) -> str:
    """It costs the peer its link and nobody else a moment."""
    return await _hold(
        (
            "tests/rpc/test_link.py::test_a_frame_of_too_many_events_costs_the_peer_its_link_and_nobody_else_a_moment",
            "tests/rpc/test_writer.py",
        )
    )


@attack("D11", "a peer whose incarnation holds line ends and a megabyte")
async def forged_lines(folder: Path) -> str:
    """It forges no line of the log and doesn't fill it."""
    return await _hold(("tests/e2e/test_logs.py", "tests/runtime/test_logs.py"))


@attack("D12", "drafts whose q, noise, position or key is wrong, under rejection and block acceptance")
async def wrong_q(folder: Path) -> str:
    """Every mistake is named and mended; malice is documented."""
    return await _hold(("tests/coordinator/test_redrawing.py",))


@attack("D13", "a chat message that contains the template's special tokens; damaged certificates and keys")
async def forged_turns(folder: Path) -> str:
    """It forges no turn; TLS files are refused by name."""
    return await _hold(("tests/models/test_special_text.py", "tests/rpc/test_server.py"))


@attack("D14", "a stranger who asks whether somebody's prefix is cached; one link that opens sessions without end")
async def foreign_prefixes(folder: Path) -> str:
    """Neither tells nor fills."""
    return await _hold(
        ("tests/services/test_tenants.py", "tests/engine/test_blocks.py", "tests/coordinator/test_pool.py")
    )
