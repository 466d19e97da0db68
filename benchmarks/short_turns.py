"""Evaluations and rollouts of the demo recipe on a CPU, in two checkouts by turns.

    git worktree add BEFORE COMMIT
    python benchmarks/short_turns.py --before BEFORE --out FILE

Each process plays both suites of the recipe's evaluation (48 episodes of 4 turns each) and the
rollouts of two steps (16 episodes). Ratios are before over after within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workload import REPOSITORY, provenance, store

RECIPE = REPOSITORY / "recipes" / "targeted-hints" / "recipe.toml"


def measure() -> dict[str, Any]:
    """In the tree that PYTHONPATH names."""
    from courtside.assemble import assemble
    from courtside.recipe.load import load_recipe

    parts = assemble(load_recipe(RECIPE))
    evaluator: Any = parts.evaluator
    suites = ["student", *(f"student:{name}" for name in parts.recipe.evaluate.suites)]
    num_prompts = parts.recipe.train.prompts_per_step

    def evaluate() -> list[Any]:
        if hasattr(evaluator, "evaluate_suites"):
            results = evaluator.evaluate_suites("test", suites, step=0).values()
        else:
            results = [evaluator.evaluate("test", step=0, policy=suite) for suite in suites]
        return [t for result in results for t in result.trajectories]

    def rollouts() -> list[Any]:
        steps = range(2)
        return [t for s in steps for t in parts.rollout(parts.tasks.batch(s, num_prompts), s)]

    return {"evaluate": time_call(evaluate), "rollouts": time_call(rollouts)}


def time_call(play: Callable[[], list[Any]]) -> dict[str, float]:
    start, cpu_start = time.perf_counter(), time.process_time()
    trajectories = play()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    num_tokens = sum(t.num_completion_tokens for t in trajectories)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "sampled_tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
    }


def run_side(tree: Path, threads: int, python: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": str(threads)}
    command = [python, str(Path(__file__).resolve()), "--side"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--side", action="store_true", help="measure this process's tree only")
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure()))
        return
    if args.before is None or args.out is None:
        parser.error("--before and --out are needed")
    trees = {"before": args.before.resolve(), "after": REPOSITORY}
    result: dict[str, Any] = {**provenance("short_turns"), "rounds": []}
    for threads in args.threads:
        for index in range(args.rounds):
            sides = sorted(trees, reverse=index % 2 == 0)
            runs = {side: run_side(trees[side], threads, args.python) for side in sides}
            ratios = {
                f"{phase} {measure}": runs["before"][phase][measure] / runs["after"][phase][measure]
                for phase in ("evaluate", "rollouts")
                for measure in ("seconds", "cpu_seconds")
            }
            result["rounds"].append({"threads": threads, "ratios": ratios, **runs})
            print(threads, {name: round(ratio, 2) for name, ratio in ratios.items()}, flush=True)
            store(args.out, result)


if __name__ == "__main__":
    main()
