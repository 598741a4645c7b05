"""Steps of llama.cpp with a GGUF file, on whatever devices its library has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from paceline.engine.executor import Executor
from paceline.engine.llama.engine import LlamaEngine
from paceline.engine.llama.loading import LLAMA, at_hand, load_llama_engine, row_bytes
from paceline.llama_cpp.capi import open_interface
from paceline.llama_cpp.library import any_library
from paceline.models.gguf_header import GgufHeader, read_header
from paceline.models.resolve import resolve
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import EngineSettings
from paceline.runtime.llama_settings import LlamaSettings
from paceline.runtime.process import own_cores
from paceline_lab.bench.gpu.cases import Measured, ServiceLoad, case_of, longest, median_ms, rounds_of
from paceline_lab.bench.gpu.ggml_copy import CPU, copy_bandwidths

_EXPERTS = "_exps."
"""Part of the names of tensors that have a matrix for each expert."""
_SUMMED_SPLITS = ("row", "tensor")
"""Splits where all devices read at once."""


def measure_file(
    model: str, llama: LlamaSettings, threads: int, loads: Sequence[ServiceLoad], steps: int, gb_per_s: float | None
) -> Measured:
    """Measure a GGUF file.

    Args:
        model: names the file.
        llama: as the services have them.
        threads: on the CPU; 0: one for each core.
        loads: of the cases.
        steps: measured in each.
        gb_per_s: bandwidth of the memory that holds the weights; None: that of a copy.

    Raises:
        InvalidInput: the model is no GGUF file, or a setting doesn't fit it.
    """
    source = resolve(model)
    if source.gguf is None:
        raise InvalidInput.of("--model", model, "a .gguf file, with --engine llama")
    header = read_header(source.gguf)
    bandwidths = {"as --bandwidth says": gb_per_s * 1e9} if gb_per_s else _copies(llama)
    settings = _settings(header, llama, threads, loads, steps)
    # One thread for everything, as in a service: OpenMP has its threads anew for each, which would sleep sooner.
    executor = Executor("gpu-benchmark")
    engine = asyncio.run(executor.run(load_llama_engine, source, settings))
    step_times = [asyncio.run(executor.run(_step_ms, engine, load, steps)) for load in loads]
    round_times = rounds_of(engine, executor, settings, loads, steps)
    executor.close()
    bandwidth = sum(bandwidths.values()) if llama.split_mode in _SUMMED_SPLITS else max(bandwidths.values())
    cases = [
        case_of(source.name, load, floor_ms(header, llama, load, bandwidth), step_ms, rounds)
        for load, step_ms, rounds in zip(loads, step_times, round_times, strict=True)
    ]
    return Measured(_facts(header, engine, settings, bandwidths), cases)


def _facts(
    header: GgufHeader, engine: LlamaEngine, settings: EngineSettings, bandwidths: Mapping[str, float]
) -> dict[str, str]:
    rates = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in bandwidths.items())
    offload = settings.llama.model_dump(mode="json", exclude={"library"})
    return {
        "library": at_hand(settings.llama),
        "offload": ", ".join(f"{key} {'unset' if value in (None, []) else value}" for key, value in offload.items()),
        "threads": str(settings.threads or own_cores()),
        "file": f"{header.file.name}, {header.architecture}, {_gib(header.file.stat().st_size)}",
        "weights read in a step": _gib(weights_read(header)),
        "copy bandwidth": f"{rates}, read plus written",
        "rows": engine.invariance,
    }


def _settings(
    header: GgufHeader, llama: LlamaSettings, threads: int, loads: Sequence[ServiceLoad], steps: int
) -> EngineSettings:
    max_length, sessions = longest(loads, steps), max(load.sessions for load in loads)
    return EngineSettings(
        engine=LLAMA,
        threads=threads,
        llama=llama,
        max_num_seqs=sessions,
        max_model_len=max_length,
        kv_bytes=sessions * max_length * row_bytes(header, llama),
        prefix_reuse=False,
    )


def _copies(llama: LlamaSettings) -> dict[str, float]:
    """Bandwidths of the devices that weights may be on."""
    names = llama.devices if llama.gpu_layers else (CPU,)
    return copy_bandwidths(open_interface(any_library(llama.library).file), names)


def _step_ms(engine: LlamaEngine, load: ServiceLoad, steps: int) -> float:
    with load.prefill(engine):
        return median_ms(partial(engine.step, load.plan), steps)


def floor_ms(header: GgufHeader, llama: LlamaSettings, load: ServiceLoad, bandwidth: float) -> float:
    """Return the floor of one step: its bytes at the bandwidth of a copy."""
    return (weights_read(header) + load.kv_rows * row_bytes(header, llama)) / bandwidth * 1e3


def weights_read(header: GgufHeader) -> float:
    """Return the bytes of weights that a step reads at least.

    These are all but an embedding of its own, of which it reads its rows alone, and the experts that no row needs.
    """
    keys = (f"{header.architecture}.expert_{name}" for name in ("used_count", "count"))
    used, count = (int(header.metadata.get(key, 1)) for key in keys)
    own_embedding = "token_embd.weight" if "output.weight" in header.tensors else None
    return sum(
        tensor.data.nbytes * (used / count if _EXPERTS in name else 1)
        for name, tensor in header.tensors.items()
        if name != own_embedding
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.3f} GiB"
