"""One on-policy distillation step, courtside against TRL's DistillationTrainer, on a CPU.

Both sides do the same work: SmolLM2-135M as the student, a noisy copy of it as the teacher, 16
prompts, one sample of exactly 64 tokens each at temperature 1, full-vocabulary reverse KL on the
sampled tokens, one AdamW step; once with all weights trained, once with LoRA of rank 32; each with
matmuls in float32 and then in bfloat16.

    python benchmarks/opd_step.py --side both --repeats 3 \\
        --python-trl .venv-bench/bin/python --python-courtside .venv/bin/python

Each measurement is a process of its own; the sides take turns and their order is reversed from
round to round. `--check` compares loss and gradients of one fixed batch instead of timing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from workload import (
    BENCHMARKS,
    DTYPES,
    GIB,
    LORA_RANK,
    NEW_TOKENS,
    PROMPTS,
    REPOSITORY,
    SEED,
    TEACHER_NOISE,
    peak_rss,
    provenance,
    store,
)

SIDES = ("trl", "courtside")
TOKENS_PER_STEP = len(PROMPTS) * NEW_TOKENS


# ── one process ──────────────────────────────────────────────────────────────────────────────────


def run_process(command: Sequence[str], *, threads: int, log: Path) -> dict[str, int]:
    """Run a command to its end; its peak resident memory in bytes, measured in two ways."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(REPOSITORY / "src"),
    }
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        sampled = {"peak": 0}
        watcher = threading.Thread(target=_watch, args=(process.pid, sampled), daemon=True)
        watcher.start()
        # wait4 and not wait: its usage is that of this child alone, not of all children so far.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        watcher.join()
    if process.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-25:])
        raise SystemExit(f"{shlex.join(command)}\nended with {process.returncode}:\n{tail}")
    return {"peak_rss_rusage": usage.ru_maxrss * 1024, "peak_rss_sampled": sampled["peak"]}


def _watch(pid: int, sampled: dict[str, int]) -> None:
    while True:
        try:
            sampled["peak"] = max(sampled["peak"], peak_rss(pid))
        except (OSError, RuntimeError):  # the process has ended
            return
        time.sleep(0.2)


def side_command(args: argparse.Namespace, side: str, *, out: Path) -> list[str]:
    script = BENCHMARKS / f"{side}_side.py"
    if not script.is_file():
        raise SystemExit(f"{script}: missing, so --side {side} cannot run. Use another --side")
    python = args.python_trl if side == "trl" else args.python_courtside
    return [
        str(python), str(script), "--out", str(out), "--threads", str(args.threads),
        "--student", str(args.models / "student"), "--teacher", str(args.models / "teacher"),
    ]  # fmt: skip


# ── measuring ────────────────────────────────────────────────────────────────────────────────────


def measure(args: argparse.Namespace, sides: Sequence[str], work: Path) -> list[dict[str, Any]]:
    processes = []
    for config, dtype in product(args.configs, args.dtypes):
        for number in range(args.rounds):
            for side in sides if number % 2 == 0 else tuple(reversed(sides)):
                out = work / f"{config}-{dtype}-{number}-{side}.json"
                command = side_command(args, side, out=out)
                command += ["--config", config, "--dtype", dtype, "--warmup", str(args.warmup)]
                command += ["--repeats", str(args.repeats)]
                if side == "trl":
                    command += ["--micro-batch", str(args.trl_micro_batch)]
                load = os.getloadavg()[0]
                print(
                    f"{config}, {dtype}, round {number + 1}, {side} (load {load:.1f}) …", flush=True
                )
                peaks = run_process(command, threads=args.threads, log=out.with_suffix(".log"))
                record = json.loads(out.read_text())
                processes.append({"round": number, "load_before": load, **peaks, **record})
                timed = record["steps"][args.warmup :]
                print("    " + ", ".join(f"{step['seconds']:.1f} s" for step in timed), flush=True)
    return processes


