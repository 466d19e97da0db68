"""What benchmarks on a GPU have in common: options, what results say first, and the clock."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from workload import SEED

BENCHMARKS = Path(__file__).resolve().parent
GIB = 2**30


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
    """What every result says first."""
    versions = {}
    for name in ("torch", "triton", "transformers", "peft", "liger-kernel"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
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


def store(out: Path, result: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def model_parser(doc: str | None, *, models: Sequence[str]) -> argparse.ArgumentParser:
    """The options of benchmarks on one model; `parsed` reads them."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=models, default=models[0])
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights are trained")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser


def parsed(parser: argparse.ArgumentParser, benchmark: str) -> argparse.Namespace:
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out = args.out or BENCHMARKS / "results" / f"{benchmark}_{args.device}.json"
    return args


def commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "no git here"
    command = [git, "-C", str(BENCHMARKS), "describe", "--always", "--dirty", "--abbrev=12"]
    description = subprocess.run(command, capture_output=True, text=True, check=False)
    return description.stdout.strip() or "not a checkout"


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
