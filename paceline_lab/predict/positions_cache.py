"""A cache of positions in files, one for each text and reader, so that long work goes on where it ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.given_files import read_json
from paceline.runtime.files import replace_file
from paceline_lab.predict.positions import DrafterPositions, TargetPositions, as_arrays
from paceline_training.corpus import read_arrays

FACTS_FILE = "sample.json"
Positions = TypeVar("Positions", TargetPositions, DrafterPositions)


class PositionsCache:
    """A folder of positions of one sample and target; drafters may be added to it.

    Args:
        folder: where the files are; made if it isn't there.
        facts: facts that all positions depend on: target, sample, settings.

    Raises:
        InvalidInput: the folder's positions depend on something else; it names the fact.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        file, plain_facts = folder / FACTS_FILE, json.loads(json.dumps(facts))
        if not file.exists():
            replace_file(file, lambda temporary: temporary.write_text(json.dumps(plain_facts, indent=1) + "\n"))
        earlier = read_json("sample", file)
        for name, value in plain_facts.items():
            require(earlier.get(name) == value, f"{file}: {name}", earlier.get(name), f"{value!r}, as now, to go on")

    def put(self, text: int, temperature: float, reader: str, positions: TargetPositions | DrafterPositions) -> None:
        """Write a reader's positions of a text, whole or not at all."""
        arrays: dict[str, Any] = as_arrays(positions)

        def write(temporary: Path) -> None:
            with temporary.open("wb") as out:
                np.savez_compressed(out, **arrays)

        replace_file(self._file(text, temperature, reader), write)

    def find(self, kind: type[Positions], text: int, temperature: float, reader: str) -> Positions | None:
        """Return a reader's positions of a text; None: there are none yet.

        Raises:
            InvalidInput: naming a file that is damaged.
        """
        file = self._file(text, temperature, reader)
        if not file.exists():
            return None
        try:
            return kind(**read_arrays("positions", file))
        except TypeError as error:
            raise InvalidInput.of("positions", str(file), f"a whole file, or gone ({error})") from error

    def _file(self, text: int, temperature: float, reader: str) -> Path:
        """Return a file's path: its name has a digest of the reader's, which may be a path itself."""
        digest = hashlib.sha256(reader.encode()).hexdigest()[:12]
        return self._folder / f"{text:05}-{temperature:g}-{digest}.npz"