def same_work_problems(processes: Sequence[dict[str, Any]]) -> list[str]:
    """What would make the comparison unfair; empty when the sides did the same work."""
    problems = []
    for process in processes:
        where = f"{process['side']}, {process['config']}, {process['dtype']}"
        for step in process["steps"]:
            if step["num_trained_tokens"] != TOKENS_PER_STEP:
                problems.append(f"{where}: trained {step['num_trained_tokens']} tokens in a step")
            if not step["loss"] > 0:
                problems.append(f"{where}: loss {step['loss']}; the teacher differs, so above 0")
    for key in ("prompts_hash", "num_prompt_tokens", "num_threads"):
        values = {(process["side"], process[key]) for process in processes}
        if len({value for _, value in values}) > 1:
            problems.append(f"{key} differs: {sorted(values, key=str)}")
    for config in {process["config"] for process in processes}:
        ours = [process for process in processes if process["config"] == config]
        if len({process["num_trainable"] for process in ours}) > 1:
            counts = sorted({(process["side"], process["num_trainable"]) for process in ours})
            problems.append(f"{config}: trainable parameters differ: {counts}")
        # Same weights and same distribution; only the samples differ, by about a twentieth each
        # (`--check` compares losses of one batch to a thousandth).
        first = [process["steps"][0]["loss"] for process in ours]
        if max(first) > 1.25 * min(first):
            problems.append(
                f"{config}: first losses {first} are further apart than samples explain"
            )
    return problems


