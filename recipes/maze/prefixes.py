"""Tasks that continue a run's own ways: how well does the teacher know where the student gets?

    python recipes/maze/prefixes.py runs/maze/on_reverse-long-lr0.0001-seed0 \
        runs/maze/prefixes.jsonl
    courtside evaluate recipes/maze/prefixes.toml

Of each stored answer that left the shortest way without breaking a rule, the part up to a random
later cell becomes a prefill; answers that jump through a wall are lost anyway, and left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from courtside.hashing import SeededRandom
from courtside.report.folder.folder import RunFolder
from courtside.tasks.maze import find_distances, make_map
from courtside.types import Trajectory


def make_tasks(trajectories: list[Trajectory]) -> Iterator[dict[str, Any]]:
    for trajectory in trajectories:
        task = trajectory.task
        assert task.answer is not None
        args = task.grader_args
        neighbors, distances = make_map(args["map_seed"]), find_distances(
            args["map_seed"], task.answer
        )  # fmt: skip
        cells = trajectory.response.split()
        legal = 1
        while legal < len(cells) and cells[legal] in neighbors.get(cells[legal - 1], ()):
            legal += 1
        cells = cells[:legal]
        if task.answer in cells:
            cells = cells[: cells.index(task.answer)]
        first_wrong = next(
            (i for i, (a, b) in enumerate(pairwise(cells), 1) if distances[b] > distances[a]), None
        )
        if not cells or cells[0] != args["start"] or first_wrong is None:
            continue
        length = SeededRandom(trajectory.id).randint(first_wrong + 1, len(cells))
        yield {
            "prompt": task.messages[0].content,
            "prefill": " ".join(cells[:length]),
            "answer": task.answer,
            "grader": "maze",
            "grader_args": {**args, "start": cells[length - 1], "is_continued": True},
            "split": "test",
        }


def main() -> None:
    run, out = map(Path, sys.argv[1:3])
    folder = RunFolder.read(run)
    rows = list(make_tasks([s.trajectory for s in folder.trajectories(step=0)]))
    if not rows:
        sys.exit(f"{run}: no stored answer of step 0 left the way and stayed legal")
    train = {**rows[0], "prompt": "Not used.", "split": "train"}
    out.write_text("".join(json.dumps(row) + "\n" for row in [train, *rows]))
    print(f"{out}: {len(rows)} prefixes")


if __name__ == "__main__":
    main()
