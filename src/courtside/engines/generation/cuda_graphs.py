"""CUDA graph capture and replay of a step: one launch instead of a thousand.

A capture records launches only, so everything that a step does once (compiling and loading Triton
kernels, cuBLAS workspaces) must have happened before: the step runs eagerly first, on its own
buffers. A step whose capture fails runs eagerly from then on; later captures are not affected.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from warnings import warn

import torch
from torch import Tensor

WARMUP_STEPS = 2


class StepGraph:
    """A step, captured on its first run and replayed from then on. `graphs` None: always eager."""

    def __init__(self, graphs: CudaGraphs | None):
        self._graphs = graphs
        self._graph: Any = None

    def run(self, step: Callable[[], None], state: Sequence[Tensor] = ()) -> None:
        """`state`: the tensors that steps advance, restored after warm-up and capture. KV cache
        entries that warm-up steps append are overwritten by the first replay with equal ones."""
        if self._graphs is not None:
            self._graph = _capture_or_warn(self._graphs, step, state)
            self._graphs = None
        if self._graph is None:
            step()
        else:
            self._graph.replay()


def _capture_or_warn(graphs: CudaGraphs, step: Callable[[], None], state: Sequence[Tensor]) -> Any:
    saved = [tensor.clone() for tensor in state]
    try:
        return graphs.capture(step)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Ending a failed capture raises again; the error inside the step is the one that says why.
        cause = str(error.__context__ or error)
        warn(f"CUDA graph capture failed, the step runs eagerly: {cause}", stacklevel=4)
        return None
    finally:
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)


class CudaGraphs:
    """Captures steps into graphs that share one memory pool.

    torch gives up a pool when the last of its graphs is gone, and a capture into it fails from then
    on. Graphs go with their KV caches, wherever these are dropped, so a capture asks what is left.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: Any = None
        self._stream: Any = None

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Raises what the step or its capture raises, with the device ready for the next one."""
        for _ in range(WARMUP_STEPS):
            step()
        with suppress(torch.OutOfMemoryError):
            return self._capture(step)
        torch.cuda.empty_cache()  # the allocator cannot do so by itself during a capture
        return self._capture(step)

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self._stream = self._stream or torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with _pause_gc():  # which might take the last graph of the pool
            if not self._graphs:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                with _record(graph, self._stream, self._pool):
                    step()
            except BaseException:
                _clean_up_failed_capture(self._pool, self._stream)
                self._graphs.clear()  # later captures are not into this pool
                raise
        self._graphs.add(graph)
        return graph


@contextmanager
def _record(graph: torch.cuda.CUDAGraph, stream: Any, pool: Any = None) -> Iterator[None]:
    """`torch.cuda.graph` without its `empty_cache`: all memory that is allocated after a rollout
    would have to be asked of the driver again."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@contextmanager
def _pause_gc() -> Iterator[None]:
    """A collection may destroy a dead CUDA graph or unload a Triton kernel: CUDA permits neither
    during a capture and invalidates it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _clean_up_failed_capture(pool: Any, stream: Any) -> None:
    """What `CUDAGraph.capture_end` leaves undone when CUDA has invalidated the capture."""
    functions: Any = torch._C
    device = torch.cuda.current_device()
    try:
        functions._cuda_endAllocateToPool(device, pool)
        functions._cuda_releasePool(device, pool)
    except RuntimeError:
        pass  # not recording: the capture itself has ended, or a later torch has cleaned up
    # The default generator stays in capture mode until some capture ends properly.
    with _pause_gc(), _record(torch.cuda.CUDAGraph(), stream):
        torch.zeros(1, device="cuda")
