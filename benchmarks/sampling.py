"""Sampling in process against transformers' own generate and against the memory's bandwidth.

Random weights of a given shape, prompts of one length, so many samples of each; no row ends early,
so both sides write the same number of tokens, which is looked at. The floor of one token a row is
the time in which the weights and the KV cache of all rows can be loaded once; the
bandwidth is measured in the same run.

    python benchmarks/sampling.py --device cuda                      # the cases below, 100 seconds
    python benchmarks/sampling.py --device cuda --model smollm2-135m --prompts 32    # one case
    python benchmarks/sampling.py --device cuda --prompts 8 --profile    # where a step's time goes
    python benchmarks/sampling.py --device cuda --vllm PATHS --shapes qwen3-0.6b    # against vLLM
    python benchmarks/sampling.py --device cuda --vllm PATHS --shapes gemma-3-1b    # with windows
    python benchmarks/sampling.py --device cuda --shapes gemma-3-1b olmo-3-7b gpt-oss-20b \
        qwen3-30b-a3b qwen3.5-4b --min-rows 8 --max-rows 256 --max-positions 100000 --no-generate

`--vllm` names the folders that vLLM is imported from, as PYTHONPATH does. Its side runs first, in a
process of its own (`vllm_side.py`), on the rows and lengths of `GRID`. A shape that fails is
reported, and the others go on.

`generate` is measured first, when nothing of ours is in memory. Peaks have the weights in them, and
ours what CUDA graphs hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from gpu_machine import about, time_call
from gpu_peaks import free_memory, hidden_in_graphs
from shapes import NAMES, random_model
from workload import BENCHMARKS, GIB, SEED, store

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.local import LocalEngine

NO_EOS = -1
LONG_SECONDS = 20.0
"""A first run that takes longer counts: capturing the CUDA graphs is a small part of it."""
WARMUP_TOKENS = 16
"""New tokens of the `generate` that is not counted: a whole one would double the time of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    prompts: int
    samples: int
    """Of each prompt."""
    prompt_tokens: int
    new_tokens: int

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def num_tokens(self) -> int:
        return self.rows * self.new_tokens

    def __str__(self) -> str:
        shared = f"{self.prompts} × {self.samples}"
        return f"{self.model}, {shared}, {self.prompt_tokens} + {self.new_tokens}"


BATCH = Case(model="qwen3-0.6b", prompts=64, samples=4, prompt_tokens=128, new_tokens=256)
SMALL = Case(model="smollm2-135m", prompts=8, samples=2, prompt_tokens=32, new_tokens=32)
CASES = {
    "cuda": (
        BATCH,
        replace(BATCH, model="smollm2-135m", prompts=128),
        replace(BATCH, prompts=1, samples=1, new_tokens=128),
        replace(BATCH, prompts=8, samples=1, new_tokens=128),
    ),
    "cpu": (SMALL, replace(SMALL, prompts=1, samples=1)),
}


VLLM_SHAPES = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
GRID = [
    (rows, prompt_tokens, new_tokens)
    for prompt_tokens, new_tokens in ((128, 256), (2048, 1024))
    for rows in (1, 8, 64, 256, 512)
]
"""Rows from 64 on are groups of four samples of a prompt, as in a rollout."""


def grid_cases(model: str, args: argparse.Namespace) -> tuple[Case, ...]:
    return tuple(
        Case(
            model=model,
            prompts=rows // 4 if rows >= 64 else rows,
            samples=4 if rows >= 64 else 1,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
        )
        for rows, prompt_tokens, new_tokens in GRID
        if args.min_rows <= rows <= args.max_rows
        and rows * (prompt_tokens + new_tokens) <= args.max_positions
    )


def run_vllm(paths: str, model: str, cases: Sequence[Case], *, limit: float) -> dict[str, Any]:
    """vLLM's results of these cases, those that it had when the time ran out included."""
    with tempfile.TemporaryDirectory() as folder:
        todo, out = Path(folder) / "cases.json", Path(folder) / "out.json"
        todo.write_text(json.dumps([asdict(case) for case in cases]))
        command = [sys.executable, str(BENCHMARKS / "vllm_side.py"), "--model", model]
        command += ["--cases", str(todo), "--out", str(out)]
        path = os.pathsep.join([paths, str(BENCHMARKS.parent / "src")])
        try:
            subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=limit)
        except subprocess.TimeoutExpired:
            print(f"vLLM: stopped after {limit:.0f} s", flush=True)
        return json.loads(out.read_text()) if out.exists() else {"failed": True, "cases": []}


class NullTokenizer:
    """A tokenizer for ids that are never decoded."""

    eos_token_id = NO_EOS

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""


# ── the clock ────────────────────────────────────────────────────────────────────────────────────


def fastest(call: Callable[[], Any], device: torch.device, *, times: int) -> float:
    """Seconds of the fastest of several calls."""
    return min(time_call(call, device) for _ in range(times))


