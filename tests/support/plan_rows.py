"""Estimates of `courtside plan` beside what benchmarks measured, row by row, and as tables for
docs/plan.md (`python tests/support/plan_rows.py` prints them)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from courtside.planning.estimate import estimate
from courtside.planning.gpus import (
    CPU_CORE_BANDWIDTH,
    CPU_CORE_FLOPS,
    GIB,
    GPUS,
    Device,
    this_cpu,
)
from courtside.planning.memory import CUDA_CONTEXT, PhaseMemory
from courtside.planning.presets import PRESETS
from courtside.planning.timing import GPU_UTILISATION, rollout_seconds
from courtside.planning.workload import Lengths, Workload, plan_models
from courtside.recipe.load import parse_recipe

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
STEP_FILES = ("opd_step_gpu_h200", "opd_step_gpu_1.7b_h200", "opd_step_gpu_vllm_h200")
SAMPLING_FILES = (
    "sampling_h200", "sampling_vllm_0.6b_h200", "sampling_vllm_4b_h200",
    "sampling_vllm_4b_few_rows_h200", "sampling_vllm_8b_few_rows_h200", "sampling_8b_h200",
)  # fmt: skip
PHASES = ("rollout", "teacher", "update")
SAMPLING_KV_TOKENS = 2**19
"""The KV cache of the sampling benchmark."""
REVERSE_KL = {"kind": "divergence"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number, estimated and measured."""

    name: str
    what: str
    """A phase, `step`, or `peak`."""
    estimated: float
    measured: float

    @property
    def deviation(self) -> float:
        return self.estimated / self.measured - 1


