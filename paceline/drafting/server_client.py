"""The draft client of a server that is not ours, with the spans and metrics of its rounds."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from paceline.drafting.client import DraftClient, DraftClientSettings
from paceline.drafting.goodput_judge import GoodputJudge
from paceline.models.vocabulary import fingerprint_of
from paceline.runtime import metrics, telemetry
from paceline.runtime.config import ServerSettings

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
ROUNDS_OF = "paceline-coordinator"
"""Whose spans and metrics a server's rounds have; `OTEL_SERVICE_NAME` gives another name."""


def start_client(
    settings: DraftClientSettings,
    vocabulary: Mapping[str, int],
    logits_width: int,
    *,
    most_tokens: int,
    most_nodes: int = 0,
    max_length: int,
) -> DraftClient:
    """A client that has begun to link, and that ends with the process.

    Args:
        settings: where drafts come from.
        vocabulary: ids of the server's tokens.
        logits_width: the number of ids that its model has logits for.
        most_tokens, most_nodes, max_length: as in `DraftClient`.

    Raises:
        Unsupported: the `OTEL_*` variables ask for traces or metrics, and the extra `otel` isn't installed.
    """
    telemetry.configure(ROUNDS_OF)
    metrics.configure(ROUNDS_OF, ServerSettings())
    client = DraftClient(
        settings,
        fingerprint_of(vocabulary.items(), logits_width),
        most_tokens=most_tokens,
        most_nodes=most_nodes,
        max_length=max_length,
        judge=GoodputJudge(),
    )
    client.start()
    for end in (metrics.shutdown, telemetry.shutdown, client.close):  # the last one first
        atexit.register(end)
    return client


class ServerDrafts:
    """Drafts for a server. A defect here ends the drafts, not the server.

    Args:
        client: of the rank that asks; None: nothing is offered.
    """

    def __init__(self, client: DraftClient | None) -> None:
        self.client = client

    def ask(self, call: Callable[[DraftClient], Answer]) -> Answer | None:
        """What a call gets from the client; None: there are no drafts, or no longer."""
        if self.client is None:
            return None
        try:
            return call(self.client)
        except Exception:
            logger.exception("drafting failed, the server goes on without drafts")
            client, self.client = self.client, None
            client.close()
            return None
