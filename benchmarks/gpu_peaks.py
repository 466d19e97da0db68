"""High-water marks of a GPU's memory by phase, for both sides of a comparison alike."""

from __future__ import annotations

import gc
import sys

import torch


class Peaks:
    """On a CPU nothing is measured."""

    def __init__(self, device: str):
        self.on_gpu = device == "cuda"
        self._peaks: dict[str, int] = {}
        self._allocs = 0
        self.begin()

    def begin(self) -> None:
        """Forget what was before."""
        self.fence()
        self._peaks = {}
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._allocs = _device_allocs()

    def fence(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def close(self, phase: str) -> None:
        """What was reached since the last call belongs to `phase`."""
        self.fence()
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated()
            self._peaks[phase] = max(peak, self._peaks.get(phase, 0))
            torch.cuda.reset_peak_memory_stats()

    def take(self) -> dict[str, int]:
        """Bytes by phase since the last call. Memory that CUDA graphs work in is in all of them:
        the allocator counts it as free, and nobody else can have it."""
        peaks, self._peaks = self._peaks, {}
        hidden = hidden_in_graphs() if self.on_gpu else 0
        return {phase: peak + hidden for phase, peak in peaks.items()}

    def take_allocs(self) -> int:
        """How often the driver was asked for memory since the last call."""
        if not self.on_gpu:
            return 0
        before, self._allocs = self._allocs, _device_allocs()
        return self._allocs - before


def hidden_in_graphs() -> int:
    """Bytes in private pools of CUDA graphs that no live tensor accounts for."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def _device_allocs() -> int:
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def wait_for_go() -> None:
    """Imports are done; the GPU belongs to another process until the driver sends `go`."""
    if sys.stdin.readline().strip() != "go":
        raise SystemExit("the driver ended before it was this process' turn")
