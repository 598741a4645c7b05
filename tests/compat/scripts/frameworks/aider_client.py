"""aider: runs in an environment of its own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asked import ASK_TEXT, MODEL, TEXT, URL, tell

EDIT = "Say «number.txt\n```\nThe sum is 42.\n```»"
FLAGS = ("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-pretty")


def aider(folder: Path, message: str, *flags: str) -> str:
    """One message to it, about a file of a folder of its own."""
    program = Path(sys.executable).parent / "aider"
    command = [program, "--model", f"openai/{MODEL}", "--edit-format", "whole", "--message", message, *FLAGS, *flags]
    own = {"HOME": str(folder), "OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none"}
    options = {"cwd": folder, "env": os.environ | own, "stdin": subprocess.DEVNULL, "timeout": 120}
    done = subprocess.run([*command, "number.txt"], capture_output=True, text=True, check=True, **options)
    return done.stdout


for kind, flags in ((", streamed", ()), ("", ("--no-stream",))):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said = aider(folder, ASK_TEXT, *flags)
        tell(f"text{kind}", TEXT if TEXT in said else said)
        (folder / "number.txt").write_text("")
        said = aider(folder, EDIT, *flags)
        tell(f"tool{kind}", (folder / "number.txt").read_text().strip() or said)
