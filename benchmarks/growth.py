"""How cost grows: doubling rows, tokens, sequences, turns or hints should at most double it.

Each stage of a run at growing sizes, on random weights: seconds (the fastest of a few), how far
memory rises above what was held before, and the factor that a doubling costs. A series passes where
no doubling costs more than 2.2 times, in time or in memory.

Attention is the one thing in a transformer that is not linear in tokens: a token of a sequence
twice as long attends to twice as many positions. So what a doubling must cost is counted first:
operations and, in decoding, bytes of weights and KV cache. Where attention alone makes that more
than 2.07, the time is shown and not judged; memory always is. The same tokens in short sequences
are measured in addition.

    python benchmarks/growth.py                      # a small llama, under five minutes of one core
    python benchmarks/growth.py --device cuda        # the shape of Qwen3-0.6B, about a minute
    python benchmarks/growth.py --series update      # those whose name has it

On a CPU, memory is measured in a process of its own for each size, and time is the processor's, not
the clock's: other programs disturb it less.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_machine import header, rise_of_rss
from gpu_peaks import hidden_in_graphs
from growth_jobs import SCALES, Parts, Series, Work, all_series
from growth_plot import picture
from opd_step import hardware
from workload import BENCHMARKS, SEED, store

MIB = 2**20
M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""
LIMIT = 2.2
"""Of a doubling's factor: 2 and a tenth of it."""
COUNTED_LIMIT = 2.07
"""Of the factor by count, for a doubling's time to be judged. Not 2.2: where few tokens look back,
a CPU's attention has a third of the speed of its matmuls."""
FLOOR = 8 * MIB
"""Rises of memory are compared from here on: an allocator moves by as much for no reason."""
LEAST_CALLS, MOST_CALLS = 2, 6
ATTEMPTS = 2
"""A series that fails is timed once more, and the fastest of all calls count: noise only adds time.
What really grows faster fails again."""
ENOUGH_SECONDS = {"cpu": 1.5, "cuda": 1.0}
"""After so much measured time a size is not measured again."""


# ── on a CPU ─────────────────────────────────────────────────────────────────────────────────────


def on_cpu(args: argparse.Namespace, series: Series) -> list[dict[str, Any]]:
    measured = {size: in_child(_memory, args, series, size) for size in series.sizes}
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in measured}
    rows: list[dict[str, Any]] = []
    for _ in range(ATTEMPTS):
        for size, more in in_child(_times, args, series).items():
            runs[size] += more
        rows = [_row(size, about, runs[size], memory) for size, (about, memory) in measured.items()]
        if grown(series, rows)["time_at_most_doubles"] is not False:
            break
    return rows


def in_child(
    measure: Callable[..., Any], args: argparse.Namespace, series: Series, *more: Any
) -> Any:
    """In a process of its own. It is forked from one that has not computed anything yet: imports
    need not be done again, and there are no threads that a fork would lose."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(args.threads)
        sender.send(measure(Parts(args.model, "cpu"), series, *more))

    process = context.Process(target=child)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit(f"{series.name}: its process ended without a result") from None
    finally:
        process.join()


def _times(parts: Parts, series: Series) -> dict[int, list[dict[str, float]]]:
    """All sizes in turn, several times over: what disturbs them comes and goes."""
    works = {size: series.job(parts, size) for size in series.sizes}
    works[series.sizes[0]].call()  # first uses are not counted
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in works}
    for number in range(MOST_CALLS):
        for size, work in works.items():
            if number < LEAST_CALLS or _goes_on(runs[size], ENOUGH_SECONDS["cpu"]):
                start, start_cpu = time.perf_counter(), time.process_time()
                work.call()
                cpu = time.process_time() - start_cpu
                runs[size].append({"seconds": cpu, "clock": time.perf_counter() - start})
    return runs


def _memory(parts: Parts, series: Series, size: int) -> tuple[dict[str, Any], int]:
    """How far resident memory rises. What is freed goes back to the system at once meanwhile: the
    numbers would else be those of an allocator's habits."""
    # The smallest size first, not counted: code, buffers and the optimizer's state get their place.
    series.job(parts, series.sizes[0]).call()
    work = series.job(parts, size)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    return _about(work), rise_of_rss(work.call)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────


def on_gpu(parts: Parts, series: Series) -> list[dict[str, Any]]:
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in series.sizes}
    rows: list[dict[str, Any]] = []
    for _ in range(ATTEMPTS):
        measured = {size: _at_size(parts, series, size) for size in series.sizes}
        for size, (_, more, _) in measured.items():
            runs[size] += more
        rows = [
            _row(size, about, runs[size], memory) for size, (about, _, memory) in measured.items()
        ]
        if grown(series, rows)["time_at_most_doubles"] is not False:
            break
    return rows


def _at_size(
    parts: Parts, series: Series, size: int
) -> tuple[dict[str, Any], list[dict[str, float]], int]:
    parts.renew()
    work = series.job(parts, size)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() + hidden_in_graphs()
    work.call()  # captures graphs and probes the model: its memory counts, not its time
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() + hidden_in_graphs() - held
    runs: list[dict[str, float]] = []
    while len(runs) < LEAST_CALLS or _goes_on(runs, ENOUGH_SECONDS["cuda"]):
        start = time.perf_counter()
        work.call()
        torch.cuda.synchronize()
        runs.append({"seconds": time.perf_counter() - start})
    return _about(work), runs, memory


def _goes_on(runs: Sequence[dict[str, float]], enough: float) -> bool:
    return len(runs) < MOST_CALLS and sum(run["seconds"] for run in runs) < enough


