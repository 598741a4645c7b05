"""Benchmarks: each states its command, hardware, versions and prompts, and compares within one run."""
