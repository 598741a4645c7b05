"""Faults on purpose: a proxy that sees the frames of a round, and what it can do to them."""
