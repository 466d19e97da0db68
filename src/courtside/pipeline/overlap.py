"""Whether the prompts of a stage share text with documents that an earlier stage learned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from courtside.recipe import Recipe
from courtside.tasks.base import FiniteSource, TaskSource
from courtside.types import Task

NUM_WORDS_IN_A_ROW = 6
MAX_PROMPTS = 2000
"""Prompts that are compared: of a generator, those of the first steps."""

WORD = re.compile(r"\w+")


def describe_overlap(documents: Iterable[str], prompts: Sequence[Task], *, learned_in: str) -> str:
    """A note: how many prompts have as many words in a row in common with the documents."""
    known_runs = {run for text in documents for run, _ in word_runs(text)}
    shared = [
        (task, text) for task in prompts if (text := _find_shared(task, known_runs)) is not None
    ]
    what = f"{NUM_WORDS_IN_A_ROW} words in a row with the documents of {learned_in}"
    if not shared:
        return f"none of its {len(prompts)} prompts shares {what}"
    return (
        f"{len(shared)} of its {len(prompts)} prompts share {what}, such as {shared[0][1]!r} (task "
        f"{shared[0][0].id}): a teacher that has not learned them would correct what was learned. "
        "Leave such prompts out"
    )


def collect_prompts(source: TaskSource, recipe: Recipe) -> list[Task]:
    """The prompts that a run trains on, each once."""
    if isinstance(source, FiniteSource):
        return list(source.train_tasks[:MAX_PROMPTS])
    tasks: dict[str, Task] = {}
    for step in range(recipe.train.steps):
        for task in source.batch(step, recipe.train.prompts_per_step):
            tasks[task.id] = task
        if len(tasks) >= MAX_PROMPTS:
            break
    return list(tasks.values())[:MAX_PROMPTS]


def word_runs(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every run of words in lower case, and its text."""
    matches = list(WORD.finditer(text))
    size = NUM_WORDS_IN_A_ROW
    for start in range(len(matches) - size + 1):
        part = matches[start : start + size]
        yield tuple(m[0].casefold() for m in part), text[part[0].start() : part[-1].end()]


def _find_shared(task: Task, known_runs: set[tuple[str, ...]]) -> str | None:
    texts = (m.content for m in task.messages if m.role in ("user", "assistant"))
    runs = (pair for text in texts for pair in word_runs(text))
    return next((text for run, text in runs if run in known_runs), None)
