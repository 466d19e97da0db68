"""One on-policy distillation step on a GPU, courtside against TRL's DistillationTrainer.

Both sides do the same work: the shape of Qwen3-0.6B (teacher: 1.7B) or Qwen3-1.7B (teacher: 1.7B)
with the same random weights, 64 prompts of 128 tokens, 4 samples of exactly 512 tokens each at
temperature 1, reverse KL over the whole vocabulary on the sampled tokens, one AdamW step on all
weights; bfloat16 autocast over float32 weights. Courtside runs with its defaults and, as
`courtside_lean`, with settings that need less memory. Beside them `hints` and `hints_lean`,
courtside's step of an agent: it runs episodes that begin with the same prompts, samples as many
tokens in four turns of each, and trains on the two that get a hint. Named by --sides,
`courtside_sharded` is `courtside` as the only rank of a launcher: what FSDP2 costs by itself.

    python benchmarks/opd_step_gpu.py --out FILE             # a few minutes on an H200
    python benchmarks/opd_step_gpu.py --out FILE --tiny      # everything once, small, on a CPU
    python benchmarks/opd_step_gpu.py --out FILE --sides courtside courtside_sharded

Each side is a process of its own; the next one imports while one has the GPU. What is done so far
is in FILE after each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from opd_step_job import FULL, HINTS_PER_EPISODE, NUM_TURNS, SEEDS, TINY, Job, write_folder
from workload import BENCHMARKS, GIB, REPOSITORY, SEED, store

OURS = ("courtside", "courtside_lean")
"""The sides that do TRL's job."""
HINTED = ("hints", "hints_lean")
PEERS = ("trl", "trl_vllm")
"""TRL, with transformers' generate and with vLLM in its process."""
SIDES = (*OURS, *HINTED, *PEERS)
SHARDED = "courtside_sharded"
"""Measured against `courtside`, and only where --sides names it."""
LEAN = ("student.gradient_checkpointing=true", "train.optimizer_offload=true")
"""What the lean sides set in addition to half of the rows at a time (`half_of_the_rows`): gradient
checkpointing and optimizer-state offload."""
LOSS_SPREAD = 1.15
"""First losses of two sides differ by their samples only."""


# ── processes ────────────────────────────────────────────────────────────────────────────────────


class Side:
    """A process that has imported what it needs and waits until it is told to go."""

    def __init__(self, args: argparse.Namespace, shape: str, side: str, work: Path):
        self.shape, self.side = shape, side
        self.out = work / f"{shape}-{side}.json"
        self.log = self.out.with_suffix(".log")
        self.tables = args.out.with_name(f"{args.out.stem}-{shape}-{side}.profile")
        command = side_command(args, work / shape, side, self.out)
        paths = [args.vllm if side == "trl_vllm" else None, os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), *filter(None, paths)]),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        if args.job.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if side == SHARDED:
            environment |= single_rank()
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=file, stderr=file, text=True
            )

    def run(self, *, limit: float) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            self.process.communicate("go\n", timeout=limit)
            ended = f"ended with {self.process.returncode}"
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            ended = f"took more than {limit:.0f} s"
        record: dict[str, Any] = {"side": self.side, "config": self.shape}
        if self.process.returncode == 0:
            record = json.loads(self.out.read_text())
            if (table := self.out.with_suffix(".profile")).exists():
                shutil.copy(table, self.tables)
        else:
            tail = self.log.read_text().splitlines()[-30:]
            record["failed"] = "\n".join([ended, *tail])
        return {**record, "process_seconds": time.perf_counter() - began}

    def end(self) -> None:
        """If it never got its turn."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def single_rank() -> dict[str, str]:
    """What a launcher sets for its only process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port}  # fmt: skip


def side_command(args: argparse.Namespace, job: Path, side: str, out: Path) -> list[str]:
    shared = ["--job", str(job), "--out", str(out), "--steps", str(args.steps)]
    if side in PEERS:
        sizes = map(str, args.trl_micro_batches)
        script = "trl_vllm_side.py" if side == "trl_vllm" else "trl_gpu_side.py"
        command = [args.python_trl, str(BENCHMARKS / script), *shared]
        command += ["--liger", args.trl_liger, "--weights", args.trl_weights]
        command += ["--warmup-tokens", str(args.trl_warmup_tokens), "--micro-batches", *sizes]
        return command + (["--as-is"] if args.trl_as_is else [])
    command = [sys.executable, str(BENCHMARKS / "courtside_gpu_side.py"), *shared, "--side", side]
    sets = {
        "courtside": args.set,
        SHARDED: args.set,
        "courtside_lean": [half_of_the_rows(args.job, side), *args.set_lean],
        "hints": args.set_hints,
        "hints_lean": [half_of_the_rows(args.job, side), *args.set_lean, *args.set_hints],
    }
    command += ["--profile", args.profile] if args.profile else []
    command += ["--empty-cache"] if args.empty_cache else []
    return command + (["--set", *sets[side]] if sets[side] else [])


