from __future__ import annotations

from pathlib import Path

import pytest
from support.small_runs import small_recipe, write_jsonl

from courtside.api import train

NUM_TASKS = 12


@pytest.fixture(scope="session")
def runs(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with runs of two arms, `taught` and `rewarded`, with seeds 0, 1 and 2 each."""
    folder = tmp_path_factory.mktemp("compare")
    grader = {"grader": "regex", "grader_args": {"pattern": "[aeiou]"}}
    rows = [
        {"prompt": f"Say {split} {n}.", "split": split, **grader}
        for split in ("train", "validation", "test")
        for n in range(NUM_TASKS)
    ]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(folder / "tasks.jsonl", rows))}
    common = {
        "tasks": tasks,
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 3},
        "train": {"steps": 4, "prompts_per_step": 2, "learning_rate": 3e-3},
        "evaluate": {"num_tasks": NUM_TASKS, "every": 2},
    }
    for seed in (0, 1, 2):
        taught = small_recipe(tiny_folder, tiny_teacher_folder, **common, seed=seed)
        reward = [{"kind": "policy_gradient", "advantage": "reward"}]
        rewarded = small_recipe(tiny_folder, **common, losses=reward, seed=seed)
        train(taught, folder / "runs" / f"taught-seed{seed}", quiet=True)
        train(rewarded, folder / "runs" / f"rewarded-seed{seed}", quiet=True)
    return folder / "runs"
