"""The list of attacks and its table; `python -m tests.attacks` tries them."""

from __future__ import annotations

from pathlib import Path

from tests.attacks.__main__ import MODULES
from tests.attacks.registry import ATTACKS, Attack, chosen, table, tried


async def holds(folder: Path) -> str:
    return "3 of 3"


async def fails(folder: Path) -> str:
    raise AssertionError("waited 9 s\nand more | so")


async def test_an_attack_that_fails_did_not_hold(tmp_path: Path) -> None:
    outcomes = [await tried(Attack(f"D{place}", "x", run), tmp_path) for place, run in enumerate((holds, fails), 1)]
    assert [each.held for each in outcomes] == [True, False]
    assert table(outcomes).splitlines()[2:] == [
        "| D1 | x | yes | 3 of 3 |",
        "| D2 | x | **no** | AssertionError: waited 9 s |",
    ]


def test_attacks_are_chosen_by_number_and_in_order() -> None:
    folder = Path(__file__).parent
    beside = {file.stem for file in folder.glob("*.py")} - {"__init__", "__main__", "registry", "test_attacks"}
    assert {Path(module.__file__ or "").stem for module in MODULES} == beside, "every module is imported"
    numbers = [int(each.number[1:]) for each in chosen(())]
    assert numbers == sorted(numbers)
    assert len(numbers) == len(ATTACKS)
    assert {each.number for each in chosen(["D1"])} == {"D1"}
