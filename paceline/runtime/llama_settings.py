"""Settings of llama.cpp as an engine, named as llama.cpp's users know them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.runtime.settings import Flag, Settings

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
SPLIT_MODES: tuple[str, ...] = ("none", "layer", "row", "tensor")
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


class LlamaSettings(Settings):
    """How llama.cpp loads a GGUF file, where it is the engine."""

    library: Annotated[Path | None, Flag("llama_library")] = Field(
        None, description="File of llama.cpp's shared library; unset: that of the extra llama."
    )
    gpu_layers: int = Field(-1, ge=-1, le=1 << 16, description="Layers on GPUs; -1: all that there is a GPU for.")
    split_mode: Literal["none", "layer", "row", "tensor"] = Field(
        "layer", description="What of a model each of several GPUs has."
    )
    main_gpu: int = Field(0, ge=0, le=255, description="The GPU of split_mode none, counted from 0.")
    tensor_split: str | None = Field(
        None, description="Shares of the model for each GPU, such as 3,1; unset: by memory."
    )
    devices: tuple[str, ...] = Field((), description="Devices to use, by llama.cpp's names; unset: all GPUs.")
    flash_attn: Literal["auto", "on", "off"] = Field("auto", description="Flash attention; auto: where it is built.")
    cache_type_k: CacheType = Field("f16", description="Number format of cached keys.")
    cache_type_v: CacheType = Field(
        "f16", description="Number format of cached values; 8 bits and less need flash attention."
    )
