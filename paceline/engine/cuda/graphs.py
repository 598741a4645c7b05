"""Everything that needs CUDA itself: uploads that wait for nothing, the one synchronisation of a step, and graphs.

On other devices the same functions do the same work at once, which is how everything else is tested.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

MAX_GRAPHS = 192
"""Shapes that have a graph, or will have one when they come again. Chosen, not tuned; bounds `static_bytes`."""


def upload(array: NDArray[Any], device: torch.device, out: torch.Tensor | None = None) -> torch.Tensor:
    """Bring an array to a device without waiting for it; `out` takes it at an address that stays."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        # Page-locked memory comes from torch's own cache, which gives none back before its copy has ended.
        host = host.pin_memory()
    if out is None:
        return host.to(device, non_blocking=True)
    return out.copy_(host, non_blocking=True)


def download(tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Bring tensors to the host; waits once for all of them. Valid until the next step."""
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for host, tensor in zip(hosts, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [host.numpy() for host in hosts]


def host_buffer(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that a device writes asynchronously; its contents are valid after a download."""
    return torch.empty(*size, dtype=dtype, pin_memory=device.type == "cuda")


class StepRunner:
    """Runs every step as it is."""

    def run(self, shape: Hashable, body: Callable[[], None]) -> None:
        """Run `body`, a function of buffers whose addresses stay, and of the shape alone."""
        body()


class GraphRunner(StepRunner):
    """Runs a shape as it is the first time, and from then on as a CUDA graph.

    The first run is the warm-up that a capture needs: libraries load kernels and take their workspaces then, for the
    calling thread, so all runs must be on one. The least recently used shape makes way for a new one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph | None] = OrderedDict()
        self._thread: int | None = None
        self.captures = 0
        """Graphs captured so far, those that have made way included."""

    @property
    def graphs(self) -> int:
        """Graphs that are there."""
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, shape: Hashable, body: Callable[[], None]) -> None:
        """Replay the shape's graph; where there is none, run `body`, capturing it the second time.

        Raises:
            RuntimeError: the body can't be captured, for example since it waits for the device; or another thread ran
                the one before.
        """
        thread = threading.get_ident()
        if thread != (self._thread or thread):
            raise RuntimeError("steps of one engine on two threads: each would make library handles of its own")
        self._thread = thread
        if shape not in self._graphs:
            # Nothing of the device runs now: every step has been downloaded before the next begins.
            if len(self._graphs) >= MAX_GRAPHS:
                self._graphs.popitem(last=False)
            self._graphs[shape] = None
            self._run_on_stream(body)
            return
        graph = self._graphs[shape] or self._capture(body)
        self._graphs[shape] = graph
        self._graphs.move_to_end(shape)
        graph.replay()

    def _capture(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Another thread of this process may use the device meanwhile: a capture must not forbid it that.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            body()
        self.captures += 1
        logger.debug("graph captured: captures=%d graphs=%d", self.captures, self.graphs + 1)
        return graph

    def _run_on_stream(self, body: Callable[[], None]) -> None:
        """Run on the stream that captures use, after what the current stream has and before what follows there."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            body()
        current.wait_stream(self._stream)


def runner_for(device: torch.device, *, graphs: bool) -> StepRunner:
    """The runner for a device."""
    return GraphRunner(device) if graphs and device.type == "cuda" else StepRunner()
