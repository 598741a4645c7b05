"""Grammars that attack whoever compiles them: time, memory, or both, without end."""

from __future__ import annotations

from paceline.protocol.sampling import Grammar, GrammarKind

_CONJUNCTION = " & ".join(f"/.*{chr(97 + i % 26)}{i}.*/" for i in range(1500))
_LEVELS = "\n".join(f"R{level}: R{level + 1} R{level + 1}" for level in range(24))
HOSTILE = {
    "conjunction": Grammar(GrammarKind.LARK, f"start: A\nA: {_CONJUNCTION}"),
    "multiple": Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer","multipleOf":5000011}'),
    "options": Grammar(GrammarKind.REGEX, "a?" * 32760),
    "levels": Grammar(GrammarKind.LARK, f'start: R0\n{_LEVELS}\nR24: "a"'),
}
