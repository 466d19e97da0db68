"""The benchmarks of two checkouts, in turns: is anything slower or larger than it was?

    git worktree add BEFORE COMMIT
    python benchmarks/compare_trees.py --before BEFORE --out FILE              # on a CPU
    python benchmarks/compare_trees.py --before BEFORE --out FILE --device cuda

Each benchmark runs in both trees, by the scripts of each tree, and the order is reversed from round
to round. Numbers are medians over rounds; a ratio is after over before, so below 1 is better.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from workload import BENCHMARKS, REPOSITORY, provenance, store

Numbers = dict[str, float]
"""Name → seconds or bytes: lower is better."""

MODELS = REPOSITORY / "build" / "benchmark-models"
SIDE = ["--student", str(MODELS / "student"), "--teacher", str(MODELS / "teacher")]
COMMANDS = {
    "cpu": {
        f"step {config} {dtype}": ["courtside_side.py", "--config", config, "--dtype", dtype,
                                   "--repeats", "2", *SIDE]
        for config in ("full", "lora") for dtype in ("bfloat16", "float32")
    } | {"sampling": ["sampling.py", "--no-generate"]},
    "cuda": {
        "step": ["opd_step_gpu.py", "--shapes", "0.6b", "--sides", "courtside", "courtside_lean",
                 "hints", "hints_lean", "--steps", "2"],
        "sampling": ["sampling.py", "--device", "cuda", "--no-generate"],
        "head": ["head_gpu.py", "--shapes", "qwen3-0.6b", "qwen3-8b", "--no-liger"],
        "hint scoring": ["hint_scoring.py", "--device", "cuda", "--model", "qwen3-0.6b",
                         "--hints", "4", "32"],
        "long episode": ["long_episode.py", "--device", "cuda"],
        "prefix sharing": ["prefix_sharing.py", "--device", "cuda", "--model", "qwen3-0.6b",
                           "--prompts", "128", "2048"],
    },
}  # fmt: skip


def read_numbers(result: dict[str, Any]) -> Numbers:
    """What can be compared in a result file, whichever benchmark wrote it: medians of lists."""
    if "summary" in result:  # has the medians of all processes
        result = {row["side"]: row for row in result["summary"]}
    numbers: dict[str, list[float]] = {}

    def collect(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if key not in PEERS:
                    collect(item, (*path, key))
        elif isinstance(value, list):
            is_repeated = path[-1] in REPEATED
            for index, item in enumerate(value[result.get("num_warmup", 0) :]):
                name = item.get("name", index) if isinstance(item, dict) else index
                collect(item, path if is_repeated else (*path, str(name)))
        elif isinstance(value, int | float) and path[-1] in MEASURES:
            numbers.setdefault(" ".join(path), []).append(float(value))

    collect(result, ())
    return {name: median(values) for name, values in numbers.items()}


MEASURES = (
    "seconds", "cpu_seconds", "branches_s", "before_s", "ms", "gpu_peak", "peak_gib", "memory_gib",
    "peak_rss",
)  # fmt: skip
REPEATED = ("steps", "runs")
"""Lists of the same measurement again."""
PEERS = ("generate", "vllm", "floor", "phases", "gpu_peaks", "separate")


def run_benchmark(tree: Path, command: Sequence[str], python: str, *, limit: float) -> Numbers:
    script, *arguments = command
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        paths = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        subprocess.run(
            [python, str(tree / "benchmarks" / script), *arguments, "--out", str(out)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            cwd=tree, stdout=subprocess.DEVNULL, timeout=limit, check=True,
        )  # fmt: skip
        return read_numbers(json.loads(out.read_text()))


def compare(before: Sequence[Numbers], after: Sequence[Numbers]) -> dict[str, dict[str, float]]:
    """For each number that both trees have: its medians, and their ratio."""
    rows = {}
    for name in sorted({n for numbers in (*before, *after) for n in numbers}):
        sides = [[n[name] for n in numbers if name in n] for numbers in (before, after)]
        if all(sides):
            old, new = map(median, sides)
            rows[name] = {"before": old, "after": new, "ratio": new / old if old else 1.0}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--device", choices=COMMANDS, default="cpu")
    parser.add_argument("--only", nargs="+", help="names of benchmarks")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600, help="seconds for each process")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.device == "cpu":
        prepare = [args.python, str(BENCHMARKS / "prepare_models.py"), str(MODELS)]
        subprocess.run(prepare, check=True)
    trees = {"before": args.before.resolve(), "after": REPOSITORY}
    result = {**provenance("compare_trees"), "rounds": args.rounds, "benchmarks": {}}
    for name in args.only or COMMANDS[args.device]:
        runs: dict[str, list[Numbers]] = {"before": [], "after": []}
        for index in range(args.rounds):
            for side in sorted(trees, reverse=index % 2 == 0):
                try:
                    command = COMMANDS[args.device][name]
                    runs[side].append(
                        run_benchmark(trees[side], command, args.python, limit=args.limit)
                    )
                except (subprocess.SubprocessError, FileNotFoundError) as error:
                    print(f"{name}, {side}: {error}", flush=True)
        rows = compare(runs["before"], runs["after"])
        result["benchmarks"][name] = {"rows": rows, "runs": runs}
        for key, row in rows.items():
            print(f"{name}: {key}: {row['ratio']:.3f}", flush=True)
        store(args.out, result)


if __name__ == "__main__":
    main()