def half_of_the_rows(job: Job, side: str) -> str:
    """Answers or episodes that are sampled at a time; a later setting replaces it."""
    size = job.episode_tokens if side in HINTED else job.prompt_tokens + job.new_tokens
    return f"rollout.kv_cache_tokens={job.rows // 2 * size}"


def run_all(args: argparse.Namespace, work: Path, write: Any) -> list[dict[str, Any]]:
    jobs = [(shape, side) for shape in args.shapes for side in args.sides]
    records: list[dict[str, Any]] = []
    waiting = Side(args, *jobs[0], work) if jobs else None
    for index, (shape, name) in enumerate(jobs):
        side, waiting = waiting, None
        assert side is not None
        if index + 1 < len(jobs):
            waiting = Side(args, *jobs[index + 1], work)
        print(f"{shape}, {name} …", flush=True)
        try:
            records.append(side.run(limit=args.limit))
        except BaseException:
            for process in filter(None, (side, waiting)):
                process.end()
            raise
        write(records)
        print(f"    {format_record(records[-1])}", flush=True)
    return records


def format_record(record: dict[str, Any]) -> str:
    took = f"the process took {record['process_seconds']:.0f} s"
    if "failed" in record:
        return f"FAILED, {took}: {record['failed']}"
    row = summary(record)
    return f"{row['seconds']:.2f} s a step, {row['gpu_peak'] / GIB:.1f} GiB; {took}"


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────


def summary(record: dict[str, Any]) -> dict[str, Any]:
    steps = record["steps"][record["num_warmup"] :]
    peaks: dict[str, int] = {}
    for step in steps:
        for phase, peak in step["gpu_peaks"].items():
            peaks[phase] = max(peak, peaks.get(phase, 0))
    seconds = median(step["seconds"] for step in steps)
    return {
        "shape": record["config"],
        "side": record["side"],
        "num_steps": len(steps),
        "seconds": seconds,
        "phases": {
            phase: median(step["phases"].get(phase, 0.0) for step in steps)
            for phase in steps[0]["phases"]
        },
        "num_trained_tokens": steps[0]["num_trained_tokens"],
        "trained_tokens_per_second": steps[0]["num_trained_tokens"] / seconds,
        "gpu_peak": max(peaks.values(), default=0),
        "gpu_peaks": peaks,
    }


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By shape and side of courtside's, with TRL as the peer, by `SIDE/trl_vllm` with TRL that
    samples by vLLM, and by `courtside_sharded/courtside`: how many times its time the peer takes,
    for the whole step and for the phases that both have, and its share of the peer's memory."""
    by_key = {(row["shape"], row["side"]): row for row in rows}
    by_shape: dict[str, dict[str, Any]] = {}
    for (shape, side), ours in by_key.items():
        peers = (*PEERS, "courtside") if side == SHARDED else PEERS
        for peer_name in peers if side not in PEERS else ():
            peer = by_key.get((shape, peer_name))
            if peer is None:
                continue
            key = side if peer_name == "trl" else f"{side}/{peer_name}"
            by_shape.setdefault(shape, {})[key] = {
                "share_of_peak": ours["gpu_peak"] / peer["gpu_peak"] if peer["gpu_peak"] else None,
                "times_faster": peer["seconds"] / ours["seconds"],
                "times_faster_by_phase": {
                    phase: seconds / ours["phases"][phase]
                    for phase, seconds in peer["phases"].items()
                    if phase in ours["phases"]
                },
            }
    return by_shape


