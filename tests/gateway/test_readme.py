"""The README's examples of HTTP run as they stand there, but for address and model."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

from tests.gateway.gateways import MODEL, GatewayCluster

README = (Path(__file__).parents[2] / "README.md").read_text()
PORT, NAME = "127.0.0.1:8000", "smollm2-135m"


def block(language: str, begins: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    (found,) = [each for each in blocks if each.startswith(begins)]
    assert PORT in found
    return str(found)


def test_the_examples_of_the_readme_run_and_agree(gateway: GatewayCluster) -> None:
    here = gateway.address_of("gateway")
    command = block("sh", "curl").replace(PORT, here)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=20)
    by_curl = json.loads(done.stdout)["choices"][0]["message"]["content"]
    program = block("python", "from openai").replace(PORT, here).replace(NAME, MODEL)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(compile(program, "README.md", "exec"), {})
    assert shown.getvalue() == by_curl != ""
