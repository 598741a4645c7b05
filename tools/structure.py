"""How the tree reads: `python -m tools.structure [--tree FOLDER]`, for this checkout or another one; some minutes.

Counts the product alone: Python that git tracks, without tests and without generated stubs. Modules and
imports are those that grimp finds. Code lines are those without blank ones, imports, comments and
docstrings. Duplicates are runs of six or more lines that pylint's similarity checker finds twice, comments,
docstrings, imports and signatures aside. Names that are bare participles: `tools.names`.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grimp
from pylint.checkers.symilar import Symilar

from tools.names import count_names

PACKAGES = (
    "paceline",
    "coordinator",
    "draft_service",
    "target_service",
    "paceline_gateway",
    "paceline_lab",
    "paceline_ray",
    "paceline_sglang",
    "paceline_training",
    "paceline_vllm",
    "tools",
)
GENERATED = "paceline/v1/"
LONG_FILE = 400
LONG_FUNCTION = 35
SHARED_LINES = 6
BARE_PARTICIPLES = 0.3
"""Per cent of all stored names that may be bare participles; it only ever falls."""

ROOM_OF_DRAFTING = ("coordinator/policy/", "paceline/costs/", "target_service/meter.py")
"""What decides how much to draft."""
STATED_COSTS = ("paceline/costs/cost_line.py", "paceline/costs/service_costs.py")
"""What of it is said on links alone, and decides nothing."""
ROOM_LINES = 1700
"""Lines that may decide how much to draft; it only ever falls."""
ROOM_ATTRIBUTES = 12
"""Most attributes of an object that decides how much to draft, or carries that out."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """One file of the product: its path in the tree, and its text."""

    path: str
    text: str

    @property
    def lines(self) -> int:
        """All of them, blank ones too."""
        return len(self.text.splitlines())

    @property
    def code_lines(self) -> int:
        """Those that hold anything but imports, comments and docstrings."""
        skipped_lines: set[int] = set()
        for node in ast.walk(ast.parse(self.text)):
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.stmt) and (text or isinstance(node, ast.Import | ast.ImportFrom)):
                skipped_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = (line.strip() for number, line in enumerate(self.text.splitlines(), 1) if number not in skipped_lines)
        return sum(bool(line) and not line.startswith("#") for line in lines)


def product(tree: Path) -> list[SourceFile]:
    """Every tracked module of the product."""
    git = subprocess.run(["git", "ls-files", "*.py"], cwd=tree, capture_output=True, text=True, check=True)
    paths = [path for path in git.stdout.split() if path.partition("/")[0] in PACKAGES]
    return [SourceFile(path, (tree / path).read_text()) for path in paths if not path.startswith(GENERATED)]


def room_of(path: str) -> str:
    """The package that a file is counted under: two levels deep in `paceline`, one elsewhere."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "paceline" and len(parts) > 2 else parts[0]


def functions(sources: Sequence[SourceFile]) -> Iterator[Function]:
    """Every function and method."""
    for source in sources:
        yield from (node for node in ast.walk(ast.parse(source.text)) if isinstance(node, Function))


def public_docstrings(sources: Sequence[SourceFile]) -> float:
    """Per cent that have one, of modules and of classes, functions and methods without a leading underscore."""
    trees = [ast.parse(source.text) for source in sources]
    public = [node for tree in trees for node in _public(tree)]
    return 100 * sum(ast.get_docstring(node) is not None for node in public) / max(len(public), 1)


def _public(node: ast.Module | ast.ClassDef | Function) -> Iterator[ast.Module | ast.ClassDef | Function]:
    yield node
    for child in [] if isinstance(node, Function) else node.body:
        if isinstance(child, ast.ClassDef | Function) and not child.name.startswith("_"):
            yield from _public(child)


def attributes(node: ast.ClassDef) -> set[str]:
    """The names that a class stores: its fields, and what its methods set on themselves."""
    fields = {each.target for each in node.body if isinstance(each, ast.AnnAssign)}
    names = {field.id for field in fields if isinstance(field, ast.Name)}
    stores = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return names | {each.attr for each in stores if isinstance(each.value, ast.Name) and each.value.id == "self"}


def drafting_grows(sources: Sequence[SourceFile]) -> list[str]:
    """What makes the room of drafting too large: its lines, or the attributes of one of its objects."""
    room = [each for each in sources if each.path.startswith(ROOM_OF_DRAFTING) and each.path not in STATED_COSTS]
    lines = sum(source.lines for source in room)
    carrying_out = [source for source in sources if source.path.startswith("coordinator/drafting/")]
    counts = {
        f"{source.path}: {node.name}": len(attributes(node))
        for source in (*room, *carrying_out)
        for node in ast.walk(ast.parse(source.text))
        if isinstance(node, ast.ClassDef)
    }
    large = [f"{name} has {count} attributes" for name, count in counts.items() if count > ROOM_ATTRIBUTES]
    return [f"what decides how much to draft has {lines} lines, over {ROOM_LINES}"][: lines > ROOM_LINES] + large


