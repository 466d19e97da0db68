"""[tasks]: where the prompts come from."""

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
from courtside.recipe.base import Fraction, Section, Setting, import_path


class TasksBase(Section):
    limit: PositiveInt | None = None
    """Train on this many prompts only, over and over (down to one). Unset: all of them."""
    system_prompt: str | None = None
    """A system prompt that the student sees on every task."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """A prompt that does not fit the context: stop, or leave it out and count it."""

    @property
    def is_environment(self) -> bool:
        """Whether a task is the beginning of an episode: the world answers, and grades the end."""
        return False

    @property
    def is_recorded(self) -> bool:
        """Whether nobody acts: what is trained on was written before, and nothing answers in it."""
        return False


class ArithmeticTasks(TasksBase):
    kind: Literal["arithmetic"]
    operation: Literal["add", "subtract", "multiply"] = "add"
    digits: Annotated[int, Field(ge=1, le=12)] = 3
    """Of each operand."""
    scratchpad: bool = True
    """The reference solution works digit by digit; otherwise it is the answer alone."""


CheckName = Literal[
    "lower_case", "upper_case", "word_count", "json", "bullets", "forbidden_word", "ending",
    "starts_with", "one_sentence",
]  # fmt: skip


class InstructionTasks(TasksBase):
    kind: Literal["instructions"]
    checks: Annotated[tuple[CheckName, ...], Field(min_length=1)] = ("lower_case",)
    """Which instructions are drawn from; one of them per task."""
    instruction_in_prompt: bool = True
    """True: the prompt states the instruction. False: only the privileged field `rule` does, and
    the student must have internalised it."""


def _check_grader(name: str) -> str:
    return check_import_path(name, "my_graders:grade") if ":" in name else name


GraderName = Annotated[str, AfterValidator(_check_grader)]


class JsonlTasks(TasksBase):
    kind: Literal["jsonl"]
    path: Path
    """One JSON object a line: prompt (or messages), and optionally answer, completion, rejected,
    privileged, tags, grader, grader_args, split. Tasks without a split get one by content hash."""
    grader: GraderName | None = None
    """Of tasks that name none: a built-in grader, or `module:function`."""


class DatasetTasks(TasksBase):
    kind: Literal["datasets"]
    path: str
    """What `datasets.load_dataset` takes, or a folder that `save_to_disk` wrote."""
    name: str | None = None
    split: str = "train"
    columns: Mapping[str, str] = Field(default_factory=lambda: {"prompt": "prompt"})
    """Field of a task → column of the data set: prompt or messages, answer, completion, rejected.
    `privileged.NAME` makes a privileged field."""
    grader: GraderName | None = None
    """A built-in grader, or `module:function`."""


class CustomTasks(TasksBase):
    """Tasks from a function of your own: docs/extending.md shows one."""

    kind: Literal["custom"]
    path: Annotated[str, import_path("my_tasks:make_tasks")]
    """`module:function`, which returns an iterable of `courtside.types.Task`, or of dicts with the
    keys of JSONL tasks; the module is installed, or lies where the command runs."""
    settings: Mapping[str, Setting] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    grader: GraderName | None = None
    """Of dicts that name none: a built-in grader, or `module:function`."""


class ConversationTasks(TasksBase):
    """Conversations recorded elsewhere, to be read, hinted and trained on as they are."""

    kind: Literal["conversations"]
    path: Path
    """One JSON object a line: `messages` as chat APIs write them (tool_calls, too), and optionally
    privileged, tags and `id`, by which a person's hints name the conversation."""
    tool_call_format: Literal["json", "plain"] = "json"
    """How tool calls are written where the chat template does not write them itself."""

    @property
    def is_recorded(self) -> bool:
        return True


class TrajectoryTasks(TasksBase):
    """What another run has stored, token by token and under its own ids: a task each."""

    kind: Literal["trajectories"]
    path: Path
    """The run's folder."""
    steps: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Which of its steps, counted from 0. Unset: all that are stored."""
    select: Literal["all", "hinted"] = "all"
    """hinted: those that a person's hints of this recipe name when the run starts."""

    @property
    def is_recorded(self) -> bool:
        return True

    @model_validator(mode="after")
    def _as_they_are(self) -> TrajectoryTasks:
        if self.system_prompt is not None:
            raise ValueError(
                "system_prompt: stored trajectories have the prompts they have; remove it"
            )
        if self.steps is not None and len(set(self.steps)) < len(self.steps):
            raise ValueError(f"steps = {list(self.steps)} names a step twice; name each once")
        return self


