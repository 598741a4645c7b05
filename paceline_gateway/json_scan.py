"""Where a JSON object ends, character by character."""

from __future__ import annotations


class ObjectScan:
    """Follows one JSON value that began with a bracket; `depth` counts the brackets that are open."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._in_string = False
        self._escaped = False

    def push(self, character: str) -> bool:
        """Take one character; True if it closed the last bracket."""
        if self._in_string:
            self._within_string(character)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            return self.depth == 0
        return False

    def run(self, text: str, at: int) -> int:
        """Take characters up to the bracket that closes the last one, which is left; returns where that is."""
        while at < len(text) and (self._in_string or self.depth != 1 or text[at] not in "}]"):
            self.push(text[at])
            at += 1
        return at

    def _within_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
