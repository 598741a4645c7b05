"""Benchmarks: each states its command, hardware, versions and prompts, and compares within one run."""

from pathlib import Path

REPORTS = Path("docs/reports")
"""Where reports go, in a checkout."""
