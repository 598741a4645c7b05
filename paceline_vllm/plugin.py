"""What vLLM calls in each of its processes before it makes a model runner (entry point `vllm.general_plugins`).

It imports nothing that costs anything, as it runs wherever Paceline is installed beside vLLM.

V2 has no place for a proposer of others. So one name is replaced: `init_speculator`, which gives the runner its
speculator. It gives ours where `speculative_config` says `ngram` and `additional_config` has `paceline.draft`, and
is vLLM's own everywhere else.
"""

from __future__ import annotations

import functools
import logging
import sys
from importlib import import_module
from typing import Any

from paceline.protocol.errors import Unsupported
from paceline_vllm.section import section_of

logger = logging.getLogger(__name__)

READ_VERSIONS = ("0.32", "0.33")
"""Of vLLM, in whose source the contract of a speculator was read."""
PLACES = ("vllm.v1.worker.gpu.spec_decode", "vllm.v1.worker.gpu.model_runner")
"""Where the name is defined, and the module that imports it when a worker starts: after plugins."""
NAME = "init_speculator"


def register() -> None:
    """Replace the name. A second call does nothing; a vLLM without the name is left alone, and the log says so."""
    try:
        own = getattr(import_module(PLACES[0]), NAME)
    except (ImportError, AttributeError):
        logger.error("this vLLM has no %s.%s: no drafts of Paceline's for its V2 model runner", PLACES[0], NAME)
        return
    if getattr(own, "gives_drafts", False):
        return

    @functools.wraps(own)
    def init_speculator(vllm_config: Any, *places: Any) -> Any:
        if not asks_for_drafts(vllm_config):
            return own(vllm_config, *places)
        require_read_version()
        from paceline_vllm.speculator import DraftSpeculator

        return DraftSpeculator(vllm_config, *places)

    init_speculator.gives_drafts = True  # type: ignore[attr-defined]
    for place in PLACES:
        if place in sys.modules:
            setattr(sys.modules[place], NAME, init_speculator)


def asks_for_drafts(vllm_config: Any) -> bool:
    """Whether a server's configuration asks for Paceline's drafts in the place of n-grams."""
    return vllm_config.speculative_config.use_ngram() and "draft" in section_of(vllm_config)


def require_read_version() -> None:
    """Refuse a vLLM whose speculators may be others.

    Raises:
        Unsupported: naming the version and those that were read.
    """
    import vllm

    if not vllm.__version__.startswith(tuple(f"{each}." for each in READ_VERSIONS)):
        read = " and ".join(READ_VERSIONS)
        raise Unsupported.of("vLLM", f"{vllm.__version__} was not read; its V2 runner may have drafts with {read}")
