"""The laboratory: what stands on the services to predict, plan, simulate and measure them."""

from pathlib import Path

REPORTS = Path("docs/reports")
"""Where reports go, in a checkout."""
