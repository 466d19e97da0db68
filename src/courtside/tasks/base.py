"""Task sources: splits, and the order of tasks in training.

Batches are pure functions of content and seed, through SHA-256 alone: the same in every process and
on every machine. Sources keep no state between batches, so resuming needs none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, Protocol

from courtside.errors import TaskError
from courtside.hashing import digest
from courtside.types import Message, Split, Task

LimitBy = Literal["first", "seed"]
"""Which train tasks a limit takes: the same in every run, or others with every seed."""


class TaskSource(Protocol):
    @property
    def num_dropped(self) -> int:
        """Prompts left out so far because they do not fit the context."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before the run starts."""

    def batch(self, step: int, size: int) -> tuple[Task, ...]:
        """The train tasks of one step: a pure function of (seed, step, size)."""

    def held_out(self, split: Split, size: int) -> tuple[Task, ...]:
        """The first `size` tasks of a split, in an order that no seed changes; all if fewer. Of the
        train split with `tasks.limit`: those that train."""


def add_system_message(task: Task, text: str | None) -> Task:
    """The task with a system message first. Its id stays: the prompt belongs to the run."""
    if text is None:
        return task
    if any(message.role == "system" for message in task.messages):
        raise TaskError(
            f"tasks.system_prompt is set, but task {task.id} already has a system message. "
            "Remove tasks.system_prompt, or the system messages from the tasks"
        )
    return replace(task, messages=(Message(role="system", content=text), *task.messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimit:
    """The largest number of prompt tokens, for the student at hand."""

    length: Callable[[Task], int]
    max_tokens: int
    overlong: Literal["error", "drop"] = "error"
    of_whole: bool = False
    """Whether recorded conversations are measured, not prompts."""
    max_chars: float = math.inf
    """A longer text has more tokens for sure; some tokenizers take minutes for a megabyte."""

    def fits(self, task: Task, source: str) -> bool:
        """False: to be dropped. `source` is for the error where the recipe drops none."""
        if _count_chars(task) <= self.max_chars and self.length(task) <= self.max_tokens:
            return True
        if self.overlong == "error":
            raise self.error(task, source)
        return False

    def error(self, task: Task, source: str) -> TaskError:
        start = task.messages[-1].content[:60]
        if (num_chars := _count_chars(task)) > self.max_chars:
            return TaskError(
                f"{source}: {start!r}… (task {task.id}) has {num_chars:,} characters, more than "
                f"the {self.max_tokens:,} tokens that the model's context leaves can hold. Shorten "
                "it, or set tasks.overlong_prompts = 'drop' to leave such tasks out and count them"
            )
        if self.of_whole:
            return TaskError(
                f"{source}: the conversation of {start!r}… (task {task.id}) has "
                f"{self.length(task)} tokens and the model takes {self.max_tokens}. Shorten it, or "
                "set tasks.overlong_prompts = 'drop' to leave such conversations out and count "
                "them; nothing is cut silently"
            )
        return TaskError(
            f"{source}: the prompt {start!r}… (task {task.id}) has {self.length(task)} tokens, "
            "with what its completion has beyond rollout.max_new_tokens; with max_new_tokens the "
            f"model's context leaves {self.max_tokens}. Shorten it or max_new_tokens, or set "
            "tasks.overlong_prompts = 'drop' to leave such prompts out and count them"
        )


def _count_chars(task: Task) -> int:
    return sum(len(message.content) for message in task.messages) + sum(
        len(message.get("content") or "") for message in task.conversation
    )


# ── order ────────────────────────────────────────────────────────────────────────────────────────


def permute_index(index: int, size: int, key: str) -> int:
    """The image of `index` under a permutation of range(size) that follows from `key`.

    A keyed permutation (four Feistel rounds, walked until the result is in range): spaces of 10²⁴
    problems can be visited in random order, each once, without listing them.
    """
    assert 0 <= index < size
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        high, low = index >> half, index & mask
        for turn in range(4):
            high, low = low, high ^ (int(digest(f"{key}/{turn}/{low}"), 16) & mask)
        index = high << half | low
        if index < size:
            return index


def epoch_batch(tasks: Sequence[Task], *, seed: int, step: int, size: int) -> tuple[Task, ...]:
    """Each task once per epoch in that epoch's order; batches run on across epochs."""
    return epoch_slice(tasks, seed=seed, start=step * size, stop=(step + 1) * size)


def epoch_slice(tasks: Sequence[Task], *, seed: int, start: int, stop: int) -> tuple[Task, ...]:
    """Positions of the endless sequence of epochs."""
    batch = []
    for position in range(start, stop):
        epoch, place = divmod(position, len(tasks))
        batch.append(tasks[permute_index(place, len(tasks), f"epoch/{seed}/{epoch}")])
    return tuple(batch)


# ── sources ──────────────────────────────────────────────────────────────────────────────────────


class FiniteSource:
    """A list of tasks with their splits."""

    num_dropped = 0
    """Tasks left out because they did not fit the model's context."""
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        name: str,
        seed: int,
        limit: int | None,
        limit_by: LimitBy = "first",
        trains: bool = True,
    ) -> None:
        """`name` is for error messages, e.g. the file. `trains`: False for tasks that are evaluated
        only, which need no train split."""
        if not tasks:
            raise TaskError(f"{name}: holds no tasks; it needs at least one")
        train = [task for task in tasks if task.split == "train"]
        if not train and trains:
            raise TaskError(
                f"{name}: none of its {len(tasks)} tasks is in the train split. Add more tasks "
                "(8 in 10 go to train), or give some the split 'train'"
            )
        if trains:
            require_limit(name, limit, len(train))
        self._name = name
        self._seed = seed
        if limit is not None and limit_by == "seed" and trains:
            places = (permute_index(i, len(train), f"limit/{seed}") for i in range(limit))
            train = [train[place] for place in places]
        self._train = train[:limit]
        self._is_limited = limit is not None
        # By hash, not by place in the file: adding a line moves no other task.
        self._tasks = sorted(tasks, key=lambda task: task.id)

    @property
    def train_tasks(self) -> Sequence[Task]:
        return self._train

    def batch(self, step: int, size: int) -> tuple[Task, ...]:
        return epoch_batch(self._train, seed=self._seed, step=step, size=size)

    def held_out(self, split: Split, size: int) -> tuple[Task, ...]:
        if split == "train" and self._is_limited:
            return tuple(self._train[:size])
        held_out_tasks = tuple(islice((task for task in self._tasks if task.split == split), size))
        if size and not held_out_tasks:
            raise TaskError(
                f"{self._name}: none of its {len(self._tasks)} tasks is in the {split} split. Add "
                f"more tasks (1 in 10 goes to {split}), or give some the split {split!r}"
            )
        return held_out_tasks


@dataclass(frozen=True, slots=True)
class TaskSpace:
    """The numbered tasks of a generator; several numbers may give the same task."""

    name: str
    """How errors call it: the recipe's fields that decide its size."""
    size: int
    split: Callable[[int], Split]
    """Of the task with that number, from 0 to size - 1; cheap, so that others can be skipped."""
    task: Callable[[int], Task]
    """A pure function of the number."""
    stratum: Callable[[int], int] = lambda _: 0
    """Of a number, from 0 to num_strata - 1: held-out tasks are equally many of each."""
    num_strata: int = 1


MAX_MISSES = 100_000
"""After so many numbers in a row without a new task of the split, a space counts as exhausted."""
CONTENT_ORDER = "content order"
"""The key of the order of held-out tasks, which no seed changes."""
MAX_CONSECUTIVE_OVERLONG = 1000
"""After so many overlong tasks in a row, the source raises."""


class GeneratedSource:
    """Tasks sampled from a space, anew for each step; tasks repeat in a small space.

    Overlong tasks are skipped and replaced by others.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        space: TaskSpace,
        *,
        seed: int,
        limit: int | None,
        limit_by: LimitBy = "first",
        system_prompt: str | None = None,
        prompt_limit: PromptLimit | None = None,
    ) -> None:
        self._space = space
        self._system_prompt = system_prompt
        self._prompt_limit = prompt_limit
        self._overlong_ids: set[str] = set()
        self._seed = seed
        key = f"limit/{seed}" if limit_by == "seed" else CONTENT_ORDER
        first = self._first("train", limit or 1, key)
        if not first:
            raise self._empty_split_error("train")
        require_limit(space.name, limit, len(first))
        self._limited = None if limit is None else first

    def batch(self, step: int, size: int) -> tuple[Task, ...]:
        if self._limited is not None:
            return epoch_batch(self._limited, seed=self._seed, step=step, size=size)
        batch = tuple(islice(self._walk("train", f"step/{self._seed}/{step}"), size))
        # Fewer than asked for: that was the whole space, so tasks repeat.
        return tuple(batch[i % len(batch)] for i in range(size))

    def held_out(self, split: Split, size: int) -> tuple[Task, ...]:
        if split == "train" and self._limited is not None:
            return self._limited[:size]
        held_out_tasks = self._first_of_strata(split, size)
        if size and not held_out_tasks:
            raise self._empty_split_error(split)
        return held_out_tasks

    def _first(self, split: Split, size: int, key: str) -> tuple[Task, ...]:
        return tuple(islice(self._walk(split, key), size))

    def _first_of_strata(self, split: Split, size: int) -> tuple[Task, ...]:
        """The strata in turn, so that the first ones of a set are as balanced as the whole."""
        num_strata = self._space.num_strata
        if num_strata == 1:
            return self._first(split, size, CONTENT_ORDER)
        walks = [self._walk(split, CONTENT_ORDER, stratum) for stratum in range(num_strata)]
        rounds = (task for batch in zip(*walks, strict=False) for task in batch)
        return tuple(islice(rounds, size))

    def _walk(self, split: Split, key: str, stratum: int | None = None) -> Iterator[Task]:
        """The tasks of a split, or of a stratum of it, each once, in the order that `key` names."""
        by_id: dict[str, tuple[int, Task]] = {}
        num_consecutive = last_place = 0
        for place in range(self._space.size):
            if place - last_place > MAX_MISSES:
                return
            index = permute_index(place, self._space.size, key)
            if stratum is not None and self._space.stratum(index) != stratum:
                continue
            if self._space.split(index) != split:
                continue
            task = add_system_message(self._space.task(index), self._system_prompt)
            if task.id in by_id:
                self._require_same(task, index, by_id[task.id])
                continue
            by_id[task.id] = index, task
            last_place = place
            if self._prompt_limit is None or self._prompt_limit.fits(task, self._space.name):
                num_consecutive = 0
                yield task
                continue
            self._overlong_ids.add(task.id)
            num_consecutive += 1
            if num_consecutive == MAX_CONSECUTIVE_OVERLONG:
                raise TaskError(
                    f"{self._space.name}: {MAX_CONSECUTIVE_OVERLONG} tasks in a row do not fit the "
                    "model's context. Make them shorter, or rollout.max_new_tokens"
                )

    def _require_same(self, task: Task, index: int, earlier: tuple[int, Task]) -> None:
        """Tasks are matched by their ids, so two with one id would be mixed up."""
        other_index, other = earlier
        if (task.messages, task.answer) != (other.messages, other.answer):
            raise TaskError(
                f"{self._space.name}: task({other_index}) and task({index}) have one id, "
                f"{task.id!r}, and different contents. Make the id a hash of the content "
                "(courtside.hashing.task_id)"
            )

    @property
    def num_dropped(self) -> int:
        """Distinct tasks that were skipped so far."""
        return len(self._overlong_ids)

    def _empty_split_error(self, split: Split) -> TaskError:
        size = self._space.size
        looked_at = f"{MAX_MISSES:,} of " if size > MAX_MISSES else ""
        return TaskError(
            f"{self._space.name}: none of {looked_at}its {size} tasks falls into the {split} "
            f"split. Choose a larger space; tasks of your own need some of split {split!r}, as "
            "courtside.hashing.split_of gives it"
        )


def require_limit(name: str, limit: int | None, available: int) -> None:
    if limit is not None and limit > available:
        raise TaskError(
            f"tasks.limit = {limit}, but {name} has {available} train tasks. "
            f"Use a limit of at most {available}, or none for all of them"
        )
