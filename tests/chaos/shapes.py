"""The clusters on which faults fall: what each consists of, and what makes it different."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.local.service_process import ProcessName

BEHIND_GATEWAY = "coordinator-of-gateway"
"""The proxy between gateway and coordinator; the one named after the coordinator is before its clients."""
GUEST = "draft-guest"
"""The draft service whose drafter reads features: no process of its own, nor under TLS."""
_PAIRS: Mapping[str, ProcessName] = {
    "target": "target",
    "target-2": "target",
    "draft": "draft",
    "draft-2": "draft",
    "coordinator": "coordinator",
}


@dataclass(frozen=True)
class Shape:
    """A cluster of processes by label. `tls`: mutual, so proxies see no frames; `shim`: wall clocks can jump;
    `names`: its peers are found by names that may stop resolving, which needs the shim; `ranks`: of each target."""

    labels: Mapping[str, ProcessName]
    tls: bool = False
    shim: bool = False
    names: bool = False
    ranks: int = 1

    @property
    def role_of_proxy(self) -> Mapping[str, str]:
        """The proxies, by their labels, and before which role each stands."""
        gateway = {BEHIND_GATEWAY: "coordinator"} if "gateway" in self.labels else {}
        guest = {} if self.tls else {GUEST: "draft"}
        return {**self.labels, **gateway, **guest}

    def labels_of(self, role: str) -> list[str]:
        return [label for label, name in self.labels.items() if name == role]


PLAIN = Shape({**_PAIRS, "gateway": "gateway"})
SMALL = "small"
SHAPES: Mapping[str, Shape] = {
    "plain": PLAIN,
    SMALL: Shape({"target": "target", "draft": "draft", "coordinator": "coordinator"}),
    "secured": Shape(_PAIRS, tls=True, shim=True),
    "named": Shape({**_PAIRS, "gateway": "gateway"}, shim=True, names=True),
    "ranked": Shape(_PAIRS, ranks=2),
}