# ── environments ─────────────────────────────────────────────────────────────────────────────────


class EnvironmentTasks(TasksBase):
    """Episodes of an environment of your own: docs/environments.md says what such a class has."""

    kind: Literal["environment"]
    path: Annotated[str, import_path("my_environments.maze:Maze")]
    """`module:Class`; the module is installed, or lies where the command runs."""
    settings: Mapping[str, Setting] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    @property
    def is_environment(self) -> bool:
        return True


CapabilityName = Literal[
    "weather", "calculate", "convert", "days_between", "contact", "price", "write_note",
    "read_note", "weekday", "add_days", "append_note", "list_notes", "delete_note", "count_words",
    "reverse_text", "upper_case",
]  # fmt: skip
NumTurns = Annotated[int, Field(ge=1, le=200)]


class ToolboxTasks(TasksBase):
    """Episodes of requests that each need one call of a listed tool. What a tool is called differs
    from episode to episode, so the list must be read."""

    kind: Literal["toolbox"]
    turns: NumTurns | tuple[NumTurns, NumTurns] = 4
    """Requests in an episode: a number, or the least and the most."""
    num_tools: PositiveInt = 4
    """Listed in an episode."""
    capabilities: Annotated[tuple[CapabilityName, ...], Field(min_length=1)] = (
        "weather", "calculate", "convert", "days_between", "contact", "price", "write_note",
        "read_note",
    )  # fmt: skip
    """What the tools of an episode are drawn from."""
    names: Literal["seen", "held_out", "all"] = "seen"
    """Which names a tool may be listed under. Train on `seen`; `held_out` names tell whether the
    list is read, or names were learned by heart."""
    common_name_fraction: Fraction | None = None
    """How often a tool is listed under its common name (`get_weather`). Unset: as often as under
    any other name."""
    random_name_fraction: Fraction = 0.0
    """How often a tool is listed under two words that say nothing (`amber_lantern`), whatever
    `names` says. Nobody knows those by heart: a warm start on some of them learns to read."""
    tool_call_format: Literal["json", "plain"] = "json"
    """json: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. plain: `name(argument="…")`."""
    habit_fraction: Fraction = 0.0
    """Of the calls in the environment's own demonstrations: made under the common name whatever the
    list says. A habit to plant, for something to unlearn."""
    reminder_fraction: Fraction = 0.0
    """Of the calls in these demonstrations, the first of an episode excepted: made below a reminder
    of the listed names, where a hint would stand, and there never by habit. Also planted: a small
    model must be taught that such words are worth reading."""
    retries: NonNegativeInt = 0
    """How many more replies a request gets that was not solved. 0: the next request follows."""
    reward: Literal["share", "all"] = "share"
    """share: of the requests that were solved. all: 1 if every one was and nothing else was
    changed, else 0."""
    tool_role: bool = True
    """False: for templates that know only user and assistant. The list of tools stands above the
    first request, and results above the next one."""
    max_result_chars: Annotated[int, Field(ge=40)] = 400
    """Characters of a tool's result that are shown; what is cut off is told."""

    @property
    def is_environment(self) -> bool:
        return True

    @property
    def turn_range(self) -> tuple[int, int]:
        return self.turns if isinstance(self.turns, tuple) else (self.turns, self.turns)

    @model_validator(mode="after")
    def _can_be_listed(self) -> ToolboxTasks:
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
                "capabilities: 'delete_note' would run out of notes without 'write_note' beside "
                "it; add that, with num_tools of at least 2"
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


TasksConfig = Annotated[
    ArithmeticTasks
    | InstructionTasks
    | JsonlTasks
    | DatasetTasks
    | CustomTasks
    | ConversationTasks
    | TrajectoryTasks
    | EnvironmentTasks
    | ToolboxTasks,
    Field(discriminator="kind"),
]


def override_tasks(tasks: TasksConfig, different: Mapping[str, Any]) -> TasksConfig:
    """The same section with some fields changed; a ValidationError where they do not fit."""
    changed: TasksConfig = TypeAdapter(TasksConfig).validate_python(
        {**tasks.model_dump(exclude_unset=True), **different}
    )
    return changed
