"""What a report must say about the machine and the software that made it; `paceline bench` says the same."""

from paceline.bench.environment import as_markdown, describe

__all__ = ["as_markdown", "describe"]
