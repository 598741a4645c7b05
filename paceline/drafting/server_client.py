"""The draft client of a server that is not ours, with the spans and metrics of its rounds."""

from __future__ import annotations

import atexit
from collections.abc import Mapping

from paceline.drafting.client import DraftClient, DraftClientSettings
from paceline.drafting.goodput_judge import GoodputJudge
from paceline.models.vocabulary import vocabulary_fingerprint
from paceline.protocol.handshake import Fingerprint
from paceline.runtime import metrics, telemetry
from paceline.runtime.config import ServerSettings

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
    size = min(max(vocabulary.values()) + 1, logits_width)
    client = DraftClient(
        settings,
        Fingerprint(tokenizer=vocabulary_fingerprint(vocabulary), vocab_size=size),
        most_tokens=most_tokens,
        most_nodes=most_nodes,
        max_length=max_length,
        judge=GoodputJudge(),
    )
    client.start()
    for end in (metrics.shutdown, telemetry.shutdown, client.close):  # the last one first
        atexit.register(end)
    return client
