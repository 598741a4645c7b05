"""A gateway process in front of a cluster, for the page's tests and pictures."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.cluster import eventually

START_SECONDS = 60.0


@contextlib.contextmanager
def gateway_process(folder: Path, model: str, coordinator: str) -> Iterator[str]:
    """Run the gateway; yields its URL. Its log is in the folder."""
    port_file = folder / "gateway.port"
    flags = ["--model", model, "--coordinator", coordinator, "--port", "0", "--port-file", str(port_file)]
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "gateway", *flags], stderr=log, env=dict(os.environ))
    try:

        def serves() -> bool:
            assert process.poll() is None, (folder / "gateway.log").read_text()
            return port_file.exists()

        eventually(serves, "the gateway serves", START_SECONDS)
        yield f"http://{port_file.read_text().strip()}"
    finally:
        process.terminate()
        process.wait(START_SECONDS)
