"""Roles: what a certificate says its owner is.

A caller's role is a URI in its certificate's subject alternative names, of the shape of a SPIFFE id:
`spiffe://TRUST-DOMAIN/paceline/ROLE`. gRPC lets a client check one DNS name of the server's certificate and nothing
else, so a server has its role as a DNS name, too: `ROLE.paceline`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

_ROLE_URI = re.compile(r"spiffe://[^/?#]+/paceline/(?P<role>draft|target|coordinator|client|operator)")

RolePolicy = Literal["required", "off"]


class PeerRole(StrEnum):
    """What a process or a person is to the others."""

    DRAFT = "draft"
    TARGET = "target"
    COORDINATOR = "coordinator"
    CLIENT = "client"
    OPERATOR = "operator"

    @property
    def server_name(self) -> str:
        """The DNS name that the certificate of a server with this role has."""
        return f"{self}.paceline"

    def uri(self, trust_domain: str = "TRUST-DOMAIN") -> str:
        """The URI that the certificate of whoever has this role has."""
        return f"spiffe://{trust_domain}/paceline/{self}"


def role_in(uris: Iterable[str]) -> PeerRole | None:
    """The role that a certificate's URIs name; None: none, several, or one that there is not."""
    roles = [match["role"] for uri in uris if (match := _ROLE_URI.fullmatch(uri))]
    return PeerRole(roles[0]) if len(roles) == 1 else None
