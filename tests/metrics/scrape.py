"""What services expose, as Prometheus reads it, and what queries ask for."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?\s*(?:\[[^\]]*\])?")
_MATCHER = re.compile(r'([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
FUNCTIONS = {
    "sum", "avg", "max", "min", "rate", "increase", "histogram_quantile", "avg_over_time", "by", "without", "on",
    "ignoring", "group_left", "group_right", "or", "and", "unless",
}  # fmt: skip
FROM_PROMETHEUS = {"instance", "job"}
"""Labels that it adds when it scrapes."""


class Series(NamedTuple):
    """One line of an exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Exposition:
    """What one service exposes: each metric's type, and every series."""

    types: Mapping[str, str]
    series: tuple[Series, ...]

    @classmethod
    def of(cls, text: str) -> Exposition:
        """Read it as Prometheus does."""
        families = [*text_string_to_metric_families(text)]
        series = (Series(each.name, each.labels, each.value) for family in families for each in family.samples)
        types = {f"{each.name}_total" if each.type == "counter" else each.name: each.type for each in families}
        return cls(types, tuple(series))

    @classmethod
    def at(cls, port: int) -> Exposition:
        """Ask a service."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return cls.of(answer.read().decode())

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        found = [each.value for each in self.series if each.name == name and labels.items() <= each.labels.items()]
        assert found, f"no series {name}{labels}"
        return sum(found)

    def labels_of(self, metric: str) -> set[str]:
        """Names of labels of a metric's series; a bucket's `le` is none of them."""
        own = {metric, *(f"{metric}_{part}" for part in ("bucket", "count", "sum"))}
        return {label for each in self.series if each.name in own for label in each.labels} - {"le"}


@dataclass(frozen=True)
class Selector:
    """A metric and what its labels must be."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def selects(self, series: Series) -> bool:
        """As Prometheus decides, `up`'s and other labels of its own left out."""
        return series.name == self.name and all(
            _matches(series.labels.get(label, ""), operator, value.replace("\\\\", "\\"))
            for label, operator, value in self.matchers
            if label not in FROM_PROMETHEUS
        )


def selectors(query: str) -> Iterator[Selector]:
    """Every selector of a query."""
    bare = _GROUPING.sub(" ", query.replace("$__rate_interval", "1m"))
    for name, matchers in _SELECTOR.findall(bare):
        if name not in FUNCTIONS and not _is_in_string(name, bare):
            yield Selector(name, tuple(_MATCHER.findall(matchers)))


def faults(query: str, expositions: Iterable[Exposition]) -> list[str]:
    """What of a query no service could answer: selectors without a series, and groupings by labels that none has."""
    found, known = [], [each for exposition in expositions for each in exposition.series]
    chosen: list[Series] = []
    for selector in selectors(query):
        if selector.name == "up":
            continue
        selected = [each for each in known if selector.selects(each)]
        chosen += selected
        if not selected:
            found.append(f"no series of {selector}")
    labels = {label for each in chosen for label in each.labels} | FROM_PROMETHEUS
    grouped = {label.strip() for group in _GROUPING.findall(query) for label in group.split(",") if label.strip()}
    return found + [f"no label {label}" for label in sorted(grouped - labels)]


def _matches(value: str, operator: str, wanted: str) -> bool:
    if operator in ("=", "!="):
        return (value == wanted) is (operator == "=")
    return (re.fullmatch(wanted, value) is not None) is (operator == "=~")


def _is_in_string(name: str, query: str) -> bool:
    """Whether it occurs within quotes alone."""
    return re.search(rf"(?<![\w:]){re.escape(name)}(?![\w:])", _STRING.sub('""', query)) is None
