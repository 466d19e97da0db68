"""Sampling by one and by two vLLM servers against the engine of the training process, in one run.

The same prompts, seeds and limits; each side samples once to warm up, then `--repeats` times, in
turns. Sampled tokens a second, and the ratio to the local engine. Servers of another
machine cost what the network costs; started here, they share its processors with the client.

`--steps N` then trains a LoRA of the same model with rollouts on all of them, N steps that wait for
their samples and N that are sampled one step ahead (`max_staleness = 1`), and compares the seconds
of a step. The student is its own teacher, with a system prompt, in this process.

    python benchmarks/servers.py --urls http://node1:8000 http://node2:8000 --model student
    python benchmarks/servers.py --start VLLM_PYTHON --device cpu --rows 8 --tokens 16   # two, here
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_machine import header, time_call
from workload import SEED, store

from courtside.api import train
from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.loading import load_model, load_tokenizer, resolve_model
from courtside.engines.local import LocalEngine
from courtside.engines.precision import resolve_dtype
from courtside.engines.served.engine import ServedEngine
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.probe import probe_servers
from courtside.recipe.load import parse_recipe
from courtside.recipe.server import ServerConfig
from courtside.report.console import RunConsole
from courtside.types import Sample

START_SECONDS = 600
LORA_RANK = 8
MIN_CONTEXT = 512
"""For the prompts that are trained on."""
NUM_WARMUP = 2
"""Steps of training: the first has no samples from ahead, and probes how batches are laid out."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--urls", nargs="+", default=[], help="servers that run already")
    parser.add_argument("--model", default="bench", help="the model's name on them")
    parser.add_argument("--start", type=Path, help="interpreter with vLLM: start two servers here")
    parser.add_argument(
        "--weights", default="smollm2-135m", help="folder or hub id, for both sides"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--rows", type=int, default=256, help="answers at once")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--flags",
        default="",
        help="more for servers that are started here: --flags=--enforce-eager",
    )
    parser.add_argument("--steps", type=int, default=0, help="of training, waiting and ahead")
    parser.add_argument("--prompts-per-step", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("servers.json"))
    return parser.parse_args()


@contextlib.contextmanager
def start_server(args: argparse.Namespace, dtype: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }  # fmt: skip
    adapters = ["--enable-lora", "--max-lora-rank", str(LORA_RANK), "--max-loras", "3"]
    environment.pop("PYTHONPATH", None)
    length = max(args.prompt_tokens + args.tokens + 1, MIN_CONTEXT if args.steps else 0)
    process = subprocess.Popen(
        [args.start, "-m", "vllm.entrypoints.openai.api_server",
         "--model", resolve_model(args.weights), "--served-model-name", args.model,
         "--host", "127.0.0.1", "--port", str(port),
         "--dtype", dtype, "--max-model-len", str(length), "--enable-scale-out",
         "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
         *(adapters if args.steps else []), *shlex.split(args.flags)],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"the server at {url} did not start")


def make_served(args: argparse.Namespace, urls: list[str], local: LocalEngine) -> ServedEngine:
    config = ServerConfig(urls=tuple(urls), model=args.model, max_concurrency=max(64, args.rows))
    pool = ReplicaPool(config, field="--urls")
    facts = probe_servers(pool, probe_ids=(1, 2, 3))
    return ServedEngine(
        pool, facts, name=f"{len(urls)} servers", tokenizer=local.tokenizer, eos_ids=local.eos_ids,
        vocab_size=local.head.vocab_size, context_length=local.context_length,
    )  # fmt: skip


def measure_rate(
    engine: Any, requests: list[SampleRequest], sampling: Sampling, device: torch.device
) -> float:
    """Sampled tokens a second."""
    samples: list[Sample] = []
    seconds = time_call(lambda: samples.extend(engine.sample(requests, sampling)), device)
    return sum(len(sample.token_ids) for sample in samples) / seconds


