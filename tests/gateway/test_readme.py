"""The documents' first examples of HTTP run as they stand there, but for address and model."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

from tests.gateway.gateways import MODEL, GatewayCluster

ROOT = Path(__file__).parents[2]
PORT, NAME = "localhost:8000", "smollm2-135m"


def block(document: str, language: str, first_words: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    (example,) = [block for block in blocks if block.startswith(first_words)]
    assert PORT in example
    return str(example)


def test_the_first_examples_run_and_agree(gateway: GatewayCluster) -> None:
    here = gateway.address_of("gateway")
    command = block("README.md", "sh", "curl").replace(PORT, here)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=20)
    by_curl = json.loads(done.stdout)["choices"][0]["message"]["content"]
    program = block("docs/http.md", "python", "from openai").replace(PORT, here).replace(NAME, MODEL)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(compile(program, "README.md", "exec"), {})
    assert shown.getvalue() == by_curl != ""