def bandwidth(device: torch.device) -> float:
    """Bytes a second, reading."""
    values = torch.ones(2**28 if device.type == "cuda" else 2**26, device=device)

    def read() -> None:
        for _ in range(8):
            values.sum()

    read()
    return 8 * values.numel() * values.element_size() / fastest(read, device, times=3)


def _reset(device: torch.device) -> None:
    free_memory(device.type)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated() + hidden_in_graphs()) / GIB


# ── one case ─────────────────────────────────────────────────────────────────────────────────────


def measure(case: Case, args: argparse.Namespace, *, rate: float) -> dict[str, Any]:
    """`rate`: memory bandwidth in bytes per second."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(case.model, device, torch.float32 if args.trained else dtype)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(SEED)
    size = (case.prompts, case.prompt_tokens)
    prompts_PN = torch.randint(0, model.config.vocab_size, size, generator=generator)
    engine = LocalEngine(
        model,
        NullTokenizer(),
        name=case.model,
        autocast=dtype if args.trained and dtype != torch.float32 else None,
        max_batch_tokens=cache_capacity(model, dtype, device),
    )
    floor = floor_seconds(model, case, dtype, rate)
    row: dict[str, Any] = {"case": asdict(case), "rows": case.rows}
    if args.generate:
        row["generate"] = generated(engine, prompts_PN.to(device), case, args)
    row["ours"] = sampled(engine, prompts_PN, case, args)
    row["floor"] = {"seconds": floor, "tokens_per_second": case.num_tokens / floor}
    ours = row["ours"]["tokens_per_second"]
    row["ours_over"] = {
        side: ours / row[side]["tokens_per_second"] for side in ("generate", "floor") if side in row
    }
    return row


def generated(
    engine: LocalEngine, prompts_PN: torch.Tensor, case: Case, args: argparse.Namespace
) -> dict[str, Any]:
    ids_BN = prompts_PN.repeat_interleave(case.samples, 0)
    settings = {"do_sample": True, "top_k": 0, "use_cache": True, "pad_token_id": 0}

    def generate(count: int) -> None:
        with torch.no_grad(), engine.autocast_context():
            out_BL = engine.model.generate(
                ids_BN, max_new_tokens=count, min_new_tokens=count, **settings
            )
        if out_BL.shape != (case.rows, case.prompt_tokens + count):
            raise SystemExit(
                f"{case}: generate returned {tuple(out_BL.shape)}: that is another job"
            )

    count = args.generate_tokens or case.new_tokens
    generate(min(WARMUP_TOKENS, count))
    _reset(engine.device)
    took = fastest(lambda: generate(count), engine.device, times=1)
    return {
        "new_tokens": count,
        "seconds": took,
        "tokens_per_second": case.rows * count / took,
        "peak_gib": _peak(engine.device),
    }


def sampled(
    engine: LocalEngine, prompts_PN: torch.Tensor, case: Case, args: argparse.Namespace
) -> dict[str, Any]:
    requests = [
        SampleRequest(prompt_ids=tuple(prompt), seed=case.samples * i + n)
        for i, prompt in enumerate(prompts_PN.tolist())
        for n in range(case.samples)
    ]
    sampling = Sampling(max_new_tokens=case.new_tokens)

    def sample() -> int:
        return sum(len(sample.token_ids) for sample in engine.sample(requests, sampling))

    _reset(engine.device)
    # Captures the graphs: its memory counts, not its time.
    began = time.perf_counter()
    num_tokens = sample()
    first = time.perf_counter() - began
    if num_tokens != case.num_tokens:
        raise SystemExit(f"{case}: we sampled {num_tokens} tokens: that is another job")
    took = first if first > LONG_SECONDS else fastest(sample, engine.device, times=args.times)
    peak = _peak(engine.device)
    if args.profile:
        profile(sample, engine.device)
    return {
        "seconds": took,
        "first_seconds": first,
        "tokens_per_second": case.num_tokens / took,
        "peak_gib": peak,
    }


def layer_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the KV cache per position, in one layer."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_key_value_heads * size * dtype.itemsize


def layer_types(config: Any) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def position_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the KV cache per position, in all layers with attention."""
    attention = [kind for kind in layer_types(config) if kind != "linear_attention"]
    return len(attention) * layer_bytes(config, dtype)


def cache_capacity(model: Any, dtype: torch.dtype, device: torch.device) -> int:
    """Positions of the KV cache: three quarters of the free memory, as vLLM takes most of it."""
    if device.type != "cuda":
        return 2**21
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return int(0.75 * free) // position_bytes(model.config, dtype)


