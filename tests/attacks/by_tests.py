"""Attacks that tests of the suite try, run here for the table: all but D6 and D9."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.attacks.registry import attack

ROOT = Path(__file__).parents[2]
WELCOMES = "test_a_welcome_of_too_much_is_refused_by_name_and_costs_no_request_anything"
FEATURES = "test_malformed_features_alone_are_left_out_and_named_once"
VERDICTS = "test_what_no_target_can_mean_ends_its_request_by_name"
ORPHANS = "test_services_and_ranks_end_with_their_supervisor"
TRACES = "test_a_trace_context_is_taken_as_w3c_says_and_ignored_where_it_is_not_valid"
EVENTS = "test_a_frame_of_too_many_events_costs_the_peer_its_link_and_nobody_else_a_moment"
PEERS = "tests/e2e/test_hostile_peers.py"
TESTS: Mapping[tuple[str, str], Sequence[str]] = {
    ("D1", "grammars that take time or memory without end; other users' requests beside them"): (
        "tests/e2e/test_hostile_grammars.py",
    ),
    ("D2", "a draft service that sends supports, tokens, nodes, names and frames that may not be"): (
        "tests/e2e/test_wrong_draft.py",
    ),
    ("D3", "an honest draft beside a target with KV rows for one session"): ("tests/e2e/test_tight_kv.py",),
    ("D4", "a checkpoint that lacks a layer"): ("tests/engine/test_loading.py",),
    ("D5", "a target whose steps take longer than its coordinator waits"): ("tests/e2e/test_busy_target.py",),
    ("D7", "SIGKILL and SIGHUP of `paceline serve`"): (f"tests/e2e/test_lifecycle.py::{ORPHANS}",),
    ("D8", "a frame of 170,000 tiny events, and a backlog of tiny messages"): (
        f"tests/rpc/test_link.py::{EVENTS}", "tests/rpc/test_writer.py",
    ),
    ("D10", "a `traceparent` that is none: too long, not ASCII, of other signs"): (
        f"tests/protocol/test_codec.py::{TRACES}",
    ),
    ("D11", "a peer whose incarnation holds line ends and a megabyte"): (
        "tests/runtime/test_logs.py",
    ),
    ("D12", "drafts whose q, noise, position or key is wrong, under rejection and block acceptance"): (
        "tests/drafting/test_redrawing.py",
    ),
    ("D13", "a chat message that contains the template's special tokens; damaged certificates and keys"): (
        "tests/models/test_special_text.py", "tests/rpc/test_server.py",
    ),
    ("D14", "a stranger who asks whether somebody's prefix is cached; one link that opens sessions without end"): (
        "tests/services/test_tenants.py", "tests/engine/test_blocks.py", "tests/rpc/test_peer_pool.py",
    ),
    ("D15", "trailers, extensions of chunks and heads without end"): ("tests/gateway/test_framing.py",),
    ("D16", "connections with a head, an invented key each, and no body"): ("tests/gateway/test_waiting.py",),
    ("D17", "each field of a body as long as a body may be, and as many in it as there is room for"): (
        "tests/gateway/test_large_fields.py",
    ),
    ("D18", "pages of a foreign site, under its own name (DNS rebinding) and from elsewhere"): (
        "tests/gateway/test_sites.py",
    ),
    ("D19", "answers of many choices with many log-probabilities, whole"): ("tests/gateway/test_large_answers.py",),
    ("D20", "streams of one key that nobody reads, and many of its requests at once"): (
        "tests/gateway/test_readers.py", "tests/gateway/test_waiting.py",
    ),
    ("D21", "a draft's welcome of 60,000 drafters, one of 500,000 bytes, one of 2 MiB"): (
        f"{PEERS}::{WELCOMES}", "tests/protocol/test_bounds.py", "tests/rpc/test_costs.py",
    ),
    ("D22", "features of a target that are malformed in eight ways"): (f"{PEERS}::{FEATURES}",),
    ("D23", "verdicts and reports of prompts that no target can mean"): (f"{PEERS}::{VERDICTS}",),
    ("D24", "a FIFO, a directory, a device or nothing in the place of keys, certificates and endpoints"): (
        "tests/rpc/test_live_files.py",
    ),
}  # fmt: skip
"""By number and what is tried: the tests that say what must hold."""


async def _hold(tests: Sequence[str], folder: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    output, _ = await process.communicate()
    last = output.decode().strip().splitlines()[-1]
    assert process.returncode == 0, last
    passed = re.search(r"\d+ passed", last)
    assert passed is not None, last
    return f"{passed[0]}: {', '.join(sorted({each.partition('::')[0] for each in tests}))}"


for (_number, _what), _tests in TESTS.items():
    attack(_number, _what)(partial(_hold, _tests))
