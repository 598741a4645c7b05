"""D8, D11 to D14, D21 to D24: attacks that tests of the suite try, run here for the table."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.attacks.registry import attack

ROOT = Path(__file__).parents[2]
WELCOMES = "test_a_welcome_of_too_much_is_refused_by_name_and_costs_no_request_anything"
FEATURES = "test_malformed_features_alone_are_left_out_and_named_once"
VERDICTS = "test_a_verdict_that_no_target_can_mean_ends_its_request_by_name"
PIECES = "test_a_piece_of_another_prompt_ends_its_request_by_name"
FIFO = "test_a_key_file_that_becomes_a_fifo_stops_neither_rereading_nor_the_end"


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


@attack("D21", "a draft's welcome of 60,000 drafters, one of 500,000 bytes, one of 2 MiB")
async def endless_welcomes(folder: Path) -> str:
    """The link is refused by the field's name, and no request is slower."""
    return await _hold(
        ("tests/e2e/test_hostile_peers.py::" + WELCOMES, "tests/protocol/test_bounds.py", "tests/rpc/test_costs.py")
    )


@attack("D22", "features of a target that are malformed in eight ways")
async def malformed_features(folder: Path) -> str:
    """They alone are left out, and named once."""
    return await _hold(("tests/e2e/test_hostile_peers.py::" + FEATURES,))


@attack("D23", "verdicts and reports of prompts that no target can mean")
async def impossible_verdicts(folder: Path) -> str:
    """The request ends by the name of the field, and the next one is right."""
    return await _hold(("tests/e2e/test_hostile_peers.py::" + VERDICTS, "tests/e2e/test_hostile_peers.py::" + PIECES))


@attack("D24", "a FIFO, a directory, a device or nothing in the place of keys, certificates and endpoints")
async def files_that_are_none(folder: Path) -> str:
    """What was known stays, is counted, and nobody waits."""
    return await _hold(("tests/rpc/test_live_files.py", "tests/e2e/test_api_keys.py::" + FIFO))
