"""Plays an environment without a model and reports what is wrong with it.

Tasks are made twice, scripted and random replies are played, and each episode is played again
beside another one: a guarded environment says what is invalid, the comparison what is not
deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from time import perf_counter
from typing import Any, TypeVar

from courtside.environments.base import HostedEnvironment, HostedEpisode
from courtside.environments.check_replies import make_scripts
from courtside.environments.guard import EnvironmentFault, NameMonitor
from courtside.errors import TaskError
from courtside.recipe.rollout import LimitsConfig
from courtside.types import Event, Grade, Observation, Task

MAX_LISTED_TASKS = 200
"""Tasks whose ids and splits are looked at."""

T = TypeVar("T")
Transcript = list[Observation | Grade]


@dataclass(slots=True)
class Timing:
    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.longest = max(self.longest, seconds)


@dataclass(slots=True, kw_only=True)
class EventSummary:
    num_turns: int = 0
    example: Event | None = None


@dataclass(slots=True, kw_only=True)
class CheckReport:
    size: int = 0
    splits: Counter[str] = field(default_factory=Counter)
    """Of the listed tasks."""
    problems: dict[str, str] = field(default_factory=dict)
    """What is wrong → where it was seen first."""
    notes: list[str] = field(default_factory=list)
    timings: dict[str, Timing] = field(default_factory=dict)
    """By method."""
    events: dict[str, EventSummary] = field(default_factory=dict)
    """By kind."""
    privileged: tuple[str, ...] = ()
    """Names of the tasks' privileged fields."""
    num_episodes: int = 0
    num_turns: int = 0
    grades: Counter[float] = field(default_factory=Counter)
    longest_message: int = 0

    def add_problem(self, problem: str, where: str) -> None:
        self.problems.setdefault(problem, where)