def _merge(tree: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    for path, value in overrides.items():
        section, key = path.split(".", 1)
        tree.setdefault(section, {})[key] = value
    return tree


def distillation_work(
    student: str,
    teacher: str,
    lengths: Lengths,
    *,
    prompts: int,
    samples: int,
    device: Device,
    dtype: str = "bfloat16",
    **overrides: Any,
) -> Workload:
    tree: dict[str, Any] = {
        "student": {"model": student, "dtype": dtype},
        "tasks": {"kind": "arithmetic"},
        "rollout": {"samples_per_prompt": samples, "max_new_tokens": int(lengths.new)},
        "teacher": {"kind": "model", "model": teacher, "dtype": dtype},
        "train": {"prompts_per_step": prompts},
        "losses": [REVERSE_KL],
    }
    recipe = parse_recipe(_merge(tree, {k.replace("__", "."): v for k, v in overrides.items()}))
    models = plan_models(recipe, PRESETS[student], {teacher: PRESETS[teacher]}, device)
    return Workload(recipe=recipe, models=models, lengths=lengths, device=device)


def hints_work(student: str, job: Mapping[str, Any], **overrides: Any) -> Workload:
    """The benchmark's episodes: four turns, a tool's message between two, two hints."""
    turns, frame, num_hints = 4, 6, 2
    turn = job["new_tokens"] // turns
    lengths = Lengths(
        prompt=job["prompt_tokens"], new=job["new_tokens"], turns=turns, trained=num_hints * turn,
        observed=(turns - 1) * (job["tool_tokens"] + frame),
        context=num_hints * (job["hint_tokens"] + frame + turn),
    )  # fmt: skip
    rule = {"detect": "event", "event": "off_course", "hint": "{advice}"}
    tree: dict[str, Any] = {
        "student": {"model": student},
        "tasks": {"kind": "environment", "path": "episodes:World"},
        "rollout": {
            "samples_per_prompt": job["samples"], "max_new_tokens": turn,
            "limits": {"turns": turns, "tokens": int(lengths.sequence)},
        },
        "reader": {"kind": "rules", "rules": [rule]},
        "hints": {"harmful": "train"},
        "teacher": {"kind": "self", "weights": "live"},
        "losses": [REVERSE_KL | {"on": "hinted_turns"}],
        "train": {"prompts_per_step": job["prompts"]},
    }  # fmt: skip
    recipe = parse_recipe(_merge(tree, {k.replace("__", "."): v for k, v in overrides.items()}))
    models = plan_models(recipe, PRESETS[student], {}, GPUS["h200"])
    return Workload(recipe=recipe, models=models, lengths=lengths, device=GPUS["h200"])


def _read(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return tree


def _rows_of(
    name: str, work: Workload, phases: Mapping[str, float], peaks: Mapping[str, float]
) -> Iterator[Row]:
    result = estimate(work)
    seconds = {phase.name: phase.seconds for phase in result.phases}
    for phase in PHASES:
        if phases[phase] >= 0.5:
            yield Row(
                name=name, what=f"{phase}, s", estimated=seconds[phase], measured=phases[phase]
            )
    step = sum(phases.values())
    yield Row(name=name, what="step, s", estimated=result.step_seconds, measured=step)
    memory = {phase.phase: phase for phase in result.memory}
    for phase in PHASES:
        tensors = _without_context(memory[phase]) / GIB
        yield Row(name=name, what=f"{phase}, GiB", estimated=tensors, measured=peaks[phase] / GIB)
    peak = max(map(_without_context, result.memory)) / GIB
    yield Row(name=name, what="peak, GiB", estimated=peak, measured=max(peaks.values()) / GIB)


def _without_context(memory: PhaseMemory) -> float:
    """The benchmark's peaks are torch's own, without what CUDA takes."""
    return memory.total - CUDA_CONTEXT


def step_rows() -> list[Row]:
    """One distillation step on an H200, all weights trained, with the defaults and lean."""
    rows: list[Row] = []
    for number, file in enumerate(STEP_FILES):
        tree = _read(file)
        job = {"tool_tokens": 16, "hint_tokens": 32, **tree["job"]}
        for side in tree["summary"]:
            if side["side"] not in ("courtside", "courtside_lean", "hints", "hints_lean"):
                continue
            overrides: dict[str, Any] = {}
            length = job["prompt_tokens"] + job["new_tokens"]
            is_hinted = side["side"].startswith("hints")
            if is_hinted:
                length += 3 * (job["tool_tokens"] + 6)
            if side["side"].endswith("lean"):
                overrides = {
                    "student__gradient_checkpointing": True,
                    "train__optimizer_offload": True,
                    "rollout__kv_cache_tokens": job["prompts"] * job["samples"] // 2 * length,
                }
            student = f"qwen3-{side['shape']}"
            if is_hinted:
                work = hints_work(student, job, **overrides)
            else:
                work = distillation_work(
                    student, "qwen3-1.7b",
                    Lengths(prompt=job["prompt_tokens"], new=job["new_tokens"]),
                    prompts=job["prompts"], samples=job["samples"], device=GPUS["h200"],
                    **overrides,
                )  # fmt: skip
            suffix = {"courtside": "", "courtside_lean": ", lean", "hints": ", hints",
                      "hints_lean": ", hints, lean"}[side["side"]]  # fmt: skip
            repeat = ", again" if number == 2 else ""
            name = f"{side['shape'].upper()}{suffix}{repeat}"
            rows += _rows_of(name, work, side["phases"], side["gpu_peaks"])
    return rows


def long_episode_rows() -> list[Row]:
    """Hints scored and trained in one episode of 32,463 tokens; nothing is sampled."""
    tree = _read("long_episode_h200")
    num_new, turns = tree["num_completion_tokens"], tree["settings"]["turns"]
    lengths = Lengths(
        prompt=200, new=num_new, turns=turns, context=tree["num_branch_tokens"],
        observed=tree["num_tokens"] - 200 - num_new,
    )  # fmt: skip
    job = {"prompt_tokens": 128, "new_tokens": 512, "tool_tokens": 16, "hint_tokens": 64,
           "prompts": 1, "samples": 1}  # fmt: skip
    work = hints_work("qwen3-0.6b", job, student__gradient_checkpointing=True)
    result = estimate(replace(work, lengths=lengths))
    seconds = {phase.name: phase.seconds for phase in result.phases}
    memory = {phase.phase: phase for phase in result.memory}
    rows = []
    for phase, stage in (("teacher", "score"), ("update", "update")):
        parts = {**memory[phase].parts, "CUDA graphs of turns": 0.0, "CUDA context": 0.0}
        measured = tree["best"][stage]
        name = f"0.6B, one episode of {tree['num_tokens']:,} tokens"
        rows += [
            Row(name=name, what=f"{phase}, s", estimated=seconds[phase],
                measured=measured["seconds"]),
            Row(name=name, what=f"{phase}, GiB", estimated=sum(parts.values()) / GIB,
                measured=measured["peak_gib"]),
        ]  # fmt: skip
    return rows


def growth_rows() -> list[Row]:
    """Sequences of 256 tokens of 0.6B, scored and trained; nothing was fitted on these."""
    rows = []
    for series in _read("growth_h200")["series"]:
        phase = {"scoring: sequences": "teacher", "update: sequences": "update"}.get(
            series["series"]
        )
        for entry in series["rows"] if phase else ():
            work = distillation_work(
                "qwen3-0.6b", "qwen3-0.6b", Lengths(prompt=1, new=255), prompts=entry["size"],
                samples=1, device=GPUS["h200"],
            )  # fmt: skip
            result = estimate(work)
            seconds = {p.name: p.seconds for p in result.phases}[phase]
            name = f"{entry['num_tokens']:,} tokens"
            rows.append(Row(name=name, what=f"{phase}, s", estimated=seconds,
                            measured=entry["seconds"]))  # fmt: skip
            if phase == "update":
                parts = next(m for m in result.memory if m.phase == phase).parts
                added = ("gradients", "bf16 weights", "activations", "LM head and transients")
                rows.append(
                    Row(name=name, what="update, GiB added",
                        estimated=sum(parts[part] for part in added) / GIB,
                        measured=entry["memory_bytes"] / GIB)
                )  # fmt: skip
    return rows


def sampling_rows() -> list[Row]:
    """Tokens a second of sampling alone on an H200, the newest measurement of each case."""
    by_case: dict[str, Row] = {}
    for file in SAMPLING_FILES:
        for entry in _read(file)["cases"]:
            case, ours = entry["case"], entry.get("ours")
            if ours is None or case["model"] not in PRESETS:
                continue
            lengths = Lengths(prompt=case["prompt_tokens"], new=case["new_tokens"])
            work = distillation_work(
                case["model"], case["model"], lengths, prompts=case["prompts"],
                samples=case["samples"], device=GPUS["h200"],
                rollout__kv_cache_tokens=SAMPLING_KV_TOKENS,
            )  # fmt: skip
            tokens = case["prompts"] * case["samples"] * case["new_tokens"]
            estimated = tokens / rollout_seconds(work, GPU_UTILISATION)
            shape = case["model"].removeprefix("qwen3-").upper().replace("SMOLLM", "SmolLM")
            name = (
                f"{shape}, {case['prompts']} × {case['samples']}, {case['prompt_tokens']:,} + "
                f"{case['new_tokens']:,}"
            )
            row = Row(
                name=name, what="tokens/s", estimated=estimated, measured=ours["tokens_per_second"]
            )
            # 8B alone was timed once, its few rows also twice: the faster counts.
            if file == "sampling_8b_h200" and name in by_case:
                continue
            by_case[name] = row
    return list(by_case.values())


def cpu_rows() -> list[Row]:
    """One step of SmolLM2-135M on two cores."""
    rows: list[Row] = []
    tree = _read("opd_step_cpu")
    device = replace(
        this_cpu(), flops=2 * CPU_CORE_FLOPS, bandwidth=2 * CPU_CORE_BANDWIDTH, memory=24 * GIB
    )
    num_prompt_tokens = tree["processes"][0]["num_prompt_tokens"]
    for side in tree["summary"]:
        if side["side"] != "courtside":
            continue
        lora = {"student__lora": {"rank": 32}} if side["config"] == "lora" else {}
        work = distillation_work(
            "smollm2-135m", "smollm2-135m", Lengths(prompt=num_prompt_tokens / 16, new=64),
            prompts=16, samples=1, device=device, dtype=side["dtype"], **lora,
        )  # fmt: skip
        weights = "LoRA" if lora else "all weights"
        name = f"{weights}, {side['dtype']}"
        result = estimate(work)
        seconds = {phase.name: phase.seconds for phase in result.phases}
        for phase in PHASES:
            measured = side["phases_median"][phase]
            rows.append(
                Row(name=name, what=f"{phase}, s", estimated=seconds[phase], measured=measured)
            )
        step, peak = side["seconds_median"], side["peak_rss"] / GIB
        rows.append(Row(name=name, what="step, s", estimated=result.step_seconds, measured=step))
        total = result.peak.total / GIB
        rows.append(Row(name=name, what="peak, GiB", estimated=total, measured=peak))
    return rows


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """A line for each name: estimated / measured (deviation)."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(row.name for row in rows):
        cells = {row.what: row for row in rows if row.name == name}
        texts = [_cell(cells[column]) if column in cells else "–" for column in columns]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    def number(value: float) -> str:
        return (
            f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
        )

    deviation = f"{row.deviation:+.0%}".replace("-", "−").replace("+0%", "0%").replace("−0%", "0%")
    return f"{number(row.estimated)} / {number(row.measured)} ({deviation})"


TABLES = {
    "steps": lambda: markdown(
        [*step_rows(), *long_episode_rows()],
        ["rollout, s", "teacher, s", "update, s", "step, s", "rollout, GiB", "teacher, GiB",
         "update, GiB", "peak, GiB"],
    ),
    "sampling": lambda: markdown(sampling_rows(), ["tokens/s"]),
    "growth": lambda: markdown(growth_rows(), ["teacher, s", "update, s", "update, GiB added"]),
    "cpu": lambda: markdown(
        cpu_rows(), ["rollout, s", "teacher, s", "update, s", "step, s", "peak, GiB"]
    ),
}  # fmt: skip

if __name__ == "__main__":
    for name, make in TABLES.items():
        print(f"<!-- {name} -->\n{make()}\n<!-- end -->\n")
