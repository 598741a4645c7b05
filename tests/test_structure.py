"""The rules for lengths and names: what counts as a bare participle, and that a broken rule is reported."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.names import count_names
from tools.structure import (
    BARE_PARTICIPLES,
    ROOM_ATTRIBUTES,
    ROOM_LINES,
    ROOM_OF_DRAFTING,
    SourceFile,
    check,
    drafting_grows,
)

MODULE = '''
"""Names of every kind."""
from enum import Enum

LEFT = 3

class Seen:
    """A class."""
    wanted: int
    closed: bool

class State(Enum):
    REFUSED = 1

def told(self, known, *, token, started: float, closed: bool = False, **kept):
    self._held = [given for given in known if (found := given)]
    with open(token) as file, file as drawn:
        for taken, rest in file:
            pass
    try:
        finished = True
    except OSError as lost:
        hidden, accepted = known, lost
'''
PARTICIPLES = "drawn found given held kept known left lost seen started taken told wanted"


def test_every_place_that_stores_a_name_is_counted() -> None:
    names = count_names([MODULE])
    assert dict(names.participles) == dict.fromkeys(PARTICIPLES.split(), 1)
    assert names.places == 22
    assert str(names).startswith("59.09 %, 13 of 22: ")


def test_a_tree_of_bare_participles_breaks_the_rule(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "some.py").write_text(MODULE)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    [broken] = check(tmp_path)
    assert broken.startswith(f"bare participles are over {BARE_PARTICIPLES} % of names: 59.09 %")


def many(attributes: int) -> str:
    return "class Plan:\n    depth: int\n\n    def take(self):\n" + "".join(
        f"        self.a{number} = self.depth\n" for number in range(attributes - 1)
    )


def test_what_decides_how_much_to_draft_has_bounds() -> None:
    policy, costs, meter = ROOM_OF_DRAFTING
    inside, outside, beside = policy + "some.py", "coordinator/" + "some.py", "coordinator/drafting/" + "some.py"
    assert drafting_grows([SourceFile(inside, many(ROOM_ATTRIBUTES)), SourceFile(outside, many(99))]) == []
    assert drafting_grows([SourceFile(beside, many(ROOM_ATTRIBUTES + 1))]) == [
        f"{beside}: Plan has {ROOM_ATTRIBUTES + 1} attributes"
    ]
    half = ROOM_LINES // 2
    files = [
        SourceFile(inside, "x = 1\n" * half),
        SourceFile(costs + "some.py", "x = 1\n" * (ROOM_LINES - half)),
    ]
    assert drafting_grows(files) == []
    [broken] = drafting_grows([*files, SourceFile(meter, "x = 1\n")])
    assert broken == f"what decides how much to draft has {ROOM_LINES + 1} lines, over {ROOM_LINES}"