def floor_seconds(model: Any, case: Case, dtype: torch.dtype, rate: float) -> float:
    weights = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    average = case.prompt_tokens + case.new_tokens / 2
    positions = {
        "full_attention": average,
        "sliding_attention": min(average, getattr(model.config, "sliding_window", None) or average),
        "linear_attention": 0,  # its states are small beside the weights
    }
    each_row = sum(positions[kind] for kind in layer_types(model.config))
    cache = case.rows * each_row * layer_bytes(model.config, dtype)
    return float((weights + cache) / rate * case.new_tokens)


def profile(job: Callable[[], Any], device: torch.device) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profiling(activities=kinds) as profiler:
        time_call(job, device)
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60))


# ── all ──────────────────────────────────────────────────────────────────────────────────────────

HEADINGS = (
    "| model, prompts × samples, tokens | ours, tokens/s | ours / generate | ours / floor "
    "| peak, GiB: ours | generate |\n|---|---|---|---|---|---|"
)


def line(case: Case, row: dict[str, Any]) -> str:
    over = row["ours_over"]
    times = f"{over['generate']:.2f}" if "generate" in over else "–"
    if "generate" in row and row["generate"]["new_tokens"] != case.new_tokens:
        times += f" (its first {row['generate']['new_tokens']} tokens)"
    peaks = [row.get(side, {}).get("peak_gib") for side in ("ours", "generate")]
    cells = ["–" if peak is None else f"{peak:.2f}" for peak in peaks]
    rate = f"{row['ours']['tokens_per_second']:,.0f}"
    return f"| {case} | {rate} | {times} | {over['floor']:.2f} | {cells[0]} | {cells[1]} |"


def parse() -> tuple[argparse.Namespace, tuple[Case, ...]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    group = parser.add_argument_group(
        "one case of your own", "any of these; what is not given is the first case's"
    )
    group.add_argument("--model", choices=NAMES)
    group.add_argument("--prompts", type=int)
    group.add_argument("--samples", type=int, help="of each prompt")
    group.add_argument("--prompt-tokens", type=int)
    group.add_argument("--new-tokens", type=int)
    parser.add_argument("--generate-tokens", type=int, help="fewer, for the side that is slow")
    parser.add_argument("--no-generate", dest="generate", action="store_false")
    parser.add_argument("--trained", action="store_true", help="float32 weights under autocast")
    parser.add_argument("--times", type=int, default=2, help="of ours, the fastest counts")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--vllm", help="folders that vLLM is imported from, as in PYTHONPATH")
    parser.add_argument("--vllm-limit", type=float, default=420, help="seconds for its side")
    parser.add_argument("--shapes", nargs="+", choices=NAMES, help="on the grid")
    parser.add_argument("--min-rows", type=int, default=1, help="of the grid")
    parser.add_argument("--max-rows", type=int, default=512, help="of the grid")
    parser.add_argument("--max-positions", type=int, default=2**21,
                        help="rows × tokens of a cell: longer cells take minutes")  # fmt: skip
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.out = args.out or BENCHMARKS / "results" / f"sampling_{args.device}.json"
    names = [field.name for field in fields(Case)]
    options = {name: value for name in names if (value := vars(args).pop(name)) is not None}
    cases = CASES[args.device]
    return args, (replace(cases[0], **options),) if options else cases


def main() -> None:
    args, cases = parse()
    began = time.perf_counter()
    rate = bandwidth(torch.device(args.device))
    rows: list[dict[str, Any]] = []
    result = {
        **about("sampling", args),
        "bandwidth_gb_per_second": rate / 1e9,
        "cases": rows,
    }
    peers: dict[Case, dict[str, Any]] = {}
    shapes = args.shapes or (VLLM_SHAPES if args.vllm else ())
    if shapes:
        cases = tuple(case for model in shapes for case in grid_cases(model, args))
    if args.vllm:
        args.generate = False
        for model in shapes:
            grid = grid_cases(model, args)
            side = run_vllm(args.vllm, model, grid, limit=args.vllm_limit)
            result.setdefault("vllm", {})[model] = {k: side[k] for k in side if k != "cases"}
            peers |= dict(zip(grid, side["cases"], strict=False))
    print(HEADINGS, flush=True)
    for case in cases:
        try:
            rows.append(measure(case, args, rate=rate))
        except (RuntimeError, AssertionError) as error:
            rows.append({"case": asdict(case), "failed": f"{type(error).__name__}: {error}"})
            print(f"{case}: {rows[-1]['failed']}", flush=True)
            continue
        if case in peers:
            ours = rows[-1]["ours"]["tokens_per_second"]
            rows[-1]["vllm"] = peers[case]
            rows[-1]["ours_over"]["vllm"] = ours / peers[case]["tokens_per_second"]
            print(f"{case}: ours / vLLM {rows[-1]['ours_over']['vllm']:.2f}", flush=True)
        print(line(case, rows[-1]), flush=True)
        result["wall_seconds"] = time.perf_counter() - began
        store(args.out, result)  # what there is, if time runs out
    print(f"{args.out}, {result['wall_seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
