"""Two targets, two draft services, and two coordinators that find them by files."""

from __future__ import annotations

from pathlib import Path

from paceline.local.service_process import Flags, ServiceName
from paceline.local.services import LocalServices
from paceline.local.tls import peer_tls, server_tls
from paceline.runtime.files import replace_text
from paceline.runtime.roles import PeerRole

PEERS = ("target-a", "target-b", "draft-a", "draft-b")
COORDINATORS = ("coordinator-a", "coordinator-b")
START_SECONDS = 60.0


class ManyServices(LocalServices):
    """The services by their labels, each of which begins with its role.

    Args:
        folder: of logs, configurations and endpoint files.
        target_model: what both targets serve.
        draft_model: what both draft services draft with.
        tls: the folder of role certificates that all have mutual TLS with; None: plaintext.
    """

    def __init__(
        self,
        folder: Path,
        target_model: str,
        draft_model: str,
        tls: Path | None = None,
    ) -> None:
        super().__init__(folder, start_timeout_s=START_SECONDS, tls=tls)
        self.target_model = target_model
        self.draft_model = draft_model

    def start_all(self) -> None:
        """Start everything, the coordinators when their peers serve."""
        for label in PEERS:
            self.start_peer(label)
        self.await_serving(*PEERS)
        for role in ("target", "draft"):
            self.tell(role, *(label for label in PEERS if label.startswith(role)))
        for label in COORDINATORS:
            self.start(label, "coordinator", self._coordinator())
        self.await_serving(*COORDINATORS)
        for label in COORDINATORS:
            self.await_links(label)

    def start_peer(self, label: str, model: str | None = None) -> None:
        """Start a target or a draft service on a free port, with its role's model if none is named."""
        name: ServiceName = "target" if label.startswith("target") else "draft"
        flags: Flags = {"server.port": 0}
        if name == "target":
            flags |= {"model": model or self.target_model}
        else:
            flags |= {"drafters": [f"model:{model or self.draft_model}"]}
        self.start(label, name, flags | server_tls(self.tls, PeerRole(name)))

    def tell(self, role: str, *labels: str) -> None:
        """Write a role's endpoints."""
        lines = [f"{self.address_of(label)}\n" for label in labels]
        replace_text(self.folder / role, "".join(lines))

    def _coordinator(self) -> Flags:
        flags: Flags = {"model": self.target_model, "server.port": 0, "reconnect_max_ms": 200.0}
        for role in ("target", "draft"):
            flags[f"{role}.address"] = f"file:{self.folder / role}"
        return flags | server_tls(self.tls, PeerRole.COORDINATOR) | peer_tls(self.tls)
