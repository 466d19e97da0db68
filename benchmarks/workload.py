"""The one job that every side of the step benchmark does, and how it is measured. No torch here.

A side is a script that takes the arguments of `side_parser`, does `warmup + repeats` steps of this
job and writes one `SideResult` as JSON. The driver, `opd_step.py`, knows nothing else about it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
GIB = 2**30
SEED = 0
NEW_TOKENS = 64
TEMPERATURE = 1.0
BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
LORA_ALPHA_PER_RANK = 2.0
LEARNING_RATE = {"full": 1e-5, "lora": 1e-4}
LORA_RANK = {"full": None, "lora": 32}
DTYPES = ("float32", "bfloat16")
"""Of the matmuls; weights and optimizer are float32 in both."""

END_TOKEN = "<filename>"
"""Stands in for the model's end token, on both sides, so that every sample has its full length:
the model gives it a probability of about 1e-8, and both sides still pay for looking out for it."""

TEACHER_NOISE = 0.1
"""The teacher is the student plus Gaussian noise of this share of each tensor's standard deviation.
A teacher equal to the student would give a loss of zero, which proves nothing."""

PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about rain on a tin roof.",
    "List three uses for an old newspaper.",
    "What is the capital of Australia, and why is it not Sydney?",
    "Explain to a ten-year-old how a bicycle stays upright when it moves, without using the word "
    "physics.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show each step "
    "of the calculation and then give the answer on a line of its own.",
    "Rewrite this sentence so that it is polite: Send me the report now, you are late again and "
    "everybody is waiting for it.",
    "Give me a recipe for a soup with lentils, carrots and lemon. It should take less than forty "
    "minutes, need only one pot, and serve four people. Say how to store what is left over.",
    "Summarise the following in one sentence. The harbour was built in 1871 to ship slate from the "
    "quarries above the town. When the quarries closed in the sixties the harbour silted up, and "
    "for twenty years only a few fishing boats used it. Today it is dredged every spring and has "
    "berths for ninety yachts, whose owners spend most of their money in the next town.",
    "Write a Python function that takes a list of integers and returns the second largest distinct "
    "value, or None when there is no such value. Add a docstring and two examples.",
    "Translate into plain English: notwithstanding the foregoing, the party of the first part "
    "shall be under no obligation to remedy any defect of which it has had no written notice.",
    "Here are some notes from a meeting. Turn them into a short list of actions with a name and a "
    "date for each. Anna will call the printer on Monday about the missing pages. We still need a "
    "room for the twelfth; Ben knows somebody at the library and will ask before Friday. The "
    "budget is almost spent, so Chris should check with the office whether the travel costs can "
    "be paid next year, and report at the next meeting on the twentieth.",
    "What should I look for when I buy a used car?",
    "Tell a story of five sentences about a lighthouse keeper who learns to play the violin.",
    "Compare tea and coffee: where they come from, how they are made, how much caffeine a cup "
    "holds, and when in the day people usually drink them. Use a table with two columns.",
    "I have a balcony that faces north, two metres wide and one deep, with strong wind from the "
    "west in autumn. I would like to grow something that I can eat. I can water it twice a week, "
    "and I do not want to spend more than fifty euros on pots, soil and plants. What would you "
    "plant, in which order, and what are the three mistakes that beginners make most often?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    seconds: float
    """Wall clock from the end of the step before (or the start of training) to the end of this."""
    cpu_seconds: float
    """Of all threads together; less disturbed by other programs than the wall clock."""
    phases: dict[str, float]
    """Seconds in rollout, teacher (its forward pass) and update (everything else)."""
    loss: float
    num_trained_tokens: int
    peak_rss: int
    """Bytes; the process' high-water mark when the step ended."""
    gpu_peaks: dict[str, int] = field(default_factory=dict)
    """Bytes of GPU memory at the most, by phase; empty on a CPU."""
    num_device_allocs: int = 0
    """How often the GPU's driver was asked for memory."""
    num_sampled_tokens: int | None = None
    num_hints: int | None = None
    """Those that train. None: not counted, like the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideResult:
    side: str
    config: str
    num_warmup: int
    steps: tuple[StepResult, ...]
    """All steps, those of the warm-up first."""
    num_prompt_tokens: int
    prompts_hash: str
    """Of the sorted token ids of the prompts: equal hashes mean that both sides saw the same."""
    num_trainable: int
    load_peak_rss: int
    """High-water mark when loading was done, before the first step."""
    num_threads: int
    versions: dict[str, str]
    settings: dict[str, object] = field(default_factory=dict)
    dtype: str = "float32"
    """Of the matmuls."""
    check: CheckResult | None = None
    """Of a fixed batch, where the side was told to look at one before its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Loss and gradient of one fixed batch, by the code that the side trains with."""

    side: str
    loss: float
    num_tokens: int
    gradient_norm: float
    gradient_norms: dict[str, float]
    """Of the tensors in `CHECKED_TENSORS`."""
    reference_loss: float | None = None
    """The same mean KL, from whole logits in float64."""


CHECKED_TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.29.mlp.down_proj.weight",
)


def side_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--student", type=Path, required=True, help="folder of the student")
    parser.add_argument("--teacher", type=Path, required=True, help="folder of the teacher")
    parser.add_argument("--config", choices=("full", "lora"), default="full")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the matmuls")
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not counted")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--check",
        type=Path,
        help="no steps: loss and gradient of the batch in this JSON file, which TRL's side samples",
    )
    return parser


def write_json(path: Path, record: SideResult | CheckResult) -> None:
    path.write_text(json.dumps(asdict(record), indent=1))


def store(out: Path, result: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def provenance(benchmark: str) -> dict[str, Any]:
    """The first fields of every result."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": describe_commit(),
    }


def describe_commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        description = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "no git"
    return description.stdout.strip() or "not a checkout"


def prompts_hash(prompts: Iterable[Sequence[int]]) -> str:
    text = json.dumps(sorted([int(i) for i in ids] for ids in prompts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def peak_rss(pid: int | str = "self") -> int:
    """The high-water mark of a process' resident memory, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no VmHWM: the process ended, or this is not Linux")


class PhaseClock:
    """Seconds per named phase; a phase inside another is taken out of the outer one."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            total = time.perf_counter() - start
            inner = self._inner.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + total - inner
            if self._inner:
                self._inner[-1] += total

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class StepTimer:
    """Wall and CPU time of one step after the other."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> dict[str, float]:
        """The times of `StepResult` since the start or the last lap."""
        wall, cpu = self._wall, self._cpu
        self.start()
        return {"seconds": self._wall - wall, "cpu_seconds": self._cpu - cpu}
