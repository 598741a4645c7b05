"""Names that are bare participles: `found` says that something was found and leaves the reader to supply what.

Each place that stores a name is counted: assignments, parameters, fields, targets of `for`, `with`, `except`,
comprehensions and `:=`, functions and classes. `self`, `cls`, `_` and the members of an enumeration are left
out: the last are words of a protocol, or states.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

IRREGULAR = (
    "begun|bent|bitten|borne|bought|broken|brought|built|caught|chosen|come|crept|dealt|drawn|driven|eaten|fallen|fed|"
    "felt|forbidden|foreseen|forgotten|found|frozen|given|gone|got|gotten|grown|heard|held|hung|kept|known|laid|"
    "learnt|led|left|lent|lit|lost|made|meant|met|overridden|overwritten|paid|proven|redrawn|rewritten|said|seen|sent|"
    "shaken|shown|slept|sold|sought|spelt|spent|spoken|stolen|stood|struck|swept|taken|taught|thrown|told|torn|undone|"
    "understood|unknown|withheld|woken|won|worn|woven|written"
)
"""Participles without -ed. Not among them are those that are the verb itself or a noun, too, so that a function or
a value may well have the name: bound, cost, cut, hit, put, read, run, set, split, thought."""

OTHER_WORDS = (
    "bed|bleed|breed|embed|exceed|feed|hundred|indeed|naked|need|proceed|red|sacred|seed|shed|shred|speed|succeed|"
    "unembed|weed"
)
"""Words in -ed that are no participles."""

TERMS = {
    "accepted": "the glossary's, of a token that was proposed",
    "committed": "the glossary's, of a token",
    "coupled": "the glossary's, an acceptance rule's name",
    "done": "asyncio's: `done()`, and `done, pending` of `asyncio.wait`",
    "drafted": "of a token that a drafter made, proposed or not",
    "held_out": "the field's, of data that training doesn't see",
    "hidden": "the field's, of a model's states",
    "proposed": "the glossary's, of a token",
    "recovered": "the glossary's, of a token: its provenance",
    "redrawn": "the glossary's, of a token",
    "shared": "an adjective, of a prefix or a folder that several have",
    "unauthenticated": "a status of gRPC's",
}
"""Participles that are names here, each with its reason."""

STATES = "cancelled|closed|drained|enabled|ended|expired|failed|finished|opened|required|started|stopped"
"""States that a boolean may be named for, as elsewhere: asyncio's `cancelled()`, gRPC's `closed`."""

_PREPOSITIONS = (
    "above|after|ahead|alone|apart|aside|away|back|before|behind|below|beside|by|down|for|from|here|in|into|of|off|on|"
    "out|over|there|through|to|together|under|up|with|without"  # `_at`, `_since` and `_until` make a time's name
)
_PARTICIPLE = re.compile(rf"(?!({OTHER_WORDS})(_|$))([a-z]{{2,}}ed|{IRREGULAR})(_({_PREPOSITIONS}))?")
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass
class NameCount:
    """Places that store a name, and those whose name is a bare participle, by that name."""

    places: int = 0
    participles: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Bare participles among all, in per cent."""
        return 100 * self.participles.total() / max(self.places, 1)

    def __str__(self) -> str:
        most = ", ".join(f"{name} {count}" for name, count in self.participles.most_common(20))
        return f"{self.share:.2f} %, {self.participles.total()} of {self.places}: {most}"


def count_names(modules: Iterable[str]) -> NameCount:
    """The names that modules store, of whose text is given."""
    names = NameCount()
    for text in modules:
        for name, boolean in _stored_names(ast.parse(text)):
            names.places += 1
            if is_bare_participle(name, boolean=boolean):
                names.participles[name.strip("_").lower()] += 1
    return names


def is_bare_participle(name: str, *, boolean: bool = False) -> bool:
    """Whether a name is no more than a participle, or one with a preposition; `boolean`: of a truth value."""
    words = _CAMEL_CASE.sub("_", name).strip("_").lower()
    excepted = words in TERMS or (boolean and re.fullmatch(STATES, words))
    return not excepted and _PARTICIPLE.fullmatch(words) is not None


def _stored_names(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Each name that is stored, and whether the place itself shows that it names a truth value."""
    nodes = list(ast.walk(tree))
    members = {id(target) for node in nodes for target in _members(node)}
    booleans = {id(target) for node in nodes if _is_boolean(node) for target in (node, *_targets(node))}
    for node in nodes:
        name = _name_of(node)
        if name and name.strip("_") and name not in ("self", "cls") and id(node) not in members:
            yield name, id(node) in booleans


def _name_of(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.ExceptHandler(name=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
    return None


def _targets(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign(targets=targets):
            return targets
        case ast.AnnAssign(target=target):
            return [target]
    return []


def _members(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
        return [target for statement in node.body for target in _targets(statement)]
    return []


def _is_boolean(node: ast.AST) -> bool:
    """Whether a parameter, assignment or function is annotated `bool`, or assigns `True` or `False`."""
    match node:
        case ast.arg(annotation=ast.Name(id="bool")) | ast.AnnAssign(annotation=ast.Name(id="bool")):
            return True
        case ast.FunctionDef(returns=ast.Name(id="bool")) | ast.AsyncFunctionDef(returns=ast.Name(id="bool")):
            return True
        case ast.Assign(value=ast.Constant(value=bool())):
            return True
    return False
