"""Regular expressions of JSON schemas, rewritten for a library that reads some of them in another way.

JSON Schema means ECMA-262's expressions; validators mean their own language's. The library follows Rust's, where a
class may hold classes and operators, `.` takes a carriage return and the classes of letters have other members. A
rewritten expression matches no string that ECMA-262's reading, or Python's, does not match.
"""

from __future__ import annotations

import re

_SPACE = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ANY_SPACE = _SPACE + r"\u001c-\u001f\u0085\ufeff"
_WORD, _ANY_WORD = "A-Za-z0-9_", r"_\p{L}\p{N}"
_MEMBERS = {
    "d": ("0-9", r"\p{Nd}"),
    "w": (_WORD, _ANY_WORD),
    "s": (_SPACE, _ANY_SPACE),
    "D": (r"[^\p{Nd}]", "[^0-9]"),
    "W": (f"[^{_ANY_WORD}]", f"[^{_WORD}]"),
    "S": (f"[^{_ANY_SPACE}]", f"[^{_SPACE}]"),
}
"""Members of a class in every reading, and in any reading; the second one counts in a negated class."""
_DOT = r"[^\n\r\u2028\u2029]"
_PIECE = re.compile(r"\\.|\[\^?|\(\?(?:[a-zA-Z-]*[:)]|P?<|.)|[*+?}]\+|.", re.DOTALL)
_OTHERS = {r"\a", r"\A", r"\z", r"\U", r"\Q"}
_GROUPS = ("(?:", "(?<", "(?P<", "(?i)", "(?i:", "(?=", "(?!")
"""Groups that the library reads as others do, or refuses."""


def portable_pattern(pattern: str) -> str:
    """The expression, rewritten for the library.

    Raises:
        ValueError: a part of it has no meaning that all readings share.
    """
    parts, is_negated = [], None
    pieces = [each[0] for each in _PIECE.finditer(pattern)]
    for place, piece in enumerate(pieces):
        if is_negated is None and piece in ("[", "[^"):
            is_negated = piece == "[^"
            if pieces[place + 1 : place + 2] == ["]"]:
                raise ValueError(f"pattern {pattern!r}: an empty class")
            parts.append(piece)
        elif is_negated is None:
            parts.append(_outside_class(pattern, piece))
        else:
            parts.append(_inside_class(pattern, piece, is_negated=is_negated))
            is_negated = None if piece == "]" else is_negated
            if piece == "-" and pieces[place + 1 : place + 2] == ["-"]:
                raise ValueError(f"pattern {pattern!r}: -- in a class")
    return "".join(parts)


def _outside_class(pattern: str, piece: str) -> str:
    possessive = len(piece) == 2 and piece[1] == "+" and piece[0] != "\\"
    group = piece.startswith("(?") and piece not in _GROUPS
    if possessive or group or piece in _OTHERS:
        raise ValueError(f"pattern {pattern!r}: {piece} has another meaning elsewhere")
    if piece == ".":
        return _DOT
    members = _MEMBERS.get(piece[1:]) if piece[0] == "\\" else None
    return piece if members is None else f"[{members[0]}]"


def _inside_class(pattern: str, piece: str, *, is_negated: bool) -> str:
    if piece in _OTHERS:
        raise ValueError(f"pattern {pattern!r}: {piece} has another meaning elsewhere")
    if piece[0] == "\\":
        return _MEMBERS[piece[1:]][is_negated] if piece[1:] in _MEMBERS else piece
    # Operators and classes within classes are the library's own.
    return re.sub(r"[\[&~]", r"\\\g<0>", piece)
