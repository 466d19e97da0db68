"""Writes the table of planned peaks in docs/sizes-and-hardware.md, from `courtside plan`.

With `--check` nothing is written: it exits with 1 if the table is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from courtside.planning.gpus import GIB
from courtside.planning.plan import plan
from courtside.recipe.load import parse_recipe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sizes-and-hardware.md"
TABLE = re.compile(r"(<!-- planned sizes -->\n).*?(<!-- /planned sizes -->)", re.S)
MODELS = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
GPUS = {24: 23.5, 48: 44.4, 80: 79.1, 141: 139.8}
"""Sold as so many GB → GiB that a process can have."""
LORA, QLORA = {"rank": 32}, {"rank": 32, "base_dtype": "nf4"}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "all weights": ({}, "bfloat16"),
    "LoRA": ({"lora": LORA}, "bfloat16"),
    "QLoRA": ({"lora": QLORA}, "nf4"),
}
"""Heading → fields of [student], and the dtype of a second model as the teacher."""


def peak_gib(model: str, student: dict[str, Any], teacher: str | None) -> float:
    name = f"Qwen/Qwen3-{model}"
    live = {"kind": "self", "weights": "live", "context": {"kind": "system", "text": "Be brief."}}
    other = {"kind": "model", "model": name, "dtype": teacher}
    recipe = parse_recipe(
        {
            "student": {"model": name, "gradient_checkpointing": True, **student},
            "tasks": {"kind": "arithmetic"},
            "rollout": {
                "samples_per_prompt": 4, "max_new_tokens": 512, "kv_cache_tokens": 16384,
            },
            "teacher": live if teacher is None else other,
            "losses": [{"kind": "divergence"}],
            "train": {
                "prompts_per_step": 16, "micro_batch_tokens": 4096,
                "optimizer_offload": "lora" not in student,
            },
        }
    )  # fmt: skip
    return plan(recipe, gpu="h200", prompt_tokens=128).estimate.peak.total / GIB


def table_lines() -> Iterator[str]:
    headings = [f"{name}{more}" for name in SETTINGS for more in ("", " + teacher")]
    yield "| Qwen3's shape | " + " | ".join(headings) + " |"
    yield "|---|" + "---|" * len(headings)
    for model in MODELS:
        cells = []
        for student, teacher_dtype in SETTINGS.values():
            for teacher in (None, teacher_dtype):
                gib = peak_gib(model, student, teacher)
                fits = next((f"{size} GB" for size, limit in GPUS.items() if gib <= limit), "none")
                cells.append(f"{gib:.0f} → {fits}")
        yield f"| {model} | " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only report what is out of date")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join(table_lines()) + "\n"
    new = TABLE.sub(lambda match: match[1] + table + match[2], text)
    if new != text and not check:
        PAGE.write_text(new, encoding="utf-8")
    elif new != text:
        print(f"{PAGE.name}: the planned sizes are out of date; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