def long_files(sources: Sequence[SourceFile]) -> list[str]:
    """Files of more than `LONG_FILE` lines."""
    return [f"{source.path} ({source.lines})" for source in sources if source.lines > LONG_FILE]


def classes_twice(sources: Sequence[SourceFile]) -> dict[str, list[str]]:
    """Names that more than one module gives to a class, a leading underscore aside."""
    modules: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in ast.parse(source.text).body:
            if isinstance(node, ast.ClassDef):
                modules[node.name.lstrip("_")].append(source.path)
    return {name: paths for name, paths in sorted(modules.items()) if len(paths) > 1}


def upward_imports(tree: Path) -> list[str]:
    """Imports that must go before no two siblings, at any depth, import each other in a circle."""
    sys.path.insert(0, str(tree))
    roots = [name for name in PACKAGES if (tree / name / "__init__.py").exists()]
    graph = grimp.build_graph(roots[0], *roots[1:], cache_dir=None)
    for module in [module for module in graph.modules if module.startswith("paceline.v1.")]:
        graph.remove_module(module)
    parents = [module for module in graph.modules if graph.find_children(module)]
    pairs = {pair for parent in parents for pair in graph.nominate_cycle_breakers(parent)}
    return sorted(f"{importer} -> {imported}" for importer, imported in pairs)


def duplicates(tree: Path, sources: Sequence[SourceFile]) -> int:
    """Pairs of places that share a run of lines."""
    checker = Symilar(SHARED_LINES, True, True, True, True)  # ignoring comments, docstrings, imports, signatures
    for source in sources:
        with (tree / source.path).open() as stream:
            checker.append_stream(source.path, stream)
    return sum(len(places) * (len(places) - 1) // 2 for _, places in checker._compute_sims())


def report(tree: Path) -> str:
    """All figures, as Markdown."""
    sources = product(tree)
    rooms, code = Counter[str](), Counter[str]()
    for source in sources:
        rooms[room_of(source.path)] += source.lines
        code[room_of(source.path)] += source.code_lines
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions(sources)]
    loose = [source.path for source in sources if re.fullmatch(r"paceline/\w+\.py", source.path)]
    upward, twice = upward_imports(tree), classes_twice(sources)
    facts = {
        "lines of the product": str(sum(rooms.values())),
        "code lines": str(sum(code.values())),
        "files": str(len(sources)),
        f"files over {LONG_FILE} lines": _listing(long_files(sources)),
        "loose files in paceline/": _listing(loose),
        "imports that close a circle or point upwards": _listing(upward),
        "class names that occur twice": _listing(list(twice)),
        f"pairs that share {SHARED_LINES} lines": str(duplicates(tree, sources)),
        "lines of a function: median, 90th percentile": (
            f"{statistics.median(lengths):g}, {statistics.quantiles(lengths, n=10)[8]:g}"
        ),
        f"functions over {LONG_FUNCTION} lines": str(sum(length > LONG_FUNCTION for length in lengths)),
        "names that are bare participles": str(count_names(source.text for source in sources)),
        "public things with a docstring": f"{public_docstrings(sources):.1f} %",
        "breaks of the bounds of drafting": _listing(drafting_grows(sources)),
        "words of the README": str(len((tree / "README.md").read_text().split())),
    }
    lines = ["| what | figure |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += ["| package | lines | code lines |", "| --- | --- | --- |"]
    lines += [f"| {room} | {rooms[room]} | {code[room]} |" for room in sorted(rooms)]
    return "\n".join(lines) + "\n"


def _listing(items: Sequence[str]) -> str:
    return f"{len(items)}: {', '.join(items)}" if items else "0"


def check(tree: Path) -> list[str]:
    """What breaks a rule: a long file, a class name given twice, bare participles as names, drafting that grows."""
    sources = product(tree)
    names = count_names(source.text for source in sources)
    bare = [f"bare participles are over {BARE_PARTICIPLES} % of names: {names}"][: names.share > BARE_PARTICIPLES]
    twice = [f"class {name} in {' and '.join(paths)}" for name, paths in classes_twice(sources).items()]
    return (
        [f"over {LONG_FILE} lines: {file}" for file in long_files(sources)] + twice + bare + drafting_grows(sources)
    )


def main() -> None:
    """Print the figures, or with `--check` what must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(), help="A checkout; default: the current folder.")
    parser.add_argument("--check", action="store_true", help="Only fail where lengths or names break a rule.")
    options = parser.parse_args()
    if options.check:
        sys.exit("\n".join(check(options.tree)) or 0)
    sys.stdout.write(report(options.tree.resolve()))


if __name__ == "__main__":
    main()