def same_work_problems(records: Sequence[dict[str, Any]], job: Job) -> list[str]:
    """What would make the comparison unfair; empty when the sides did the same work."""
    problems = []
    for record in records:
        where = f"{record['config']}, {record['side']}"
        for step in record["steps"][record["num_warmup"] :]:
            problems += [
                f"{where}: {step[key]} {what} in a step, not {count}"
                for key, what, count in expected_counts(record["side"], job)
                if step[key] != count
            ]
            if not step["loss"] > 0:
                problems.append(f"{where}: loss {step['loss']}; the teacher differs, so above 0")
    for shape in dict.fromkeys(record["config"] for record in records):
        of_shape = [r for r in records if r["config"] == shape]
        for key in ("prompts_hash", "num_prompt_tokens", "num_trainable"):
            if len({record[key] for record in of_shape}) > 1:
                problems.append(f"{shape}: {key} differs: {[record[key] for record in of_shape]}")
        same = [record for record in of_shape if record["side"] not in HINTED]
        losses = {record["side"]: record["steps"][-1]["loss"] for record in same}
        if losses and max(losses.values()) > LOSS_SPREAD * min(losses.values()):
            problems.append(f"{shape}: losses {losses} are further apart than samples explain")
        for record in same[:-1]:  # against the last, which is TRL where it ran
            sides = f"{shape}, {record['side']} and {same[-1]['side']}"
            problems += check_problems(sides, (record["check"], same[-1]["check"]), job)
    return problems


def expected_counts(side: str, job: Job) -> list[tuple[str, str, int]]:
    """What a step of this side counts: key, name and number."""
    if side not in HINTED:
        return [("num_trained_tokens", "trained tokens", job.tokens_per_step)]
    return [
        ("num_sampled_tokens", "sampled tokens", job.tokens_per_step),
        ("num_trained_tokens", "trained tokens", job.hinted_tokens_per_step),
        ("num_hints", "hints", job.hints_per_step),
    ]


def check_problems(sides: str, checks: Sequence[dict[str, Any]], job: Job) -> list[str]:
    """Loss and gradients of the fixed batch must be the same numbers, up to rounding."""
    allowed = 1e-3 if job.dtype == "float32" else 0.03
    ours, expected = ({"loss": c["loss"], "gradient": c["gradient_norm"], **c["gradient_norms"]}
                    for c in checks)  # fmt: skip
    return [
        f"{sides}: on the same batch {name} is {value} and {expected[name]}"
        for name, value in ours.items()
        if not abs(value - expected[name]) <= allowed * abs(expected[name])
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| shape | side | s/step | phases, s | trained tokens/s | peak, GiB | by phase |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["phases"].items())
        peaks = ", ".join(f"{name} {p / GIB:.1f}" for name, p in row["gpu_peaks"].items())
        lines.append(
            f"| {row['shape']} | {row['side']} | {row['seconds']:.2f} | {phases} "
            f"| {row['trained_tokens_per_second']:,.0f} | {row['gpu_peak'] / GIB:.1f} | {peaks} |"
        )
    by_shape = ratios(rows)
    if by_shape:
        lines += ["", "| shape | side | peer's time over ours | by phase | our peak over its |"]
        lines.append("|---|---|---|---|---|")
    for shape, sides in by_shape.items():
        for side, ratio in sides.items():
            by_phase = ", ".join(
                f"{name} {times:.2f}" for name, times in ratio["times_faster_by_phase"].items()
            )
            lines.append(
                f"| {shape} | {side} | {ratio['times_faster']:.2f} | {by_phase} | {_share(ratio)} |"
            )
    if any(row["side"] in HINTED for row in rows):
        lines += ["", HINTS_DIFFER]
    return "\n".join(lines)


HINTS_DIFFER = (
    "hints is not TRL's job, but a whole step that samples as many tokens: in place of an answer "
    f"{NUM_TURNS} turns, each 1/{NUM_TURNS} as long, and a tool's message between them; "
    f"{HINTS_PER_EPISODE} of the {NUM_TURNS} get a hint and train, half of the sampled tokens; the "
    "student is its own teacher, and there is no second model. TRL has no hints "
    "before a turn."
)


def _share(ratio: dict[str, Any]) -> str:
    return "not measured" if ratio["share_of_peak"] is None else f"{ratio['share_of_peak']:.2f}"


