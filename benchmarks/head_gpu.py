"""The fused divergence head against its floor: the matmuls alone, timed in the same run.

From bfloat16 hidden states and heads to the gradients of both, on random data, for shapes of
Qwen3-8B, 0.6B, 1.7B and SmolLM2-135M. Every time is a multiple of

    floor      logits of student and teacher, gradient by hidden states, gradient by the head:
               four matmuls (three for a frozen head), the whole shape at once, nothing else

    ours       `fused_linear_divergence`, the zeroing of the head's float32 gradient included
    plain      whole logits, log_softmax, autograd
    liger      Liger's chunked loss, where `liger_kernel` can be imported, compiled as it comes

Before a shape is timed, gradients of its first rows are compared with float64; an error that is too
large is printed, stored and ends the command with status 1 after everything was timed. Times are
medians; memory is the allocator's peak above the inputs, and above inputs and gradients. A GPU gets
slower while it gets warm, so the floor is timed before and after each of the others, and the mean
of the two is what that one is compared with.

Liger's compilations come last and take most of the time: those that would begin after `--seconds`
are left out, with a message.

    python benchmarks/head_gpu.py                      # all shapes, about two minutes
    python benchmarks/head_gpu.py --shapes qwen3-8b --no-liger
    TRITON_INTERPRET=1 python benchmarks/head_gpu.py --device cpu --backend triton --shapes tiny \\
        --liger-eager                                  # a dry run of all of it
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from gpu_machine import Clock, header
from gpu_peaks import free_memory
from head_cases import (
    KINDS,
    MORE_KINDS,
    SHAPES,
    Inputs,
    errors_of,
    far_rows_error,
    gradient_bytes,
    liger,
    make_inputs,
    matmuls,
    runs,
    too_far,
)
from workload import BENCHMARKS, GIB, SEED, store

from courtside.losses.fused.linear_divergence import plan_chunks

TARGETS = {"qwen3-8b": 1.20, "qwen3-0.6b": 1.50}
"""Over the floor, of these."""
JUDGED = tuple(f"ours, {name}" for name in KINDS)
LIGER_CHUNKS = (1024, 4096)


def checked(inputs: Inputs, *, more: bool) -> tuple[dict[str, Any], list[str]]:
    """`more`: also the kinds that are not timed; each takes kernels of its own."""
    vocab_size = len(inputs.student.weight_VD)
    kinds = {
        name: kind
        for name, kind in {**KINDS, **(MORE_KINDS if more else {})}.items()
        if kind.support is None or kind.support.k < vocab_size
    }
    errors = errors_of(inputs, kinds)
    for name, error in errors.items():
        differences = ", ".join(f"{what} {value:.1e}" for what, value in error.items())
        print(f"  off by: {differences}: {name}")
    wrong = too_far(errors)
    if wrong:
        print(f"  WRONG: not as close to float64 as bfloat16 allows: {wrong}")
    return errors, wrong


def timed(clock: Clock, label: str, floor: Any, gradients: int, run: Any) -> dict[str, Any]:
    floors = [clock.measure(floor)["ms"]]
    try:
        timing = clock.measure(run)
    except torch.OutOfMemoryError:
        print(f"  {label}: out of memory", flush=True)
        return {"name": label, "out_of_memory": True}
    floors.append(clock.measure(floor)["ms"])
    row = {"name": label, "ratio": timing["ms"] / mean(floors), "floors_ms": floors, **timing}
    if timing["peak_gib"] is not None:
        row["peak_above_gradients_gib"] = timing["peak_gib"] - gradients / GIB
    print(f"  {line(row)}", flush=True)
    return row


def line(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return f"out of memory: {row['name']}"
    memory = ""
    if row["peak_gib"] is not None:
        memory = (f", {row['peak_gib']:.2f} GiB above inputs, "
                  f"{row['peak_above_gradients_gib']:.2f} above gradients too")  # fmt: skip
    return f"{row['ratio']:.2f} x floor, {row['ms']:.2f} ms{memory}: {row['name']}"


def run_shape(name: str, args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    shape = SHAPES[name]
    print(f"{name}: {shape[0]} rows, hidden size {shape[1]}, vocabulary {shape[2]}", flush=True)
    inputs = make_inputs(shape, clock.device, args.backend)
    plan = plan_chunks(inputs.student, teacher=True, trained=True)
    print(f"  {plan}")
    errors, wrong = checked(inputs, more=name == args.shapes[0])
    free_memory(clock.device.type)
    floors = {name: matmuls(inputs, trained=name == "trained") for name in ("trained", "frozen")}
    rows = []
    for label, (floor, gradients, run) in runs(inputs).items():
        free_memory(clock.device.type)
        rows.append(timed(clock, label, floors[floor], gradients, run))
    all_ms = [ms for row in rows for ms in row.get("floors_ms", ())]
    print(f"  floors: {min(all_ms):.2f} to {max(all_ms):.2f} ms", flush=True)
    return {"shape": shape, "backend": inputs.backend, "plan": str(plan), "errors": errors,
            "wrong": wrong, "rows": rows}  # fmt: skip


def run_liger(
    name: str, chunk: int, args: argparse.Namespace, clock: Clock
) -> dict[str, Any] | None:
    label = f"liger, chunk {chunk}, reverse KL"
    run = liger(chunk, compiled=not args.liger_eager)
    if run is None:
        print("liger: `liger_kernel` cannot be imported. Put it on PYTHONPATH to have it measured")
        return None
    if clock.elapsed > args.seconds:
        print(f"{name}: {label}: left out, --seconds {args.seconds} have passed")
        return {"name": label, "left_out": True}
    print(name)
    torch._dynamo.reset()  # else the second shape would be compiled for any shape
    inputs = make_inputs(SHAPES[name], clock.device, args.backend)
    gradients = gradient_bytes(inputs, narrow=True)
    try:
        return timed(clock, label, matmuls(inputs), gradients, partial(run, inputs))
    except RuntimeError as error:  # ours are measured already, and stay
        print(f"  {label}: failed: {type(error).__name__}: {str(error)[:500]}")
        return {"name": label, "failed": str(error)}


def summary(shapes: dict[str, Any]) -> None:
    print("\nsummary: multiples of the matmuls alone")
    for name, shape in shapes.items():
        for row in shape["rows"]:
            if "ratio" not in row:
                continue
            target = TARGETS.get(name) if row["name"] in JUDGED else None
            verdict = ""
            if target is not None:
                verdict = f" (target {target:.2f}: {'met' if row['ratio'] <= target else 'MISSED'})"
            print(f"{name}: {line(row)}{verdict}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES)[:4])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=("torch", "triton"), help="unset: as it is chosen")
    parser.add_argument("--no-liger", action="store_true")
    parser.add_argument("--liger-eager", action="store_true", help="without torch.compile")
    parser.add_argument("--seconds", type=float, default=120, help="after which no Liger is begun")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "head_gpu.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    clock = Clock(device, warmup=args.warmup, repeats=args.repeats)
    shapes: dict[str, Any] = {}
    result = {**header("head_gpu", device), "seed": SEED, "shapes": shapes}

    def store_so_far() -> None:
        result["seconds"] = clock.elapsed
        store(args.out, result)  # what there is, if time runs out

    wrong = []
    if device.type == "cuda":
        error = result["far_rows_off"] = far_rows_error(device)
        print(f"rows past 2^31 logits: off by {error:.1e}")
        wrong += [] if error < 1e-2 else ["rows past 2^31 logits"]
        free_memory(clock.device.type)
    for name in args.shapes:
        shapes[name] = run_shape(name, args, clock)
        wrong += [f"{name}: {kind}" for kind in shapes[name]["wrong"]]
        store_so_far()
    # All shapes in its smaller chunks before any in larger ones, should time run out.
    for chunk in () if args.no_liger else LIGER_CHUNKS:
        for name in args.shapes:
            row = run_liger(name, chunk, args, clock)
            shapes[name]["rows"] += [] if row is None else [row]
            store_so_far()
    summary(shapes)
    print(f"{clock.elapsed:.0f} s in all; results in {args.out}")
    if wrong:
        sys.exit(f"too far from float64: {wrong}")


if __name__ == "__main__":
    main()
