"""The task source of a recipe's [tasks] section."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from courtside.environments.base import Environment, validate_task
from courtside.environments.loading import load_environment
from courtside.environments.toolbox.environment import Toolbox
from courtside.environments.toolbox.plan import split_of_index
from courtside.errors import TaskError
from courtside.recipe import (
    ArithmeticTasks,
    ConversationTasks,
    CustomTasks,
    DatasetTasks,
    EnvironmentTasks,
    InstructionTasks,
    JsonlTasks,
    TasksConfig,
    ToolboxTasks,
    TrajectoryTasks,
)
from courtside.tasks.arithmetic import arithmetic_space
from courtside.tasks.base import (
    FiniteSource,
    GeneratedSource,
    TaskSource,
    TaskSpace,
    add_system_message,
)
from courtside.tasks.chat_logs import read_chat_logs
from courtside.tasks.custom import load_custom_tasks
from courtside.tasks.hf_datasets import load_dataset_tasks
from courtside.tasks.instructions import instruction_space
from courtside.tasks.jsonl import read_jsonl_tasks
from courtside.tasks.stored_trajectories import make_replay_source
from courtside.types import Split, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimit:
    """The largest number of prompt tokens, for the student at hand."""

    length: Callable[[Task], int]
    max_tokens: int


def make_task_source(
    config: TasksConfig,
    seed: int,
    prompt_limit: PromptLimit | None = None,
    environment: Environment | None = None,
    hinted: Collection[str] = frozenset(),
) -> TaskSource:
    """The tasks of a recipe.

    `prompt_limit`: longer prompts are refused or dropped (`tasks.overlong_prompts`) before anything
    runs. `environment`: that of `make_environment`, to be made once. `hinted`: ids that the hints
    of human readers name.
    """
    match config:
        case ArithmeticTasks():
            return _generated(arithmetic_space(config), config, seed, prompt_limit)
        case InstructionTasks():
            return _generated(instruction_space(config), config, seed, prompt_limit)
        case JsonlTasks():
            tasks = read_jsonl_tasks(config.path, config.grader)
            return _finite(tasks, str(config.path), config, seed, prompt_limit)
        case CustomTasks():
            return _finite(load_custom_tasks(config), config.path, config, seed, prompt_limit)
        case DatasetTasks():
            return _finite(load_dataset_tasks(config), config.path, config, seed, prompt_limit)
        case ConversationTasks():
            return _finite(
                read_chat_logs(config.path), str(config.path), config, seed, prompt_limit
            )
        case TrajectoryTasks():
            most = None if prompt_limit is None else prompt_limit.max_tokens
            return make_replay_source(config, seed=seed, max_tokens=most, hinted=hinted)
        case EnvironmentTasks():
            environment = environment or load_environment(config.path, config.settings)
            space = environment_space(environment, f"tasks.path = {config.path!r}")
            return _generated(space, config, seed, prompt_limit)
        case ToolboxTasks():
            environment = environment or Toolbox(config)
            space = environment_space(environment, "tasks.kind = 'toolbox'", split_of_index)
            return _generated(space, config, seed, prompt_limit)


def _generated(
    space: TaskSpace, config: TasksConfig, seed: int, prompt_limit: PromptLimit | None
) -> TaskSource:
    def task(index: int) -> Task:
        return add_system_message(space.task(index), config.system_prompt)

    def fits(candidate: Task) -> bool:
        if prompt_limit is None or prompt_limit.length(candidate) <= prompt_limit.max_tokens:
            return True
        if config.overlong_prompts == "error":
            raise _too_long(candidate, prompt_limit, space.name)
        return False

    return GeneratedSource(replace(space, task=task), seed=seed, limit=config.limit, fits=fits)


def _finite(
    tasks: tuple[Task, ...],
    name: str,
    config: TasksConfig,
    seed: int,
    prompt_limit: PromptLimit | None,
) -> TaskSource:
    prompted = [add_system_message(task, config.system_prompt) for task in tasks]
    fitting = [
        t
        for t in prompted
        if prompt_limit is None or prompt_limit.length(t) <= prompt_limit.max_tokens
    ]
    num_dropped = len(prompted) - len(fitting)
    if (
        num_dropped
        and prompt_limit is not None
        and (config.overlong_prompts == "error" or not fitting)
    ):
        raise _too_long(next(t for t in prompted if t not in fitting), prompt_limit, name)
    source = FiniteSource(fitting, name=name, seed=seed, limit=config.limit)
    source.num_dropped = num_dropped
    return source


def _too_long(task: Task, prompt_limit: PromptLimit, name: str) -> TaskError:
    start = task.messages[-1].content[:60]
    return TaskError(
        f"{name}: the prompt {start!r}… (task {task.id}) has {prompt_limit.length(task)} tokens, "
        "with what its completion has beyond rollout.max_new_tokens; with max_new_tokens the "
        f"model's context leaves {prompt_limit.max_tokens}. Shorten it or max_new_tokens, or set "
        "tasks.overlong_prompts = 'drop' to leave such prompts out and count them"
    )


def environment_space(
    environment: Environment, name: str, split: Callable[[int], Split] | None = None
) -> TaskSpace:
    """The tasks of an environment, each validated before it is used. `name` is for error
    messages; `split` for environments that know the split of an index without making its task."""

    def task(index: int) -> Task:
        return validate_task(environment.task(index), f"{name}: task({index})")

    return TaskSpace(
        name=name,
        size=environment.size,
        split=split or (lambda index: task(index).split),
        task=task,
    )
