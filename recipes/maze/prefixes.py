"""How well does the teacher know the states that the student gets into?

    python recipes/maze/prefixes.py runs/maze/on_reverse-long-lr0.0001-seed1 runs/maze/teacher

Of each answer of the run's first step that left the shortest way without breaking a rule, the part
up to a random later cell becomes a response prefix, which the teacher continues. Answers that jump through
a wall are lost anyway, and left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from courtside import evaluate_student, load_recipe
from courtside.hashing import SeededRandom
from courtside.report.folder.folder import RunFolder
from courtside.tasks.maze import find_distances, make_map
from courtside.types import Trajectory


def make_tasks(trajectories: Sequence[Trajectory]) -> Iterator[dict[str, Any]]:
    for trajectory in trajectories:
        task, args = trajectory.task, trajectory.task.grader_args
        assert task.answer is not None
        distances = find_distances(args["map_seed"], task.answer)
        cells = legal_start(trajectory.response.split(), args["map_seed"], task.answer)
        wrong = [i for i, (a, b) in enumerate(pairwise(cells), 1) if distances[b] > distances[a]]
        if not cells or cells[0] != args["start"] or not wrong:
            continue
        length = SeededRandom(trajectory.id).randint(wrong[0] + 1, len(cells))
        yield {
            "prompt": task.messages[0].content,
            "response_prefix": " ".join(cells[:length]),
            "answer": task.answer,
            "grader": "maze",
            "grader_args": {**args, "start": cells[length - 1], "is_continued": True},
            "split": "test",
        }


def legal_start(cells: Sequence[str], map_seed: int, goal: str) -> list[str]:
    """The cells up to the first jump, or to the last one before the goal."""
    neighbors = make_map(map_seed)
    legal = [cell for cell in cells[:1] if cell in neighbors]
    for cell in cells[1:] if legal else ():
        if cell not in neighbors[legal[-1]] or cell == goal:
            break
        legal.append(cell)
    return legal


def main() -> None:
    run, teacher = sys.argv[1:3]
    folder = RunFolder.read(run)
    rows = list(make_tasks([stored.trajectory for stored in folder.trajectories(step=0)]))
    if not rows:
        sys.exit(f"{run}: no stored answer of step 0 left the way and stayed legal")
    path = Path(run) / "prefixes.jsonl"
    train = {**rows[0], "prompt": "Not used.", "split": "train"}
    path.write_text("".join(json.dumps(row) + "\n" for row in [train, *rows]))
    recipe = load_recipe(
        Path(__file__).parent / "student.toml",
        [f"student.model={teacher}", "student.keep_layers=", f"evaluate.num_tasks={len(rows)}",
         f'tasks={{kind="jsonl",path="{path}"}}', "evaluate.suites={}"],
    )  # fmt: skip
    (evaluation,) = evaluate_student(recipe, quiet=True)
    low, high = evaluation.ci_low, evaluation.ci_high
    print(f"{evaluation.mean_score:.1%} ({low:.1%} to {high:.1%}) of {len(rows)} prefixes")


if __name__ == "__main__":
    main()
