"""`python -m draft_service.step_times`: what the steps of this configuration's first drafter take, by threads."""

from __future__ import annotations

import inspect

from draft_service.drafters.catalogue import build_catalogue
from paceline.engine.interface import Engine
from paceline.engine.step_times import refuse_gpu, run_step_times
from paceline.models.table_names import is_table
from paceline.runtime.config import DraftConfig
from paceline.runtime.options import parse_config


def _load() -> Engine:
    config = parse_config(DraftConfig, inspect.getdoc(main) or "")
    if not is_table(config.drafters[0].partition(":")[2]):
        refuse_gpu(config.engine.device)
    return build_catalogue(config).engines[0]


def main() -> None:
    """Time the draft's steps."""
    run_step_times(_load)


if __name__ == "__main__":
    main()
