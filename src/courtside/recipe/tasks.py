"""[tasks]: the source of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    model_validator,
)

from courtside.plugins import check_import_path
from courtside.recipe.base import Fraction, Setting, import_path
from courtside.recipe.document_tasks import DocumentTasks
from courtside.recipe.prefix_tasks import PrefixTasks
from courtside.recipe.tasks_base import TasksBase


class ArithmeticTasks(TasksBase):
    kind: Literal["arithmetic"]
    operation: Literal["add", "subtract", "multiply"] = "add"
    digits: Annotated[int, Field(ge=1, le=12)] = 3
    """Of each operand."""
    scratchpad: bool = True
    """True: the reference solution works digit by digit. False: it is the answer alone."""


PathLength = Annotated[int, Field(ge=1, le=1000)]


class MazeTasks(TasksBase):
    """Ways between two cells of one fixed map, which no prompt shows: the student must have learned
    it. A wrong turn can be mended by coming back."""

    kind: Literal["maze"]
    path_lengths: tuple[PathLength, PathLength] = (10, 14)
    """Least and largest number of steps of the shortest way; an answer may take three times as
    many."""
    map_seed: PositiveInt = 1
    """Another number gives another map."""
    noise: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """How often a step of the tasks' own `completion` is random; it then goes on from there."""
    detour: NonNegativeInt = 0
    """Above 0: the answer is begun already, with a part of the way and up to so many random steps
    (a response prefix, which is not trained), and has to be continued from there."""
    detour_fraction: Fraction = 1.0
    """How many of the tasks are begun so, with `detour` above 0."""

    @model_validator(mode="after")
    def _check_lengths(self) -> MazeTasks:
        low, high = self.path_lengths
        if low > high:
            raise ValueError(f"path_lengths = [{low}, {high}]: the least comes first")
        return self


CheckName = Literal[
    "lower_case", "upper_case", "word_count", "json", "bullets", "forbidden_word", "ending",
    "starts_with", "one_sentence",
]  # fmt: skip


class InstructionTasks(TasksBase):
    kind: Literal["instructions"]
    checks: Annotated[tuple[CheckName, ...], Field(min_length=1)] = ("lower_case",)
    """Instructions to sample from, one per task."""
    instruction_in_prompt: bool = True
    """True: the prompt states the instruction. False: only the privileged field `rule` does, and
    the student must have learned it."""


def _check_grader(name: str) -> str:
    return check_import_path(name, "my_graders:grade") if ":" in name else name


USER_GRADER_SECONDS = 60.0
GraderName = Annotated[str, AfterValidator(_check_grader)]


class GradedTasks(TasksBase):
    """Tasks that a grader of user code may grade."""

    grader: GraderName | None = None
    """Of tasks that name none: a built-in grader, or `module:function`."""
    grader_seconds: Annotated[float, Field(gt=0, le=1e6)] = USER_GRADER_SECONDS
    """Time for a `module:function`, or a pattern of `regex`, to grade one response; after it the
    score is 0, and counted as an error of the grader."""


class JsonlTasks(GradedTasks):
    kind: Literal["jsonl"]
    path: Path
    """One JSON object a line: prompt (or messages with tools, or ShareGPT's conversations), and
    optionally response_prefix (the start of the answer, which is not trained), completion (or
    chosen), rejected, answer, id, privileged, tags, grader, grader_args, split, metadata. Tasks
    without a split get one by content hash."""

    @property
    def data_paths(self) -> tuple[Path, ...]:
        return (self.path,)


class DatasetTasks(GradedTasks):
    kind: Literal["datasets"]
    path: str
    """What `datasets.load_dataset` takes, or a folder that `save_to_disk` wrote."""
    name: str | None = None
    split: str = "train"
    columns: Mapping[str, str] | None = None
    """Field of a task → column of the data set: prompt, messages or conversations, tools, answer,
    completion, chosen, rejected. `privileged.NAME` makes a privileged field. Unset: the columns of
    TRL (prompt, completion, chosen, rejected), of chat APIs (messages, tools) and of ShareGPT
    (conversations) under their own names."""


class CustomTasks(GradedTasks):
    """Tasks from a function of your own: docs/extending.md shows one."""

    kind: Literal["custom"]
    path: Annotated[str, import_path("my_tasks:make_tasks")]
    """`module:function`, which returns an iterable of `courtside.types.Task`, or of dicts with the
    keys of JSONL tasks; the module is installed, or in the working directory."""
    settings: Mapping[str, Setting] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class ConversationTasks(TasksBase):
    """Recorded conversations, to hint and train on without sampling."""

    kind: Literal["conversations"]
    path: Path
    """One JSON object a line: `messages` as chat APIs write them (tool_calls, too) or ShareGPT's
    `conversations`, and optionally tools, privileged, tags, metadata and `id`, which a hints file
    refers to."""
    tool_call_format: Literal["json", "plain"] = "json"
    """Format of tool calls if the chat template does not render them."""

    @property
    def is_recorded(self) -> bool:
        return True

    @property
    def data_paths(self) -> tuple[Path, ...]:
        return (self.path,)


