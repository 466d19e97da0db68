"""Which layout of the kernel and which chunks are fastest: to choose what ships, shape by shape.

    kernel     reverse KL and JSD on one part of the logits, in several layouts; bytes moved per
               second with the time (five passes over a row of each side, seven for JSD)
    selection  the most likely tokens of a part, by the kernel in several layouts, `torch.topk`
    support    top 64 with tail, the whole head: the device's time and the host's
    chunks     the whole head in several chunks and parts, with the memory each takes

What ships is marked. Nothing begins after `--seconds`.

    python benchmarks/head_variants.py                         # less than 40 s
    python benchmarks/head_variants.py --only support selection
    TRITON_INTERPRET=1 python benchmarks/head_variants.py --device cpu --backend triton \\
        --shapes tiny                                          # a dry run
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_machine import BENCHMARKS, Clock, header
from head_cases import KINDS, REVERSE, SHAPES, Inputs, make_inputs, matmuls, ours

from courtside.losses.fused.linear_divergence import ChunkPlan, plan_chunks
from courtside.losses.fused.types import RawLogits

TILINGS = [(warps, lanes) for lanes in (1, 2) for warps in (4, 8, 16, 32)]
PASSES = {"reverse KL": 5, "JSD 0.5": 7}
WHAT = ("support", "selection", "chunks", "kernel")
SELECTED = 64
SELECTIONS = (4, 8, 16)
PLANS = [(1024, 1024), (1536, 384), (2048, 256), (2048, 512), (4096, 384), (4096, 512),
         (4096, 1024), (8192, 512)]  # fmt: skip


def kernel(inputs: Inputs, kind: str, clock: Clock, seconds: float) -> list[dict[str, Any]]:
    """The pass over the vocabulary alone, on one part."""
    from courtside.losses.fused import triton_backend

    part = plan_chunks(inputs.student, teacher=True, trained=True).part
    few = inputs.first(part)
    logits = [side.hidden_ND @ side.weight_VD.t() for side in (few.student, few.teacher)]
    student_NV = torch.empty_like(logits[0])
    spec, rows = few.spec(KINDS[kind]), []
    for warps, lanes in TILINGS:
        if clock.elapsed > seconds:
            print(f"  the rest of the layouts: left out, --seconds {seconds} have passed")
            break
        tiling = triton_backend.Tiling(num_warps=warps, lanes_per_thread=lanes)

        def run(tiling: Any = tiling) -> None:
            student, teacher = (
                RawLogits(values_NV=values_NV, scale=1.0, softcap=None)
                for values_NV in (student_NV, logits[1])
            )
            whole = slice(0, len(student_NV))
            one_pass = triton_backend.TritonVocabularyPass(student, spec, whole, tiling=tiling)
            one_pass.run_part(whole, teacher)
            one_pass.finish()

        timing = clock.measure(run, before=lambda: student_NV.copy_(logits[0]))
        num_bytes = PASSES[kind] * student_NV.numel() * student_NV.element_size()
        row = {"kind": kind, "num_warps": warps, "lanes_per_thread": lanes, "ms": timing["ms"],
               "gb_per_s": num_bytes / timing["ms"] / 1e6}  # fmt: skip
        rows.append(row)
        ships = " <- ships" if tiling == triton_backend.TILING else ""
        print(f"  {kind}, {part} rows, {warps} warps, {lanes} lanes a thread: {row['ms']:.3f} ms, "
              f"{row['gb_per_s']:.0f} GB/s{ships}", flush=True)  # fmt: skip
    return rows


def selection(inputs: Inputs, clock: Clock, seconds: float) -> list[dict[str, Any]]:
    """The 64 most likely tokens of one side of one part: by the kernel in several layouts, and by
    `torch.topk`."""
    from courtside.losses.fused import triton_backend
    from courtside.losses.fused.topk_kernels import (
        allocate_group_maxima,
        allocate_top_k,
        num_select_warps,
        select_top_k,
    )

    part = plan_chunks(inputs.student, teacher=True, trained=True).part
    few = inputs.first(part)
    logits_NV = few.student.hidden_ND @ few.student.weight_VD.t()
    buffers = allocate_top_k(len(logits_NV), SELECTED, logits_NV.device)
    width = 16 // logits_NV.element_size()
    rows = []
    for warps in SELECTIONS:
        if num_select_warps(logits_NV.shape[1], SELECTED, least=warps, width=width) != warps:
            continue
        if clock.elapsed > seconds:
            print(f"  the rest of the selections: left out, --seconds {seconds} have passed")
            break

        maxima_NG = allocate_group_maxima(logits_NV, lanes=32 * warps, width=width)
        padding = (0, width * maxima_NG.shape[1] - logits_NV.shape[1])
        padded_NV = torch.nn.functional.pad(logits_NV, padding, value=float("-inf"))
        maxima_NG.copy_(padded_NV.view(*maxima_NG.shape, width).amax(-1))

        def run(maxima_NG: torch.Tensor = maxima_NG, warps: int = warps) -> None:
            select_top_k(logits_NV, logits_NV, maxima_NG, buffers, lanes=32 * warps, width=width,
                 num_warps=warps)  # fmt: skip

        took = clock.measure(run, before=buffers.counts_N3.zero_)
        ships = " <- ships" if warps == triton_backend.TILING.num_warps else ""
        rows.append({"by": f"kernel, {warps} warps{ships}", "ms": took["ms"]})
    by_torch = clock.measure(lambda: logits_NV.topk(SELECTED, dim=-1))
    rows.append({"by": "torch.topk", "ms": by_torch["ms"]})
    for row in rows:
        print(f"  top {SELECTED} of {part} rows: {row['ms']:.3f} ms by {row['by']}", flush=True)
    return rows


def support(inputs: Inputs, clock: Clock) -> dict[str, Any]:
    """Top 64 with tail: what the device works, and what the host takes to ask for it. Where the
    second is longer, the device waits."""

    def run() -> None:
        ours(inputs, KINDS["top 64, tail"])

    timing = clock.measure(run)
    asking = []
    for _ in range(5):
        if clock.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        asking.append((time.perf_counter() - start) * 1000)
    row = {"ms": timing["ms"], "host_ms": median(asking)}
    print(f"  top {SELECTED}, tail: {row['ms']:.2f} ms, of which the host asks for "
          f"{row['host_ms']:.2f} ms", flush=True)  # fmt: skip
    return row


def chunks(inputs: Inputs, clock: Clock, seconds: float) -> list[dict[str, Any]]:
    floor = clock.measure(matmuls(inputs))["ms"]
    chosen = plan_chunks(inputs.student, teacher=True, trained=True)
    plans = [chosen] + [
        plan
        for chunk, part in PLANS
        if chunk <= len(inputs.ids_N) and (plan := ChunkPlan(chunk=chunk, part=part)) != chosen
    ]
    rows = []
    for plan in plans:
        if clock.elapsed > seconds:
            print(f"  the rest of the chunks: left out, --seconds {seconds} have passed")
            break
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
        timing = clock.measure(lambda plan=plan: ours(inputs, REVERSE, plan=plan))
        row = {"chunk": plan.chunk, "part": plan.part, "ratio": timing["ms"] / floor, **timing}
        rows.append(row)
        memory = "" if row["peak_gib"] is None else f", {row['peak_gib']:.2f} GiB above inputs"
        ships = " <- ships" if plan == chosen else ""
        print(f"  chunks of {plan.chunk}, parts of {plan.part}: {row['ratio']:.2f} x floor, "
              f"{row['ms']:.2f} ms{memory}{ships}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES)[:4])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=("torch", "triton"), help="unset: as it is chosen")
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--seconds", type=float, default=30, help="after which nothing is begun")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "head_variants.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    clock = Clock(device, warmup=1, repeats=5)
    result: dict[str, Any] = {**header("head_variants", device), "shapes": {}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.shapes:
        if clock.elapsed > args.seconds:
            print(f"{name}: left out, --seconds {args.seconds} have passed")
            continue
        print(f"{name}: {SHAPES[name]}", flush=True)
        inputs = make_inputs(SHAPES[name], device, args.backend)
        variants: dict[str, Any] = {"shape": SHAPES[name]}
        if "support" in args.only:
            variants["support"] = support(inputs, clock)
        if inputs.backend == "triton" and "selection" in args.only:
            variants["selection"] = selection(inputs, clock, args.seconds)
        if "chunks" in args.only:
            variants["chunks"] = chunks(inputs, clock, args.seconds)
        if inputs.backend == "triton" and "kernel" in args.only:
            variants["kernel"] = [
                row for kind in PASSES for row in kernel(inputs, kind, clock, args.seconds)
            ]
        result["shapes"][name] = variants
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        del inputs
    print(f"{clock.elapsed:.0f} s in all; results in {args.out}")


if __name__ == "__main__":
    main()