@dataclass(slots=True, kw_only=True)
class EnvironmentChecker:
    environment: HostedEnvironment
    """Guarded, as `make_environment` makes it."""
    limits: LimitsConfig
    num_tasks: int = 3
    max_turns: int = 8
    max_seconds: float = 60.0
    report: CheckReport = field(default_factory=CheckReport)
    names: NameMonitor = field(default_factory=NameMonitor)
    has_too_many_names: bool = False

    def run(self) -> CheckReport:
        end = perf_counter() + self.max_seconds
        tasks = self._list_tasks(end)
        num_skipped = 0
        for task in self._choose(tasks):
            for name, replies in self._make_scripts(task).items():
                if perf_counter() > end:
                    num_skipped += 1
                else:
                    self._check_script(task, name, replies)
        if num_skipped:
            self.report.notes.append(
                f"{num_skipped} scripts were not played: {self.max_seconds:g} seconds were over"
            )
        self._add_notes()
        return self.report

    # ── tasks ─────────────────────────────────────────────────────────────────────────────────────

    def _list_tasks(self, end: float) -> list[Task]:
        report, tasks = self.report, []
        report.size = self.environment.size
        contents: dict[str, Task] = {}
        step = max(1, report.size // MAX_LISTED_TASKS)
        for index in range(0, min(report.size, step * MAX_LISTED_TASKS), step):
            try:
                task = self._time("task", partial(self.environment.task, index))
                second = self.environment.task(index)
            except TaskError as error:
                report.add_problem(str(error), f"task({index})")
                continue
            if task != second:
                report.add_problem(
                    "task(index) differs from call to call; make it a pure function of the number",
                    f"task({index})",
                )
            if contents.setdefault(task.id, task) != task:
                report.add_problem(
                    "two different tasks have one id; make it a hash of the content "
                    "(courtside.hashing.task_id)",
                    f"task({index}), id {task.id!r}",
                )
            tasks.append(task)
            report.splits[task.split] += 1
            if perf_counter() > end:
                break
        names = [set(task.privileged) for task in tasks]
        report.privileged = tuple(sorted(set.intersection(*names))) if names else ()
        return tasks

    def _choose(self, tasks: Sequence[Task]) -> list[Task]:
        """Spread over the list."""
        step = max(1, len(tasks) // self.num_tasks)
        return list(tasks[::step][: self.num_tasks])

    def _make_scripts(self, task: Task) -> dict[str, tuple[str, ...]]:
        names = ("demonstrate", "example_replies")
        methods: dict[str, Any] = {name: getattr(self.environment, name, None) for name in names}
        try:
            return make_scripts(task, **methods)
        except TaskError as error:
            self.report.add_problem(str(error), f"task {task.id}")
            return make_scripts(task)

    # ── episodes ──────────────────────────────────────────────────────────────────────────────────

    def _check_script(self, task: Task, name: str, replies: Sequence[str]) -> None:
        script = list(islice(cycle(replies), max(self.max_turns, len(replies))))
        where = f"task {task.id}, {name}"
        first = self._play(task, script, where)
        if first is None:
            return
        alone = self._play(task, script, where)
        if alone is None or alone != first:
            self.report.add_problem(
                "an episode differs when it is played again with the same replies; take chance "
                "from the task alone, not from a clock, a global generator or a counter",
                where,
            )
            return
        pair = self._play_together(task, script)
        if pair is not None and pair != (first, first):
            self.report.add_problem(
                "two episodes that are played in turns change each other; keep their state on the "
                "object that start(task) returns",
                where,
            )

    def _play(self, task: Task, script: Sequence[str], place: str) -> Transcript | None:
        """What the environment answered; None after a fault."""
        where = place
        try:
            episode = self._time("start", partial(self.environment.start, task))
            transcript: Transcript = [self._time("grade", episode.grade)]
            for number, reply in enumerate(script):
                where = f"{place}, turn {number + 1}"
                observation = self._time("step", partial(episode.step, reply))
                self._record(observation)
                transcript.append(observation)
                if observation.done:
                    break
            grade = self._time("grade", episode.grade)
        except EnvironmentFault as fault:
            self.report.add_problem(str(fault), where)
            return None
        self.report.num_episodes += 1
        self.report.grades[grade.score] += 1
        return [*transcript, grade]

    def _play_together(
        self, task: Task, script: Sequence[str]
    ) -> tuple[Transcript, Transcript] | None:
        try:
            episodes: list[HostedEpisode] = [self.environment.start(task) for _ in range(2)]
            transcripts: list[Transcript] = [[episode.grade()] for episode in episodes]
            for reply in script:
                for episode, transcript in zip(episodes, transcripts, strict=True):
                    last = transcript[-1]
                    if not (isinstance(last, Observation) and last.done):
                        transcript.append(episode.step(reply))
            for episode, transcript in zip(episodes, transcripts, strict=True):
                transcript.append(episode.grade())
        except EnvironmentFault as fault:
            self.report.add_problem(str(fault), f"task {task.id}, two episodes in turns")
            return None
        return transcripts[0], transcripts[1]

    def _record(self, observation: Observation) -> None:
        report = self.report
        report.num_turns += 1
        for message in observation.messages:
            report.longest_message = max(report.longest_message, len(message.content))
        fault = self.names.find_fault(observation)
        if fault is not None and not self.has_too_many_names:
            self.has_too_many_names = True
            report.add_problem(str(fault), "all episodes together")
        if fault is not None:
            return
        for event in observation.events:
            summary = report.events.setdefault(event.kind, EventSummary())
            summary.num_turns += 1
            if summary.example is None or not _is_telling(summary.example):
                summary.example = event

    def _time(self, method: str, call: Callable[[], T]) -> T:
        begin = perf_counter()
        try:
            return call()
        finally:
            self.report.timings.setdefault(method, Timing()).add(perf_counter() - begin)

    # ── what is no error, and still worth knowing ─────────────────────────────────────────────────

    def _add_notes(self) -> None:
        report = self.report
        for split in ("train", "test"):
            if report.splits and not report.splits[split]:
                report.notes.append(
                    f"none of the {report.splits.total()} tasks looked at is in the {split} split"
                )
        if report.num_turns and not report.events:
            report.notes.append(
                "no reply caused an event, so reader.kind = 'rules' finds hints only by its text "
                "detectors; report what was wrong with a reply as an Event"
            )
        if report.num_episodes and set(report.grades) == {1.0}:
            report.notes.append("every episode of nonsense got the score 1")
        if report.longest_message > self.limits.observation_chars:
            report.notes.append(
                f"a message has {report.longest_message:,} characters, and "
                f"rollout.limits.observation_chars = {self.limits.observation_chars:,} cuts it"
            )


def _is_telling(event: Event) -> bool:
    """Whether every detail has text to show."""
    return all(event.detail(name).strip() for name in event.details)
