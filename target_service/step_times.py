"""`python -m target_service.step_times`: what the steps of this configuration's target take, by threads."""

from __future__ import annotations

import inspect

from paceline.engine.interface import Engine
from paceline.engine.loading import load_engine
from paceline.engine.step_times import refuse_gpu, run_step_times
from paceline.models.table_names import is_table
from paceline.runtime.config import TargetConfig
from paceline.runtime.options import parse_config


def _load() -> Engine:
    config = parse_config(TargetConfig, inspect.getdoc(main) or "")
    if not is_table(config.model):
        refuse_gpu(config.engine.device)
    return load_engine(config.model, config.engine)


def main() -> None:
    """Time the target's steps."""
    run_step_times(_load)


if __name__ == "__main__":
    main()
