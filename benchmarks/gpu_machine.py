"""Shared by benchmarks in one process: options, the header of results, time and memory."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from workload import BENCHMARKS, GIB, SEED, StepTimer, peak_rss, provenance


def machine(device: torch.device) -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / GIB, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return hardware


def header(benchmark: str, device: torch.device) -> dict[str, Any]:
    """The first fields of every result, with hardware and versions."""
    versions = {}
    for name in ("torch", "triton", "transformers", "peft", "liger-kernel"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        **provenance(benchmark),
        "hardware": machine(device),
        "versions": versions,
    }


def about(benchmark: str, args: argparse.Namespace) -> dict[str, Any]:
    """`header` and the settings: to be called before anything is computed, because of the load."""
    return {
        **header(benchmark, torch.device(args.device)),
        "load_before": os.getloadavg()[0],
        "seed": SEED,
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "dtype": "bfloat16" if args.device == "cuda" else "float32",
    }


def model_parser(doc: str | None, *, models: Sequence[str]) -> argparse.ArgumentParser:
    """The options of benchmarks on one model, for `parse_model_args`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=models, default=models[0])
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights are trained")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser


def parse_model_args(parser: argparse.ArgumentParser, benchmark: str) -> argparse.Namespace:
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out = args.out or BENCHMARKS / "results" / f"{benchmark}_{args.device}.json"
    return args


def time_call(call: Callable[[], Any], device: torch.device) -> float:
    """Wall seconds until the device is done."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    timer = StepTimer()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return timer.lap()["seconds"]


def measure_call(call: Callable[[], Any], device: torch.device) -> tuple[Any, dict[str, float]]:
    """The result, with wall and CPU seconds and, on a GPU, the peak of memory and its rise."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    timer = StepTimer()
    result = call()
    if on_gpu:
        torch.cuda.synchronize()
    row = timer.lap()
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
        row |= {"peak_gib": peak / GIB, "memory_gib": (peak - held) / GIB}
    return result, row


def rise_of_rss(call: Callable[[], Any]) -> int:
    """Bytes that resident memory rises by, at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = peak_rss()
    call()
    return peak_rss() - before


class Clock:
    """Medians of device time; on a CPU, of wall time."""

    def __init__(self, device: torch.device, *, warmup: int, repeats: int):
        self.device, self.warmup, self.repeats = device, warmup, repeats
        self.started = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since this clock was made."""
        return time.perf_counter() - self.started

    def measure(
        self, run: Callable[[], Any], *, before: Callable[[], Any] | None = None
    ) -> dict[str, Any]:
        """Milliseconds and, on a GPU, the peak of memory above what was there."""
        times = []
        for repeat in range(self.warmup + self.repeats):
            if before:
                before()
            seconds = self._once(run)
            times += [seconds * 1000] if repeat >= self.warmup else []
        return {"ms": median(times), "all_ms": times, "peak_gib": self._peak(run, before)}

    def _once(self, run: Callable[[], Any]) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1000

    def _peak(self, run: Callable[[], Any], before: Callable[[], Any] | None) -> float | None:
        if self.device.type == "cpu":
            return None
        if before:
            before()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - held) / GIB
