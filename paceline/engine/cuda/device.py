"""What a process asks of a GPU beside its steps: kernels, a share of the memory, caches emptied.

On other devices each function does nothing, or is not asked.
"""

from __future__ import annotations

import gc

import torch

from paceline.protocol.errors import require


def choose_kernels(device: torch.device, *, shapes_grow: bool) -> None:
    """Set, for the process, which of the library's kernels an engine may use.

    Parts of a sum are never added in bfloat16: how a product is divided into parts depends on the number of rows.

    `shapes_grow`: attention has ever new lengths. cuDNN makes a plan for each, tens of milliseconds on the host.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        if shapes_grow:
            torch.backends.cuda.enable_cudnn_sdp(False)


def share_left(device: torch.device, utilization: float) -> int:
    """Bytes that this process may still take of a GPU: its share of the memory, less what it has.

    What other processes have is no part of it, so services on one GPU may start in any order.

    Raises:
        InvalidInput: so much is not free; naming what is.
    """
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    rest = int(utilization * total) - own
    limit = (
        f"at most {(free + own) / total:.3f}: of {total} bytes this process has {own}, and {free} are free; "
        "the shares of all processes on one GPU, with room for their contexts, add up to less than 1"
    )
    require(rest <= free, "gpu_memory_utilization", utilization, limit)
    return rest


def empty_caches(device: torch.device) -> None:
    """Give memory of dropped tensors back to the device: the library keeps it, in pieces that fit nothing else."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