class TrajectoryTasks(TasksBase):
    """Stored trajectories of another run, with their tokens and ids: a task each."""

    kind: Literal["trajectories"]
    path: Path
    """The run's folder."""
    steps: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Which of its steps, counted from 0. Unset: all that are stored."""
    select: Literal["all", "hinted"] = "all"
    """hinted: those with a hint of this recipe's human reader when the run starts."""

    @property
    def is_recorded(self) -> bool:
        return True

    @model_validator(mode="after")
    def _check_stored(self) -> TrajectoryTasks:
        if self.system_prompt is not None:
            raise ValueError(
                "system_prompt: the prompts of stored trajectories are fixed; remove it"
            )
        if self.steps is not None and len(set(self.steps)) < len(self.steps):
            raise ValueError(f"steps = {list(self.steps)} names a step twice; name each once")
        return self


# ── environments ─────────────────────────────────────────────────────────────────────────────────


class EnvironmentTasks(TasksBase):
    """Episodes of a custom environment: see docs/environments.md."""

    kind: Literal["environment"]
    path: Annotated[str, import_path("my_environments.maze:Maze")]
    """`module:Class`; the module is installed, or in the working directory."""
    settings: Mapping[str, Setting] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Worker processes that run it, one call at a time each; one that dies or hangs costs its
    episode, not the run. 0: threads of this process, which start at once and share memory."""
    rows: Path | None = None
    """Of a class whose methods are tools (TRL's convention): one JSON object a line with `prompt`,
    and optionally `split` and more. All columns are keyword arguments of `reset`."""
    reward: Annotated[str, import_path("my_rewards:reward")] | None = None
    """Of such a class: `module:function`, called as a reward function of TRL with `environments`.
    Unset: `get_reward()` of the class, or its attribute or method `reward`."""
    reward_range: tuple[float, float] | None = None
    """Of such a class: rewards that become the scores 0 and 1. Unset: 0 and 1."""
    tool_call_format: Literal["json", "plain"] | None = None
    """Of such a class: how the student writes calls, which a system message says, with the list of
    tools. Unset: the model's chat template lists the tools where it can; else that message, with
    json."""
    tool_role: bool | None = None
    """Of such a class; false: for templates with the roles user and assistant only. The list of
    tools precedes the first message, and results are a user's. Unset: true."""

    @property
    def is_environment(self) -> bool:
        return True

    @property
    def data_paths(self) -> tuple[Path, ...]:
        return () if self.rows is None else (self.rows,)

    @property
    def tool_class_fields(self) -> list[str]:
        """The fields that are set and apply only to classes whose methods are tools."""
        names = ("rows", "reward", "reward_range", "tool_call_format", "tool_role")
        return [name for name in names if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _check_reward_range(self) -> EnvironmentTasks:
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range = {list(self.reward_range)}: the least comes first")
        return self


CapabilityName = Literal[
    "weather", "calculate", "convert", "days_between", "contact", "price", "write_note",
    "read_note", "weekday", "add_days", "append_note", "list_notes", "delete_note", "count_words",
    "reverse_text", "upper_case",
]  # fmt: skip
NumTurns = Annotated[int, Field(ge=1, le=200)]
NumSwitchboardTurns = Annotated[int, Field(ge=8, le=200)]
"""Six of them are critical, and two come before those."""


class ToolboxTasks(TasksBase):
    """Episodes of requests that each need one call of a listed tool. Tools have different names in
    every episode, so the model must use the list."""

    kind: Literal["toolbox"]
    turns: NumTurns | tuple[NumTurns, NumTurns] = 4
    """Requests in an episode: a number, or the least and the most."""
    num_tools: PositiveInt = 4
    """Tools listed in an episode."""
    capabilities: Annotated[tuple[CapabilityName, ...], Field(min_length=1)] = (
        "weather", "calculate", "convert", "days_between", "contact", "price", "write_note",
        "read_note",
    )  # fmt: skip
    """Tools to sample from."""
    names: Literal["seen", "held_out", "all"] = "seen"
    """Names a tool may be listed under. Train on `seen`; `held_out` names measure whether the
    model uses the list or memorized names."""
    common_name_fraction: Fraction | None = None
    """How often a tool is listed under its common name (`get_weather`). Unset: as often as under
    any other name."""
    random_name_fraction: Fraction = 0.0
    """How often a tool is listed under two random words (`amber_lantern`), for any `names`. These
    cannot be memorized: a warm start on some of them teaches the model to use the list."""
    tool_call_format: Literal["json", "plain"] = "json"
    """json: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. plain: `name(argument="…")`."""
    habit_fraction: Fraction = 0.0
    """Fraction of calls in the environment's demonstrations that use the common name in spite of
    the list: a planted mistake to unlearn."""
    reminder_fraction: Fraction = 0.0
    """Fraction of calls in these demonstrations, but the first of an episode, after a reminder of
    the listed names at the position of a hint, and then always correct: a small model must learn to
    use such hints."""
    retries: NonNegativeInt = 0
    """Further attempts at a request that was not solved."""
    reward: Literal["share", "all"] = "share"
    """share: the fraction of requests that were solved. all: 1 if every one was and nothing else
    was changed, else 0."""
    tool_role: bool = True
    """False: for templates with the roles user and assistant only. The list of tools precedes the
    first request, and results precede the next one."""
    max_result_chars: Annotated[int, Field(ge=40)] = 400
    """Characters of a tool's result; a longer one is truncated, visibly."""

    @property
    def is_environment(self) -> bool:
        return True

    @property
    def max_turns(self) -> int:
        return self.turn_range[1] * (1 + self.retries)

    @property
    def turn_range(self) -> tuple[int, int]:
        return self.turns if isinstance(self.turns, tuple) else (self.turns, self.turns)

    @model_validator(mode="after")
    def _check_listing(self) -> ToolboxTasks:
        least, most = self.turn_range
        if least > most:
            raise ValueError(f"turns = [{least}, {most}]: the least comes first")
        count = len(set(self.capabilities))
        if self.num_tools > count:
            raise ValueError(
                f"num_tools = {self.num_tools}, but capabilities names {count}; name more of them, "
                f"or list at most {count} tools"
            )
        needs_write = "delete_note" in self.capabilities
        if needs_write and ("write_note" not in self.capabilities or self.num_tools < 2):
            raise ValueError(
                "capabilities: 'delete_note' would run out of notes without 'write_note'; "
                "add that, with num_tools of at least 2"
            )
        if self.names == "held_out" and self.common_name_fraction:
            raise ValueError(
                f"common_name_fraction = {self.common_name_fraction}, but no common name is "
                "among names = "
                "'held_out'; remove it, or use names = 'all'"
            )
        if self.system_prompt is not None and self.tool_role:
            raise ValueError(
                "system_prompt: the list of tools is the system prompt; remove it, or set "
                "tool_role = "
                "false, which moves the list into the first request"
            )
        return self


class SwitchboardTasks(TasksBase):
    """Episodes of short requests, six of which tempt the student into one of four habits: a date
    format, a desk, a confirmation and small talk. Each is right in other episodes."""

    kind: Literal["switchboard"]
    turns: NumSwitchboardTurns | tuple[NumSwitchboardTurns, NumSwitchboardTurns] = 32
    """Requests in an episode: a number, or the least and the most."""
    cues: Literal["seen", "held_out"] = "seen"
    """Date formats and desks of the notes. Train on `seen`; `held_out` ones measure whether the
    model reads the note."""
    date_cue_fraction: Fraction = 0.3
    """How often the note of a training episode asks for another date format than the habit's. In
    held-out episodes each habit is wrong in half of the decisions."""
    habit_fraction: Fraction = 0.0
    """Fraction of critical calls without a heeded reminder in the environment's demonstrations that
    follow the habit, whatever the cue says: a planted mistake to unlearn."""
    reminder_fraction: Fraction = 0.0
    """Fraction of critical calls in these demonstrations after a reminder at the position of a
    hint, which is heeded."""
    wrong_reminder_fraction: Fraction = 0.0
    """Fraction of them after a reminder of another kind, which is ignored."""
    reward: Literal["share", "all"] = "share"
    """share: the fraction of requests that were solved. all: 1 if every one was, else 0. Small talk
    counts for neither."""

    @property
    def is_environment(self) -> bool:
        return True

    @property
    def max_turns(self) -> int:
        return self.turn_range[1]

    @property
    def turn_range(self) -> tuple[int, int]:
        return self.turns if isinstance(self.turns, tuple) else (self.turns, self.turns)

    @model_validator(mode="after")
    def _check_fields(self) -> SwitchboardTasks:
        least, most = self.turn_range
        if least > most:
            raise ValueError(f"turns = [{least}, {most}]: the least comes first")
        if self.reminder_fraction + self.wrong_reminder_fraction > 1:
            raise ValueError(
                "reminder_fraction and wrong_reminder_fraction are shares of the same calls; let "
                "them add up to at most 1"
            )
        if self.system_prompt is not None:
            raise ValueError(
                "system_prompt: the notes of an episode are its system prompt; remove it"
            )
        return self


TasksConfig = Annotated[
    ArithmeticTasks
    | MazeTasks
    | InstructionTasks
    | JsonlTasks
    | DatasetTasks
    | CustomTasks
    | ConversationTasks
    | TrajectoryTasks
    | PrefixTasks
    | DocumentTasks
    | EnvironmentTasks
    | ToolboxTasks
    | SwitchboardTasks,
    Field(discriminator="kind"),
]


def override_tasks(tasks: TasksConfig, changes: Mapping[str, Any]) -> TasksConfig:
    """The section with some fields changed, or another one if they have a `kind`; a ValidationError
    if they are invalid."""
    inherited = {} if "kind" in changes else tasks.model_dump(exclude_unset=True)
    changed: TasksConfig = TypeAdapter(TasksConfig).validate_python({**inherited, **changes})
    return changed