class StepClock(RunConsole):
    """When each step was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def step(self, row: Any) -> None:
        self.times.append(time.perf_counter())

    def print_line(self, text: str) -> None:
        pass


def measure_steps(args: argparse.Namespace, urls: list[str], *, max_staleness: int) -> list[float]:
    """Seconds of each step after the first ones."""
    recipe = parse_recipe(
        {
            "seed": SEED,
            "student": {"model": args.weights, "lora": {"rank": LORA_RANK}, "dtype": args.dtype,
                        "device": args.device},
            "tasks": {"kind": "arithmetic"},
            "rollout": {
                "samples_per_prompt": args.samples,
                "max_new_tokens": args.tokens,
                "server": {"urls": urls, "model": args.model, "max_staleness": max_staleness},
            },
            "teacher": {"kind": "self", "context": {"kind": "system", "text": "Think first."}},
            "losses": [{"kind": "divergence"}],
            "train": {"steps": NUM_WARMUP + args.steps, "learning_rate": 1e-4,
                      "prompts_per_step": args.prompts_per_step},
            "evaluate": {"num_tasks": 1, "before": False, "teacher": False},
            "run": {"checkpoint_every": 1000},
        }
    )  # fmt: skip
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder) / "run", console=clock)
    return [after - before for before, after in pairwise(clock.times[NUM_WARMUP - 1 :])]


def compare_overlap(args: argparse.Namespace, urls: list[str]) -> dict[str, Any]:
    waiting, ahead = (measure_steps(args, urls, max_staleness=n) for n in (0, 1))
    ratio = statistics.median(waiting) / statistics.median(ahead)
    print(f"a step that waits {statistics.median(waiting):.2f} s, sampled ahead "
          f"{statistics.median(ahead):.2f} s: {ratio:.2f} × as fast")  # fmt: skip
    return {"step_seconds": {"waiting": waiting, "ahead": ahead}, "overlapped_over_waiting": ratio}


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    result = header("servers", device) | {
        "load_before": os.getloadavg()[0],
        "seed": SEED,
        "settings": {name: str(value) for name, value in vars(args).items() if name != "out"},
    }
    dtype = resolve_dtype(args.dtype, device)
    model = load_model(args.weights, dtype=dtype, device=device)
    local = LocalEngine(model, load_tokenizer(args.weights), name="local")
    draw, vocab_size = random.Random(SEED), local.head.vocab_size
    prompts = [
        tuple(
            draw.randrange(min(1000, vocab_size // 2), vocab_size)
            for _ in range(args.prompt_tokens)
        )
        for _ in range(-(-args.rows // args.samples))
    ]
    requests = [
        SampleRequest(prompt_ids=prompts[i // args.samples], seed=i) for i in range(args.rows)
    ]
    sampling = Sampling(max_new_tokens=args.tokens)
    with contextlib.ExitStack() as stack:
        urls = args.urls or [
            stack.enter_context(start_server(args, str(dtype).removeprefix("torch.")))
            for _ in range(2)
        ]
        sides: dict[str, Any] = {"local": local, "1 server": make_served(args, urls[:1], local)}
        if len(urls) > 1:
            sides[f"{len(urls)} servers"] = make_served(args, urls, local)
        rates_of: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(-1, args.repeats):
            for name, engine in sides.items():
                rate = measure_rate(engine, requests, sampling, device)
                if repeat >= 0:
                    rates_of[name].append(rate)
        overlap = compare_overlap(args, urls) if args.steps else {}
    rates = {name: statistics.median(values) for name, values in rates_of.items()}
    for name, rate in rates.items():
        print(f"{name:10} {rate:10,.0f} tokens/s  {rate / rates['local']:.2f} × local")
    result |= overlap
    result |= {
        "repeats": rates_of,
        "tokens_per_second": rates,
        "over_local": {name: rate / rates["local"] for name, rate in rates.items()},
    }
    store(args.out, result)


if __name__ == "__main__":
    main()