def summarize(processes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for config, dtype in dict.fromkeys((p["config"], p["dtype"]) for p in processes):
        for side in dict.fromkeys(process["side"] for process in processes):
            key = config, dtype, side
            chosen = [p for p in processes if (p["config"], p["dtype"], p["side"]) == key]
            steps = [step for p in chosen for step in p["steps"][p["num_warmup"] :]]
            seconds = [step["seconds"] for step in steps]
            rows.append(
                {
                    "config": config,
                    "dtype": dtype,
                    "side": side,
                    "num_steps": len(steps),
                    "seconds_median": median(seconds),
                    "seconds_min": min(seconds),
                    "seconds_max": max(seconds),
                    "cpu_seconds_median": median(step["cpu_seconds"] for step in steps),
                    "tokens_per_second": TOKENS_PER_STEP / median(seconds),
                    "phases_median": {
                        phase: median(step["phases"][phase] for step in steps)
                        for phase in steps[0]["phases"]
                    },
                    "peak_rss": max(p["peak_rss_rusage"] for p in chosen),
                    "load_peak_rss": max(p["load_peak_rss"] for p in chosen),
                }
            )
    return rows


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """TRL over courtside: above 1 means that courtside is faster, or smaller."""
    ours = {_what(row): row for row in rows if row["side"] == "courtside"}
    return {
        _what(trl): {
            name: trl[key] / ours[_what(trl)][key]
            for name, key in (
                ("seconds", "seconds_median"),
                ("cpu_seconds", "cpu_seconds_median"),
                ("peak_rss", "peak_rss"),
            )
        }
        for trl in rows
        if trl["side"] == "trl" and _what(trl) in ours
    }


def bfloat16_gains(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each side, its seconds in float32 over those in bfloat16, whole and by phase."""
    narrow = {(r["config"], r["side"]): r for r in rows if r["dtype"] == "bfloat16"}
    gains = {}
    for wide in rows:
        other = narrow.get((wide["config"], wide["side"]))
        if wide["dtype"] == "float32" and other is not None:
            gains[f"{wide['config']}, {wide['side']}"] = {
                "seconds": wide["seconds_median"] / other["seconds_median"],
                "peak_rss": wide["peak_rss"] / other["peak_rss"],
                **{
                    phase: seconds / other["phases_median"][phase]
                    for phase, seconds in wide["phases_median"].items()
                    if other["phases_median"].get(phase)
                },
            }
    return gains


def _what(row: dict[str, Any]) -> str:
    return f"{row['config']}, {row['dtype']}"


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "\n| weights | dtype | side | s/step median (min–max) | CPU s | tokens/s | phases, s "
        "| peak RSS, GiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        phases = ", ".join(f"{name} {s:.1f}" for name, s in sorted(row["phases_median"].items()))
        print(
            f"| {row['config']} | {row['dtype']} | {row['side']} | {row['seconds_median']:.1f} "
            f"({row['seconds_min']:.1f}–{row['seconds_max']:.1f}) "
            f"| {row['cpu_seconds_median']:.1f} | {row['tokens_per_second']:.0f} | {phases} "
            f"| {row['peak_rss'] / GIB:.2f} |"
        )
    for what, ratio in ratios(rows).items():
        print(
            f"\n{what}: TRL takes {ratio['seconds']:.2f} times the time and "
            f"{ratio['peak_rss']:.2f} times the memory of courtside."
        )
    for what, gain in bfloat16_gains(rows).items():
        gains = ", ".join(f"{name} {ratio:.2f}" for name, ratio in gain.items())
        print(f"\n{what}: float32 takes so many times what bfloat16 takes: {gains}")


# ── checking ─────────────────────────────────────────────────────────────────────────────────────


def check(args: argparse.Namespace, sides: Sequence[str], work: Path) -> None:
    """One fixed batch, sampled by TRL's side: losses and gradients must agree."""
    batch = work / "batch.json"
    records = {}
    for side in sides:
        out = work / f"check-{side}.json"
        command = [*side_command(args, side, out=out), "--check", str(batch)]
        run_process(command, threads=args.threads, log=out.with_suffix(".log"))
        records[side] = json.loads(out.read_text())
        print(json.dumps(records[side], indent=1))
    expected = records["trl"]
    for side, record in records.items():
        if record["num_tokens"] != TOKENS_PER_STEP:
            raise SystemExit(f"{side}: {record['num_tokens']} tokens in the batch's loss")
        pairs = {"loss": (record["loss"], expected["reference_loss"])}
        pairs["gradient_norm"] = (record["gradient_norm"], expected["gradient_norm"])
        for name, norm in record["gradient_norms"].items():
            pairs[f"gradient of {name}"] = (norm, expected["gradient_norms"][name])
        for name, (value, reference) in pairs.items():
            if abs(value - reference) > 1e-3 * abs(reference):
                raise SystemExit(f"{side}: {name} is {value}, expected {reference}")
    print(f"{', '.join(records)}: loss and gradients agree within 0.1% on the same batch")


# ── main ─────────────────────────────────────────────────────────────────────────────────────────


def hardware() -> dict[str, Any]:
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    fields = {key.strip(): value.strip() for key, _, value in
              (line.partition(":") for line in lines.splitlines())}  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": fields["Model name"],
        "cores": os.cpu_count(),
        "simd": [
            flag
            for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
            if flag in fields["Flags"]
        ],
        "memory_gib": round(memory / GIB, 1),
        "kernel": platform.release(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=(*SIDES, "both"), default="both")
    parser.add_argument("--configs", nargs="+", choices=tuple(LORA_RANK), default=list(LORA_RANK))
    parser.add_argument(
        "--dtype",
        dest="dtypes",
        nargs="+",
        choices=DTYPES,
        default=list(DTYPES),
        help="of the matmuls, on both sides; one after the other",
    )
    parser.add_argument("--repeats", type=int, default=3, help="measured steps in each process")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them, not counted")
    parser.add_argument("--rounds", type=int, default=2, help="processes per side and config")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--trl-micro-batch",
        type=int,
        default=2,
        help="sequences in one of TRL's forward and backward passes; 2 is best for it on a CPU",
    )
    parser.add_argument("--python-trl", type=Path, default=Path(".venv-bench/bin/python"))
    parser.add_argument("--python-courtside", type=Path, default=Path(".venv/bin/python"))
    parser.add_argument("--models", type=Path, default=REPOSITORY / "build" / "benchmark-models")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "opd_step_cpu.json")
    parser.add_argument(
        "--check", action="store_true", help="compare loss and gradients only, in float32"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    sides = SIDES if args.side == "both" else (args.side,)
    python = args.python_courtside if args.side == "courtside" else args.python_trl
    with tempfile.TemporaryDirectory(prefix="opd-step-") as folder:
        work = Path(folder)
        prepare = [str(python), str(BENCHMARKS / "prepare_models.py"), str(args.models)]
        run_process(prepare, threads=args.threads, log=work / "prepare.log")
        if args.check:
            if args.side != "both":
                raise SystemExit("--check compares the sides with each other: use --side both")
            if "float32" not in args.dtypes:
                raise SystemExit("--check compares in float32: leave out --dtype bfloat16")
            check(args, sides, work)
            return
        processes = measure(args, sides, work)
    problems = same_work_problems(processes)
    rows = summarize(processes)
    result = {
        **provenance("opd_step"),
        "hardware": hardware(),
        "seed": SEED,
        "teacher_noise": TEACHER_NOISE,
        "tokens_per_step": TOKENS_PER_STEP,
        "same_work_problems": problems,
        "summary": rows,
        "ratios_trl_over_courtside": ratios(rows),
        "ratios_float32_over_bfloat16": bfloat16_gains(rows),
        "processes": processes,
    }
    store(args.out, result)
    print_table(rows)
    if problems:
        raise SystemExit("\nNOT THE SAME WORK:\n" + "\n".join(problems))


if __name__ == "__main__":
    main()