# ── main ─────────────────────────────────────────────────────────────────────────────────────────


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--shapes", nargs="+", choices=("0.6b", "1.7b"), default=["0.6b", "1.7b"])
    parser.add_argument("--sides", nargs="+", choices=(*SIDES, SHARDED),
                        help=f"all but {SHARDED}; trl_vllm only where --vllm is given")  # fmt: skip
    parser.add_argument("--vllm", help="folders that vLLM is imported from, as in PYTHONPATH")
    parser.add_argument("--steps", type=int, default=1, help="measured steps, after one before")
    parser.add_argument("--tiny", action="store_true", help="a few tokens of a tiny shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda; with --tiny cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="float32 on a CPU")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value",
                        help="of courtside's recipe: train.micro_batch_tokens=8192")  # fmt: skip
    parser.add_argument("--set-lean", nargs="+", default=list(LEAN), metavar="section.key=value",
                        help=f"the lean sides', in place of {' '.join(LEAN)}")  # fmt: skip
    parser.add_argument("--set-hints", nargs="+", default=[], metavar="section.key=value",
                        help="the same for hints, and for hints_lean in addition")  # fmt: skip
    parser.add_argument("--trl-micro-batches", type=int, nargs="+",
                        help="sequences in a pass, the fastest is taken; 16 32 64")  # fmt: skip
    parser.add_argument("--trl-liger", choices=("both", "on", "off"), help="both; off on a CPU")
    parser.add_argument("--trl-weights", choices=("float32", "bfloat16"), default="float32",
                        help="bfloat16: less memory, and small steps are lost")  # fmt: skip
    parser.add_argument("--trl-as-is", action="store_true", help="loss without autocast: float32")
    parser.add_argument("--trl-warmup-tokens", type=int, default=32,
                        help="new tokens in the step before the measured ones")  # fmt: skip
    parser.add_argument("--python-trl", default=sys.executable, help="if TRL lives elsewhere")
    parser.add_argument("--empty-cache", action="store_true",
                        help="at each capture, as torch.cuda.graph does")  # fmt: skip
    parser.add_argument("--profile", default="", metavar="PHASE",
                        help="of our last step: update. Tables beside --out")  # fmt: skip
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each process")
    args = parser.parse_args()
    device = args.device or ("cpu" if args.tiny else "cuda")
    job = replace(TINY if args.tiny else FULL, device=device)
    args.job = replace(job, dtype=args.dtype or ("float32" if device == "cpu" else "bfloat16"))
    args.trl_liger = args.trl_liger or ("off" if device == "cpu" else "both")
    args.trl_micro_batches = args.trl_micro_batches or ([2, 4] if args.tiny else [16, 32, 64])
    args.sides = args.sides or [side for side in SIDES if args.vllm or side != "trl_vllm"]
    if "trl_vllm" in args.sides and (args.vllm is None or device == "cpu"):
        parser.error("--sides trl_vllm: needs a GPU and --vllm, the folders vLLM is imported from")
    uneven = [size for size in args.trl_micro_batches if args.job.rows % size]
    if uneven:
        parser.error(f"--trl-micro-batches {uneven[0]}: {args.job.rows} rows do not divide by it")
    args.shapes = ["tiny"] if args.tiny else args.shapes
    return args


def main() -> None:
    args = parse()
    began = time.perf_counter()
    about: dict[str, Any] = {}

    def write(records: Sequence[dict[str, Any]]) -> None:
        done = [record for record in records if "failed" not in record]
        rows = [summary(record) for record in done]
        result = {
            **about,
            "seed": SEED,
            "weight_seeds": SEEDS,
            "job": asdict(args.job),
            "tokens_per_step": args.job.tokens_per_step,
            "all_seconds": time.perf_counter() - began,
            "same_work_problems": same_work_problems(done, args.job),
            "failed": [f"{r['config']}, {r['side']}" for r in records if "failed" in r],
            "summary": rows,
            "ratios": ratios(rows),
            "processes": list(records),
        }
        store(args.out, result)

    with tempfile.TemporaryDirectory(prefix="opd-step-gpu-") as folder:
        work = Path(folder)
        for shape in args.shapes:
            (work / shape).mkdir()
            write_folder(work / shape, args.job, shape)
        import torch  # only now, and for its name of the GPU
        from gpu_machine import header

        about |= header("opd_step_gpu", torch.device(args.job.device))
        records = run_all(args, work, write)
    result = json.loads(args.out.read_text())
    print("\n" + table(result["summary"]))
    problems = [f"failed: {name}" for name in result["failed"]]
    problems += [f"not the same work: {problem}" for problem in result["same_work_problems"]]
    if problems or len(records) < len(args.shapes) * len(args.sides):
        raise SystemExit("\n" + "\n".join(problems))


if __name__ == "__main__":
    main()
