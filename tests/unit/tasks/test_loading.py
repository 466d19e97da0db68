"""The same tasks in every process, without torch."""

import os
import subprocess
import sys
from pathlib import Path

import courtside.tasks.loading

PROGRAM = """
import hashlib, sys
from courtside.recipe.tasks import ArithmeticTasks, InstructionTasks
from courtside.tasks.loading import make_task_source
names = ("json", "ending", "word_count")
parts = []
for config in (ArithmeticTasks(kind="arithmetic"), ArithmeticTasks(kind="arithmetic", digits=12),
               InstructionTasks(kind="instructions", checks=names),
               InstructionTasks(kind="instructions", instruction_in_prompt=False, limit=3,
                                system_prompt="Be kind.")):
    source = make_task_source(config, seed=7)
    parts += [source.batch(step, 5) for step in (0, 1, 1000)] + [source.held_out("test", 5)]
heavy = {"torch", "datasets", "math_verify", "transformers"} & sys.modules.keys()
print(hashlib.sha256(repr(parts).encode()).hexdigest(), sorted(heavy))
"""


def test_two_processes_draw_the_same_tasks_without_torch() -> None:
    root = Path(courtside.tasks.loading.__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().split(maxsplit=1)[1].strip() == "[]"
