"""Sampling in process against transformers' own generate and against the memory's bandwidth.

Random weights of a given shape, prompts of one length, so many samples of each; no row ends early,
so both sides write the same number of tokens. The floor of one token a row is the time in which the
weights and the keys and values that exist by then can be read once; the bandwidth is measured in
the same run.

    python benchmarks/sampling.py --device cuda                      # 256 rows × 256 tokens
    python benchmarks/sampling.py --device cuda --model smollm2-135m --prompts 128
    python benchmarks/sampling.py --device cuda --profile            # where a step's time goes
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hint_scoring import shape
from opd_step import GIB, commit, hardware

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.transformers import TransformersEngine

NO_EOS = -1


class Words:
    """A tokenizer for ids that nobody reads."""

    eos_token_id = NO_EOS

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""


def seconds(job: Any, device: torch.device, *, times: int) -> float:
    """The fastest of several, after one that is not counted."""
    found = []
    for _ in range(times + 1):
        _wait(device)
        began = time.perf_counter()
        job()
        _wait(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: torch.device) -> float:
    """Bytes a second, reading."""
    there = torch.ones(2**28 if device.type == "cuda" else 2**26, device=device)
    took = seconds(lambda: [there.sum() for _ in range(8)], device, times=3)
    return 8 * there.numel() * there.element_size() / took


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    master = torch.float32 if args.trained else dtype
    with device:
        model = shape(args.model).to(master).eval()
    model.generation_config.eos_token_id = None
    autocast = dtype if args.trained and dtype != torch.float32 else None
    engine = TransformersEngine(
        model,
        Words(),
        name=args.model,
        autocast=autocast,
        max_batch_tokens=2**21,  # type: ignore[arg-type]
    )
    made = torch.Generator().manual_seed(1)
    words = model.config.vocab_size
    prompts = torch.randint(0, words, (args.prompts, args.prompt_tokens), generator=made).tolist()
    requests = [
        SampleRequest(prompt_ids=tuple(prompt), seed=args.samples * i + n)
        for i, prompt in enumerate(prompts)
        for n in range(args.samples)
    ]
    sampling = Sampling(max_new_tokens=args.new_tokens)
    count = len(requests) * args.new_tokens
    _reset(device)
    ours = seconds(lambda: engine.sample(requests, sampling), device, times=args.times)
    peak = _peak(device)
    if args.profile:
        profile(lambda: engine.sample(requests, sampling), device)
    found = {
        "ours": {"seconds": ours, "tokens_per_second": count / ours, "peak_gib": peak},
        "floor": floor(model, args, len(requests), dtype, device),
    }
    if args.generate:
        ids_BN = torch.tensor(prompts, device=device).repeat_interleave(args.samples, 0)
        settings = {"do_sample": True, "top_k": 0, "use_cache": True, "pad_token_id": 0}
        few = args.generate_tokens or args.new_tokens
        _reset(device)

        def generate() -> None:
            with torch.no_grad(), engine.casting():
                model.generate(ids_BN, max_new_tokens=few, min_new_tokens=few, **settings)

        took = seconds(generate, device, times=1)
        found["generate"] = {
            "new_tokens": few,
            "seconds": took,
            "tokens_per_second": len(requests) * few / took,
            "peak_gib": _peak(device),
        }
    return found


def floor(
    model: Any, args: argparse.Namespace, rows: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    rate = bandwidth(device)
    config = SimpleNamespace(**model.config.to_dict())
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_place = 2 * config.num_hidden_layers * config.num_key_value_heads * size * dtype.itemsize
    weights = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    average = args.prompt_tokens + args.new_tokens / 2
    step = (weights + rows * average * per_place) / rate
    return {
        "bandwidth_gb_per_second": rate / 1e9,
        "seconds": step * args.new_tokens,
        "tokens_per_second": rows / step,
    }


def profile(job: Any, device: torch.device) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profiling(activities=kinds) as found:
        job()
        _wait(device)
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60))


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--generate-tokens", type=int, help="fewer, for the side that is slow")
    parser.add_argument("--no-generate", dest="generate", action="store_false")
    parser.add_argument("--trained", action="store_true", help="float32 weights under autocast")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args)
    ours = found["ours"]["tokens_per_second"]
    for name, side in found.items():
        rate = side["tokens_per_second"]
        print(f"{name:9} {rate:10,.0f} tokens/s   ours is {ours / rate:.2f} of it", flush=True)
    if args.out is not None:
        about = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "hardware": hardware(),
            "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
            "versions": {name: version(name) for name in ("torch", "transformers")},
        }
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        rows = json.loads(args.out.read_text()) if args.out.exists() else []
        rows.append({**about, "settings": settings, **found})
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
