"""Distillation steps of several shapes and settings on a GPU, to hold `courtside plan` to.

The job is that of `opd_step_gpu.py` (64 prompts of 128 tokens, 4 samples of 512, reverse KL over
the whole vocabulary, random weights), courtside's side alone, one process a case.

    python benchmarks/plan_steps.py --out FILE                       # minutes on an H200
    python benchmarks/plan_steps.py --out FILE --cases 8b-lora-lean  # one case
    python benchmarks/plan_steps.py --out FILE --tiny                # everything small, on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opd_step_gpu import LEAN
from opd_step_job import FULL, TINY, Job, write_folder
from workload import REPOSITORY, store

SMALL_PASSES = "train.micro_batch_tokens=8192"
"""Activations of 16,384 tokens of a 4B model do not fit beside its optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: str
    overrides: tuple[str, ...] = ()


CASES = {
    "1.7b-lora": Case(shape="1.7b", overrides=("student.lora.rank=32",)),
    "4b": Case(shape="4b", overrides=(SMALL_PASSES,)),
    "4b-lean": Case(shape="4b", overrides=LEAN),
    "4b-lora": Case(shape="4b", overrides=("student.lora.rank=32",)),
    "8b-lora": Case(shape="8b", overrides=("student.lora.rank=32", SMALL_PASSES)),
    "8b-lora-lean": Case(
        shape="8b", overrides=("student.lora.rank=32", "student.gradient_checkpointing=true")
    ),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One case in this process."""
    import torch
    from courtside_gpu_side import GpuRun, assemble_random, recipe
    from courtside_side import TimedRun

    from courtside.engines.forward.batching import default_pass_tokens
    from courtside.loop import train_loop
    from courtside.report.folder.folder import RunFolder

    case, job = CASES[args.case], make_job(args)
    with tempfile.TemporaryDirectory(prefix="plan-steps-") as name:
        work = Path(name)
        folder = work / "job"
        folder.mkdir()
        write_folder(folder, job, "tiny" if args.tiny else case.shape)
        args.side, args.set, args.steps = "courtside", list(case.overrides), 1
        parsed = recipe(job, folder, args, work)
        with RunFolder.open(work / "run", parsed) as run_folder:
            parts = assemble_random(parsed)
            run: TimedRun = GpuRun(parts, run_folder)
            assert isinstance(run, GpuRun)
            run.peaks.begin()
            train_loop(parts, run)
        step = run.steps[-1]
        trained = parts.student.weights.trained.values()
        return {
            "case": args.case,
            "shape": case.shape,
            "overrides": list(case.overrides),
            "seconds": step.seconds,
            "phases": step.phases,
            "gpu_peaks": step.gpu_peaks,
            "num_trained_tokens": step.num_trained_tokens,
            "num_trainable": sum(p.numel() for p in trained),
            "kv_cache_tokens": parts.engine.max_batch_tokens,
            "micro_batch_tokens": parts.student.micro_batch_tokens
            or default_pass_tokens(parts.engine.device),
            "reserved": torch.cuda.max_memory_reserved() if job.device == "cuda" else None,
            "used_by_device": _used_bytes() if job.device == "cuda" else None,
        }


def _used_bytes() -> int:
    """All that the GPU holds for this process: the caching allocator's memory and CUDA's own."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def make_job(args: argparse.Namespace) -> Job:
    return replace(TINY if args.tiny else FULL, device="cpu" if args.tiny else "cuda")


def run_case(name: str, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name, "--out", str(out)]
    command += ["--tiny"] if args.tiny else []
    paths = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=args.limit
        )
        tail = "" if done.returncode == 0 else "\n".join(done.stderr.splitlines()[-20:])
    except subprocess.TimeoutExpired:
        tail = f"took more than {args.limit:.0f} s"
    if tail:
        return {"case": name, "failed": tail}
    return {**json.loads(out.read_text()), "process_seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--case", choices=CASES, help="measure this one in this process")
    parser.add_argument("--tiny", action="store_true", help="a few tokens of a tiny shape")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for each process")
    args = parser.parse_args()
    if args.case:
        store(args.out, measure(args))
        return
    import torch
    from gpu_machine import header

    device = torch.device(make_job(args).device)
    result = {**header("plan_steps", device), "job": asdict(make_job(args)), "cases": []}
    with tempfile.TemporaryDirectory(prefix="plan-steps-") as folder:
        for name in args.cases:
            record = run_case(name, args, Path(folder) / f"{name}.json")
            result["cases"].append(record)
            store(args.out, result)
            print(name, record.get("failed") or f"{record['seconds']:.2f} s", flush=True)


if __name__ == "__main__":
    main()
