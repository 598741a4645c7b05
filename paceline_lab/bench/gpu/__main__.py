"""What a step costs on a GPU beside what memory allows, and what the service adds.

    python -m paceline_lab.bench.gpu
    python -m paceline_lab.bench.gpu --device cpu --shape tiny --steps 3
    python -m paceline_lab.bench.gpu --engine llama --model FILE.gguf --out report

In every case a number of sessions, each behind `--length` tokens, verify rows. A step's **floor** is the bytes of
weights and of KV rows that it must read, divided by the bandwidth of a large copy, measured in the same run (bytes
read plus bytes written). Through the target service on loopback the overhead is what a round takes beyond the
service's own time for forward pass and draws; plain tokens/s are those of rounds without a proposal.

`--engine torch` has random weights of real shapes, whose rows are drawn on the device (coupled, temperature 1): with
graphs and without, and with logits brought to the host in place of draws. What a reading of the engine's code expects
is measured on the last of them and confirmed or not (docs/operations.md#gpus). `--engine llama` has llama.cpp compute
a GGUF file, with its own settings of offload, and says what the bits of a row depend on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.protocol.errors import PacelineError
from paceline.runtime.fields import every_setting
from paceline.runtime.llama_settings import LlamaSettings
from paceline.runtime.sources import SourcedValue, load
from paceline_lab import REPORTS
from paceline_lab.bench.gpu.cases import WARM_UP, Measured, ServiceLoad, table
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import write_rows

ROWS = (1, 4, 8, 16)
SESSIONS = (1, 8, 32)
LLAMA, TORCH = "llama", "torch"
SEND_BACK = "Send back this file."
LLAMA_SETTINGS = every_setting(LlamaSettings)


def _measure_torch(arguments: argparse.Namespace, loads: Sequence[ServiceLoad]) -> Measured:
    import torch

    from paceline_lab.bench.gpu.torch_steps import measure_shapes

    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --shape tiny runs the same code, for what it is worth")
    device = torch.device(arguments.device)
    return measure_shapes(arguments.shape, device, arguments.dtype, loads, arguments.steps)


def _measure_llama(arguments: argparse.Namespace, loads: Sequence[ServiceLoad]) -> Measured:
    """Measure a file, without torch."""
    from paceline_lab.bench.gpu.llama_steps import measure_file

    flags = {each.key: SourcedValue(getattr(arguments, each.key), each.flag_name) for each in LLAMA_SETTINGS}
    settings = load(LlamaSettings, None, {key: flag for key, flag in flags.items() if flag.value is not None}).config
    return measure_file(arguments.model, settings, arguments.threads, loads, arguments.steps, arguments.bandwidth)


def run(arguments: argparse.Namespace) -> str:
    """Measure everything, and return the report."""
    pairs = [(sessions, rows) for sessions in arguments.sessions for rows in arguments.rows]
    loads = [ServiceLoad(sessions, rows, arguments.length) for sessions, rows in pairs]
    measure = _measure_llama if arguments.engine == LLAMA else _measure_torch
    facts, cases, findings = measure(arguments, loads)
    facts |= {
        "tokens before the step": str(arguments.length),
        "steps": f"{arguments.steps} after {WARM_UP}, medians",
    }
    name = "gpu-llama" if arguments.engine == LLAMA else "gpu"
    graphs = arguments.engine == TORCH and arguments.device.startswith("cuda")
    text = table(cases, graphs=graphs)
    if findings:
        text += f"\n## Findings, on {cases[-1].model}\n\n{markdown_table(findings)}\n{SEND_BACK}\n"
    return write_rows(arguments.out, name, facts, cases, text)


def _integers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _shapes(text: str) -> list[str]:
    from paceline_lab.bench.gpu.models import SHAPES

    shapes = text.split(",")
    if unknown_shapes := {*shapes} - SHAPES.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown_shapes))}: must be among {', '.join(SHAPES)}")
    return shapes


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=(TORCH, LLAMA), default=TORCH)
    parser.add_argument("--sessions", type=_integers, default=list(SESSIONS))
    parser.add_argument("--rows", type=_integers, default=list(ROWS), help="of each session")
    parser.add_argument("--length", type=int, default=1024, help="tokens before the step")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=REPORTS)
    ours = parser.add_argument_group("--engine torch")
    ours.add_argument("--device", default="cuda")
    ours.add_argument("--shape", type=_shapes, default=["1b", "8b"], help="1b, 8b, 32b, tiny")
    ours.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    llama = parser.add_argument_group("--engine llama")
    llama.add_argument("--model", help="a .gguf file")
    llama.add_argument("--threads", type=int, default=0, help="on the CPU; 0: one for each core")
    llama.add_argument("--bandwidth", type=float, help="GB/s of the memory that holds the weights; unset: a copy's")
    for setting in LLAMA_SETTINGS:
        count = "+" if setting.is_list else None
        llama.add_argument(setting.flag_name, dest=setting.key, nargs=count, help=setting.help)
    arguments = parser.parse_args(argv)
    if arguments.engine == LLAMA and arguments.model is None:
        parser.error("--engine llama needs --model FILE.gguf")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write a report."""
    try:
        print(run(_arguments(argv)))
    except PacelineError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
