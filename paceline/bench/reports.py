"""Where reports go: NAME-DATE.json and NAME-DATE.md in one folder."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any


def write_report(folder: Path, name: str, values: Any, markdown: str) -> Path:
    """Write both files, replacing those of the same name and day; returns the Markdown's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{datetime.date.today().isoformat()}"
    (folder / f"{stem}.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    written = folder / f"{stem}.md"
    written.write_text(markdown)
    return written
