"""The fused divergence head against its floor: the matrix products alone, timed in the same run.

Reverse KL over all words from bfloat16 hidden states and heads to the gradients of both, on random
data. Shapes (rows, hidden size, words): those of Qwen3-8B, Qwen3-0.6B and SmolLM2-135M.

    floor      logits of student and teacher, gradient by hidden states, gradient by the head:
               four matrix products, the whole shape at once, nothing else
    ours       `divergence_head`, the zeroing of the head's float32 gradient included
    plain      whole logits, log_softmax, autograd
    liger      Liger's chunked loss, where `liger_kernel` can be imported

Before anything is timed, gradients of the first rows are compared with float64. Each time is a
median; memory is the allocator's peak above the inputs, and above inputs and gradients.

    python benchmarks/head_gpu.py                      # everything, a few minutes
    python benchmarks/head_gpu.py --shapes qwen3-8b --only ours liger
    TRITON_INTERPRET=1 python benchmarks/head_gpu.py --device cpu --backend triton --shapes tiny \\
        --liger-eager                                  # a dry run of all of it
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from head_variants import (
    REVERSE,
    SHAPES,
    Inputs,
    check,
    check_far_rows,
    make_inputs,
    products,
    variants,
)
from opd_step import GIB, HERE, commit, hardware
from workload import SEED

from courtside.losses import fused
from courtside.losses.fused import make_plan
from courtside.losses.fused_records import Raw

TILINGS = [
    {"num_warps": warps, "lanes_per_thread": lanes}
    for warps in (4, 8, 16, 32) for lanes in (1, 2)
]  # fmt: skip


# ── the clock ────────────────────────────────────────────────────────────────────────────────────


class Clock:
    def __init__(self, device: torch.device, *, warmup: int, repeats: int):
        self.device, self.warmup, self.repeats = device, warmup, repeats

    def measure(
        self, run: Callable[[], Any], *, before: Callable[[], Any] | None = None
    ) -> dict[str, Any]:
        """Times in milliseconds and, on a GPU, the peak of memory above what was there."""
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
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

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


# ── one shape ────────────────────────────────────────────────────────────────────────────────────


def tune(inputs: Inputs, clock: Clock) -> list[dict[str, Any]]:
    """The kernel alone on one part, in several layouts; the best one is used from here on."""
    from courtside.losses import fused_triton

    plan = make_plan(inputs.student, teacher=True, trained=True)
    few = inputs.first(plan.part)
    logits = [side.hidden_ND @ side.weight_VD.t() for side in (few.student, few.teacher)]
    student_NV = torch.empty_like(logits[0])
    asked, rows = few.asked(REVERSE), []
    launch = fused_triton.words_in_triton
    for options in TILINGS:
        tiling = fused_triton.Tiling(**options)

        def run(tiling: Any = tiling) -> None:
            sides = (
                Raw(values_NV=values_NV, scale=1.0, softcap=None)
                for values_NV in (student_NV, logits[1])
            )
            launch(*sides, asked, slice(0, len(student_NV)), tiling=tiling)

        found = clock.measure(run, before=lambda: student_NV.copy_(logits[0]))
        moved = 5 * student_NV.numel() * student_NV.element_size()
        rows.append({**options, "ms": found["ms"], "gb_per_s": moved / found["ms"] / 1e6})
        print(f"  kernel, {options}: {found['ms']:.3f} ms, {rows[-1]['gb_per_s']:.0f} GB/s")
    best = min(rows, key=lambda row: row["ms"])
    best_tiling = fused_triton.Tiling(**{k: best[k] for k in TILINGS[0]})
    fused_triton.words_in_triton = partial(launch, tiling=best_tiling)  # type: ignore[assignment]
    print(f"  best: {best_tiling}; what ships: {fused_triton.TILING}")
    return rows


def run_shape(name: str, args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    shape = SHAPES[name]
    print(f"{name}: {shape[0]} rows, hidden size {shape[1]}, {shape[2]} words", flush=True)
    inputs = make_inputs(shape, clock.device, args.backend)
    result: dict[str, Any] = {"shape": shape, "backend": inputs.backend, "errors": check(inputs)}
    if inputs.backend == "triton" and "tune" in args.only:
        result["tilings"] = tune(inputs, clock)
    floors = {}
    for floor, sides in (("four", {}), ("frozen", {"trained": False}),
                         ("sampled", {"teacher": False})):  # fmt: skip
        run = products(inputs, **sides)
        floors[floor] = clock.measure(run)["ms"]
        del run
        print(f"  floor, {floor}: {floors[floor]:.2f} ms", flush=True)
    result["floors_ms"], result["rows"] = floors, []
    for label, (floor, gradients, run) in variants(
        inputs, args.only, compiled=not args.liger_eager
    ).items():
        try:
            found = clock.measure(run)
        except torch.cuda.OutOfMemoryError:
            print(f"  {label}: out of memory", flush=True)
            result["rows"].append({"name": label, "out_of_memory": True})
            continue
        row = {"name": label, "floor": floor, "ratio": found["ms"] / floors[floor], **found}
        if found["peak_gib"] is not None:
            row["peak_above_gradients_gib"] = found["peak_gib"] - gradients / GIB
        result["rows"].append(row)
        print(f"  {_line(row)}", flush=True)
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
    result["plan"] = str(make_plan(inputs.student, teacher=True, trained=True))
    # Twice, first and last: how far the clock itself moved.
    result["floor_again_ms"] = clock.measure(products(inputs))["ms"]
    print(f"  floor again: {result['floor_again_ms']:.2f} ms", flush=True)
    return result


def _line(row: dict[str, Any]) -> str:
    memory = ""
    if row["peak_gib"] is not None:
        memory = (f", {row['peak_gib']:.2f} GiB above inputs, "
                  f"{row['peak_above_gradients_gib']:.2f} above gradients too")  # fmt: skip
    return f"{row['ratio']:.2f} x floor, {row['ms']:.2f} ms{memory}: {row['name']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ("tune", "ours", "torch", "plain", "liger")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES)[:3])
    parser.add_argument("--only", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=("torch", "triton"), help="unset: as it is chosen")
    parser.add_argument("--liger-eager", action="store_true", help="without torch.compile")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "head_gpu.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    clock = Clock(device, warmup=args.warmup, repeats=args.repeats)
    machine = hardware()
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    result = {
        "benchmark": "head_gpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "hardware": machine,
        "torch": torch.__version__,
        "seed": SEED,
        "budget_bytes": fused.CUDA_BYTES if device.type == "cuda" else fused.CPU_BYTES,
        "shapes": {},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        result["far_rows_off"] = check_far_rows(device)
        torch.cuda.empty_cache()
    for name in args.shapes:
        result["shapes"][name] = run_shape(name, args, clock)
        args.out.write_text(json.dumps(result, indent=1) + "\n")  # what there is, if time runs out
    print("\nsummary (times are multiples of the matrix products alone)")
    for name, shape in result["shapes"].items():
        for row in shape["rows"]:
            if "ratio" in row:
                print(f"{name}: {_line(row)}")


if __name__ == "__main__":
    main()
