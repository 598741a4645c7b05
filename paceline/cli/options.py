"""Options that several commands take."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.runtime.config import COORDINATOR_PORT, LOCALHOST

DEFAULT_COORDINATOR = f"{LOCALHOST}:{COORDINATOR_PORT}"


class Dtype(StrEnum):
    """Number formats that a model can be loaded in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Model = Annotated[str, typer.Argument(help="A pulled model, a Hugging Face id, a folder or a .gguf path.")]
Drafter = Annotated[
    str | None,
    typer.Option(help="auto, ngram, model, none; auto:PATH, model:PATH: your own draft.", show_default="auto"),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        help='JSON: {"method": "auto"|"ngram"|"draft_model"|"none", "model": …, "num_speculative_tokens": …}.'
    ),
]
TensorParallel = Annotated[
    int | None, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share the target model.")
]
Timeout = Annotated[float | None, typer.Option(help="Seconds that the whole request may take.", show_default="none")]
TlsCa = Annotated[Path | None, typer.Option(help="Trust this CA and use TLS.", show_default="plaintext")]
