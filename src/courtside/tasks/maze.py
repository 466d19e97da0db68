"""Ways through one fixed map that the prompt does not show, written cell by cell.

The map is a tree, so there is one shortest way between two cells, and a wrong turn ends in a branch
that shortest ways of the given lengths may never enter. A writer that gets there has to come back:
what a student does in states of its own making decides whether it arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from courtside.hashing import SeededRandom, split_of, task_id
from courtside.recipe.tasks import MazeTasks
from courtside.tasks.base import TaskSpace
from courtside.types import Message, Split, Task

COLUMNS = "ABCDEFGHIJKLMN"
ROWS = "0123456789"
"""A cell such as `C7` is two tokens in most vocabularies."""
NEWEST_FRACTION = 0.7
"""How often the map grows from its newest cell, and not from a random one: long ways with dead
ends at their sides."""
NUM_VARIANTS = 16
"""Different detours, or noise, of the same start and goal."""
MAX_MOVES_PER_STEP = 3
"""Moves allowed for each step of the shortest way."""

Map = Mapping[str, tuple[str, ...]]
"""By cell: the cells next to it without a wall between."""


@lru_cache
def make_map(seed: int) -> Map:
    random = SeededRandom(f"maze/{seed}")
    start = COLUMNS[0] + ROWS[0]
    neighbors: dict[str, list[str]] = {start: []}
    active = [start]
    while active:
        newest = random.bernoulli(NEWEST_FRACTION)
        index = len(active) - 1 if newest else random.randbelow(len(active))
        closed = [cell for cell in _adjacent(active[index]) if cell not in neighbors]
        if not closed:
            active.pop(index)
            continue
        cell = random.choice(closed)
        neighbors[active[index]].append(cell)
        neighbors[cell] = [active[index]]
        active.append(cell)
    return {cell: tuple(sorted(open_cells)) for cell, open_cells in sorted(neighbors.items())}


def _adjacent(cell: str) -> list[str]:
    column, row = COLUMNS.index(cell[0]), ROWS.index(cell[1])
    places = [(column - 1, row), (column + 1, row), (column, row - 1), (column, row + 1)]
    return [COLUMNS[x] + ROWS[y] for x, y in places if 0 <= x < len(COLUMNS) and 0 <= y < len(ROWS)]


@lru_cache(maxsize=1024)
def find_distances(seed: int, goal: str) -> Mapping[str, int]:
    """By cell: steps of the shortest way to `goal`."""
    neighbors = make_map(seed)
    distances, queue = {goal: 0}, deque([goal])
    while queue:
        cell = queue.popleft()
        for other in neighbors[cell]:
            if other not in distances:
                distances[other] = distances[cell] + 1
                queue.append(other)
    return distances


def maze_space(config: MazeTasks) -> TaskSpace:
    low, high = config.path_lengths
    pairs = [
        (start, goal)
        for goal in make_map(config.map_seed)
        for start, distance in sorted(find_distances(config.map_seed, goal).items())
        if low <= distance <= high
    ]
    num_variants = NUM_VARIANTS if config.noise or config.detour else 1
    return TaskSpace(
        name=f"tasks.kind = 'maze' with tasks.path_lengths = [{low}, {high}]",
        size=len(pairs) * num_variants,
        split=lambda index: _split(config, *pairs[index // num_variants]),
        task=lambda index: maze_task(
            config, *pairs[index // num_variants], variant=index % num_variants
        ),
    )


def _split(config: MazeTasks, start: str, goal: str) -> Split:
    """By start and goal alone: a held-out pair is held out with any detour or noise."""
    return split_of(f"maze {config.map_seed} {start} {goal}")


def maze_task(config: MazeTasks, start: str, goal: str, *, variant: int = 0) -> Task:
    content = f"{config.map_seed} {start} {goal}"
    settings = ""
    if config.noise or config.detour:
        settings = f"{config.noise} {config.detour} {config.detour_fraction} {variant}"
    random = SeededRandom(f"maze way {content} {settings}")
    distances = find_distances(config.map_seed, goal)
    is_begun = config.detour > 0 and random.bernoulli(config.detour_fraction)
    response_prefix = _wander(config, start, goal, random) if is_begun else []
    way = _find_way(config, response_prefix[-1] if response_prefix else start, goal, random)
    question = f"Go from {start} to {goal}. Write every cell on the way."
    messages = [Message(role="user", content=question)]
    if response_prefix:
        messages.append(Message(role="assistant", content=" ".join(response_prefix)))
    text = " ".join(way[1:] if response_prefix else way)
    return Task(
        id=task_id("maze", f"{content} {settings}".strip()),
        split=_split(config, start, goal),
        messages=tuple(messages),
        answer=goal,
        completion=f" {text}" if response_prefix else text,
        tags=("maze",),
        grader="maze",
        grader_args={
            "map_seed": config.map_seed,
            "start": response_prefix[-1] if response_prefix else start,
            "is_continued": bool(response_prefix),
            "max_moves": MAX_MOVES_PER_STEP * (distances[start] + len(response_prefix)),
        },
    )


def _wander(config: MazeTasks, start: str, goal: str, random: SeededRandom) -> list[str]:
    """The start, some steps of the shortest way and a walk off it; it never enters the goal."""
    neighbors, distances = make_map(config.map_seed), find_distances(config.map_seed, goal)
    cells = [start]
    for _ in range(random.randbelow(distances[start])):
        cells.append(_nearest(neighbors[cells[-1]], distances))
    for _ in range(random.randint(1, config.detour)):
        open_cells = [cell for cell in neighbors[cells[-1]] if cell != goal]
        ahead = [cell for cell in open_cells if len(cells) < 2 or cell != cells[-2]]
        if not open_cells:
            break
        cells.append(random.choice(ahead or open_cells))
    return cells


def _find_way(config: MazeTasks, start: str, goal: str, random: SeededRandom) -> list[str]:
    """The shortest way, or with noise one that goes on from wherever a random step led."""
    neighbors, distances = make_map(config.map_seed), find_distances(config.map_seed, goal)
    cells = [start]
    while cells[-1] != goal:
        options = neighbors[cells[-1]]
        is_random = config.noise and random.bernoulli(config.noise)
        cells.append(random.choice(options) if is_random else _nearest(options, distances))
    return cells


def _nearest(cells: Sequence[str], distances: Mapping[str, int]) -> str:
    return min(cells, key=lambda cell: distances[cell])


def find_mistake(task: Task, response: str) -> str | None:
    """What is wrong with a way; None: it leads from the start to the goal."""
    args, cells = task.grader_args, response.split()
    start, goal = args["start"], task.answer
    neighbors = make_map(args["map_seed"])
    if args["is_continued"]:
        cells = [start, *cells]
    if not cells or cells[0] != start:
        return f"The way must begin at {start}."
    for cell, following in pairwise(cells):
        if following not in neighbors.get(cell, ()):
            return f"There is no way from {cell} to {following[:8]}."
    if cells[-1] != goal:
        return f"The way ends at {cells[-1]}, and the goal is {goal}."
    if len(cells) - 1 > args["max_moves"]:
        return f"The way has {len(cells) - 1} moves, and {args['max_moves']} are allowed."
    return None
