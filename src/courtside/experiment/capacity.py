"""How many runs fit on this machine at a time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from courtside.experiment.plan import Plan
from courtside.experiment.schedule import list_recipes
from courtside.recipe import Recipe

CORES_PER_CPU_RUN = 4
WORKSPACE_BYTES = 8 * 2**30
"""Of a run on a GPU beside its weights: CUDA context, KV cache, activations, logits. Runs of a
135M model with 8,192 tokens in a pass were measured 12 and 13 at a time on a GPU of 139 GiB."""
TRAINED_BYTES, FROZEN_BYTES = 18, 4
"""Of a parameter: float32 weight, gradient, two moments of AdamW and a bfloat16 copy; or its weight
alone."""
BUILTIN_PARAMETERS = {"smollm2-135m": 134_515_008}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

PROBE = """
import json, torch
from courtside.engines.cpu.threads import usable_cores
free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
print(json.dumps([usable_cores(), free]))
"""
"""In a process of its own: a CUDA context in this one would hold memory all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    num_cores: int
    free_gpu_bytes: int | None
    """None: there is no GPU."""


def inspect_machine() -> Machine:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], check=True, stdout=subprocess.PIPE, text=True
    )
    num_cores, free_gpu_bytes = json.loads(done.stdout.splitlines()[-1])
    return Machine(num_cores=num_cores, free_gpu_bytes=free_gpu_bytes)


def choose_num_workers(plan: Plan, machine: Machine) -> tuple[int, str]:
    """How many runs at a time, and why: by GPU memory and cores, or by cores alone."""
    if machine.free_gpu_bytes is None:
        return max(1, machine.num_cores // CORES_PER_CPU_RUN), f"{machine.num_cores} cores, no GPU"
    recipes = list(list_recipes(plan))
    prepared = dict(zip(plan.prepare, recipes[len(recipes) - len(plan.prepare) :], strict=True))
    models: dict[str, int | None] = {}
    for name, recipe in prepared.items():  # one may start from an earlier one
        models[str(plan.folder / name)] = count_parameters(recipe.student.model, models)
    sizes = [run_bytes(recipe, models) for recipe in recipes]
    if any(size is None for size in sizes):
        return 1, "the size of a model is not known before it is there; --jobs sets another number"
    largest = max(size for size in sizes if size is not None)
    by_memory = machine.free_gpu_bytes // largest
    reason = (
        f"{machine.free_gpu_bytes / 2**30:.0f} GiB of GPU memory, about {largest / 2**30:.0f} for "
        f"a run, {machine.num_cores} cores"
    )
    return max(1, min(by_memory, machine.num_cores)), reason


def run_bytes(recipe: Recipe, prepared: Mapping[str, int | None]) -> int | None:
    """A guess at the GPU memory of a run; None where a model is not on this machine. `prepared`:
    parameters of models that are made first, by their folder."""
    student = count_parameters(recipe.student.model, prepared)
    teachers = [
        count_parameters(teacher.model, prepared)
        for teacher in recipe.model_teachers
        if teacher.kind == "model"
    ]
    if student is None or any(size is None for size in teachers):
        return None
    trained = FROZEN_BYTES if recipe.student.lora is not None else TRAINED_BYTES
    frozen = sum(size for size in teachers if size is not None)
    if recipe.needs_reference or any(teacher.kind == "self" for teacher in recipe.model_teachers):
        frozen += student  # the student before training, or its moving average
    return WORKSPACE_BYTES + trained * student + FROZEN_BYTES * frozen


def count_parameters(model: str, prepared: Mapping[str, int | None]) -> int | None:
    """From the headers of a model folder's safetensors files; None: it is not on this machine."""
    if model in BUILTIN_PARAMETERS:
        return BUILTIN_PARAMETERS[model]
    if str(Path(model)) in prepared:
        return prepared[str(Path(model))]
    files = sorted(Path(model).glob("*.safetensors"))
    return sum(map(_count_in_header, files)) if files else None


def _count_in_header(file: Path) -> int:
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(size))
    return sum(
        math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
    )


def limit_threads(num_workers: int, num_cores: int) -> None:
    """Workers share the cores; without effect where the user set a number of threads."""
    if num_workers > 1 and not any(os.environ.get(name) for name in THREAD_VARIABLES):
        os.environ["OMP_NUM_THREADS"] = str(max(1, num_cores // num_workers))