def _about(work: Work) -> dict[str, Any]:
    counts = {
        unit: {"weights": count.weights, "attention": count.attention}
        for unit, count in work.counts.items()
    }
    return {"num_tokens": work.num_tokens, "counts": counts}


def _row(
    size: int, about: dict[str, Any], runs: list[dict[str, float]], memory: int
) -> dict[str, Any]:
    seconds = min(run["seconds"] for run in runs)
    return {"size": size, "seconds": seconds, "memory_bytes": memory, **about, "runs": runs}


# ── growth ───────────────────────────────────────────────────────────────────────────────────────


def grown(series: Series, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Factors by doubling, exponents over the whole, and whether cost at most doubles."""
    time_factors = [b["seconds"] / a["seconds"] for a, b in pairwise(rows)]
    memory = [max(row["memory_bytes"], FLOOR) for row in rows]
    memory_factors = [b / a for a, b in pairwise(memory)]
    counted = [counted_factor(a["counts"], b["counts"]) for a, b in pairwise(rows)]
    hint_outcomes = [factor <= COUNTED_LIMIT for factor in counted]
    times = [factor for factor, counts in zip(time_factors, hint_outcomes, strict=True) if counts]
    return {
        "series": series.name,
        "unit": series.unit,
        "panel_of": series.panel_of,
        "rows": list(rows),
        "time_factors": time_factors,
        "memory_factors": memory_factors,
        "counted_factors": counted,
        "judged": hint_outcomes,
        "time_exponent": slope([(row["size"], row["seconds"]) for row in rows]),
        "memory_exponent": slope([(r["size"], m) for r, m in zip(rows, memory, strict=True)]),
        "worst_time": max(times, default=None),
        "worst_memory": max(memory_factors, default=None),
        "time_at_most_doubles": max(times) <= LIMIT if times else None,
        "memory_at_most_doubles": max(memory_factors) <= LIMIT if memory_factors else None,
    }


def counted_factor(small: dict[str, Any], large: dict[str, Any]) -> float:
    """What the doubling must cost by count, in the unit in which that is more."""
    return float(max(sum(large[unit].values()) / sum(small[unit].values()) for unit in small))


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Of the straight line through points on logarithmic axes."""
    if len(points) < 2:
        return None
    xs, ys = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return above / sum((a - x) ** 2 for a in xs)


VERDICTS = {True: "yes", False: "NO", None: "not judged"}


def table(series: dict[str, Any]) -> str:
    rows = series["rows"]
    lines = [f"{series['series']} ({series['unit']})"]
    for number, row in enumerate(rows):
        factors = ""
        if number:
            by_time, by_memory = (series[k][number - 1] for k in ("time_factors", "memory_factors"))
            aside = " " if series["judged"][number - 1] else "*"
            factors = f" × {by_time:.2f}{aside}  × {by_memory:.2f}"
        lines.append(
            f"  {row['size']:6d}: {row['seconds']:8.3f} s  {row['memory_bytes'] / MIB:8.1f} MiB"
            f"{factors}"
        )
    verdicts = "  at most doubles: "
    for name in ("time", "memory"):
        if series[f"{name}_exponent"] is None:
            continue
        verdict = VERDICTS[series[f"{name}_at_most_doubles"]]
        verdicts += f"{name} {verdict} (exponent {series[f'{name}_exponent']:.2f})  "
    if not all(series["judged"]):
        most = series["counted_factors"][-1]
        verdicts += f"* attention: {most:.2f} by count at the end, not judged"
    return "\n".join([*lines, verdicts.rstrip()])


# ── all ──────────────────────────────────────────────────────────────────────────────────────────


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model",
        choices=("small", "tiny", "smollm2-135m", "qwen3-0.6b", "llama-1b"),
        help="small on a CPU, qwen3-0.6b on a GPU",
    )
    parser.add_argument("--series", nargs="+", help="only those whose name has one of these")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--out", type=Path, help="JSON; the picture is next to it")
    args = parser.parse_args()
    args.model = args.model or {"cpu": "small", "cuda": "qwen3-0.6b"}[args.device]
    args.out = args.out or BENCHMARKS / "results" / f"growth_{args.device}.json"
    return args


def main() -> None:
    args = parse()
    began, load = time.perf_counter(), os.getloadavg()[0]
    chosen = [
        series
        for series in all_series(SCALES[args.device])
        if args.series is None or any(part in series.name for part in args.series)
    ]
    if not chosen:
        raise SystemExit(f"--series {args.series}: no series has such a name")
    parts = None
    if args.device == "cuda":
        parts = Parts(args.model, args.device)
        for series in chosen:  # compiles, and makes the optimizer's state
            series.job(parts, series.sizes[0]).call()
    results = []
    for series in chosen:
        rows = on_cpu(args, series) if parts is None else on_gpu(parts, series)
        results.append(grown(series, rows))
        print(table(results[-1]), flush=True)
    torch.set_num_threads(args.threads)
    result = {
        **header("growth", torch.device(args.device)),
        "load_before": load,
        "seed": SEED,
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "dtype": str(parts.weights.autocast if parts else torch.float32),
        "time": "processor time of all threads" if args.device == "cpu" else "clock",
        "limit": LIMIT,
        "counted_limit": COUNTED_LIMIT,
        "memory_floor_bytes": FLOOR,
        "wall_seconds": time.perf_counter() - began,
        "series": results,
    }
    result["hardware"] |= hardware()
    store(args.out, result)
    args.out.with_suffix(".svg").write_text(picture(result))
    print(f"{args.out}, {result['wall_seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
