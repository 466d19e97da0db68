"""Writes the table of planned splits in docs/operations.md, and what one of its commands prints.

With `--check` nothing is written: it exits with 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from courtside.cli.app import app
from courtside.planning.gpus import GIB
from courtside.planning.plan import CostPlan, plan
from courtside.recipe.load import load_recipe
from courtside.report.summary import format_duration

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "operations.md"
FOLDER = REPOSITORY / "examples" / "cluster"
LENGTHS = {"prompt_tokens": 200.0, "new_tokens": 1000.0}
TABLE = re.compile(r"(<!-- planned cluster -->\n).*?(<!-- /planned cluster -->)", re.S)
OUTPUT = re.compile(r"(<!-- plan output -->\n).*?(<!-- /plan output -->)", re.S)
WITHOUT_SERVERS = (
    'teacher.kind="model"', 'teacher.model="Qwen/Qwen3-32B"', 'teacher.dtype="int8"',
    "teacher.server=null", "student.lora.rank=32", "losses.0.support=null",
)  # fmt: skip
SLURM_URLS = ", ".join(f'"http://node0:{8000 + i}"' for i in range(4))
LARGE = {"shape": "llama-3.1-70b", "teacher_shape": "llama-3.1-70b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A row of the table."""

    name: str
    recipe: str
    overrides: Sequence[str] = ()
    gpus: int = 1
    rollout_gpus: int | None = None
    teacher_gpus: int | None = None
    is_large: bool = False

    def plan(self) -> CostPlan:
        shapes = LARGE if self.is_large else {}
        return plan(
            load_recipe(FOLDER / self.recipe, self.overrides),
            gpu="h200", num_gpus=self.gpus, rollout_gpus=self.rollout_gpus,
            teacher_gpus=self.teacher_gpus, **LENGTHS, **shapes,
        )  # fmt: skip


SPLITS = (
    Split(name="8B LoRA, 32B int8, one GPU", recipe="recipe.toml", overrides=WITHOUT_SERVERS),
    Split(name="8B, 32B, one node", recipe="recipe.toml", gpus=4, teacher_gpus=4),
    Split(name="8B LoRA, 32B, one node", recipe="lora.toml", rollout_gpus=3, teacher_gpus=4),
    Split(name="8B, 32B, three nodes", recipe="recipe.toml", gpus=16, teacher_gpus=8,
          overrides=(f"teacher.server.urls=[{SLURM_URLS}]",)),
    Split(name="70B LoRA, 70B, on paper", recipe="lora.toml", gpus=8, rollout_gpus=12,
          teacher_gpus=8, is_large=True),
    Split(name="70B, 70B, on paper", recipe="lora.toml", overrides=("student.lora=null",),
          gpus=32, rollout_gpus=24, teacher_gpus=16, is_large=True),
)  # fmt: skip


def table_lines() -> Iterator[str]:
    yield (
        "| student, teacher | GPUs: train + rollout + teacher | rollout | teacher | update | step "
        "| GiB of a training GPU | GPU hours, 150 steps |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for split in SPLITS:
        result = split.plan()
        assert result.fits or split.is_large, split.name
        seconds = {phase.name: phase.seconds for phase in result.estimate.phases}
        numbers = [
            f"{split.gpus}",
            *(f"{n or 0}" for n in (split.rollout_gpus, split.teacher_gpus)),
        ]
        phases = [format_duration(seconds[name]) for name in ("rollout", "teacher", "update")]
        yield " | ".join([
            f"| {split.name}", " + ".join(numbers), *phases,
            format_duration(result.estimate.step_seconds),
            f"{result.estimate.peak.total / GIB:.0f}{'' if result.fits else ', does not fit'}",
            f"{result.gpu_hours:.0f} |",
        ])  # fmt: skip


def print_plan() -> str:
    options = ["--gpus", "4", "--teacher-gpus", "4", "--prompt-tokens", "200"]
    arguments = ["plan", str(FOLDER / "recipe.toml"), *options, "--new-tokens", "1000"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"}, catch_exceptions=False)
    lines = [line.rstrip() for line in result.output.strip().splitlines()]
    return "\n".join(["```text", *lines, "```"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only report what is out of date")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    new = text
    for pattern, part in ((TABLE, "\n".join(table_lines())), (OUTPUT, print_plan())):
        new = pattern.sub(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", new)
    if new != text and not check:
        PAGE.write_text(new, encoding="utf-8")
    elif new != text:
        print(f"{PAGE.name}: the planned splits are out of date; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
