"""The task source of a recipe's [tasks] section."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from courtside.environments.base import HostedEnvironment
from courtside.environments.loading import make_environment
from courtside.environments.switchboard.environment import Switchboard
from courtside.environments.toolbox.environment import Toolbox
from courtside.recipe.builtin import find_data_path
from courtside.recipe.document_tasks import DocumentTasks
from courtside.recipe.prefix_tasks import PrefixTasks
from courtside.recipe.tasks import (
    ArithmeticTasks,
    ConversationTasks,
    CustomTasks,
    DatasetTasks,
    EnvironmentTasks,
    InstructionTasks,
    JsonlTasks,
    MazeTasks,
    SwitchboardTasks,
    TasksConfig,
    ToolboxTasks,
    TrajectoryTasks,
)
from courtside.tasks.arithmetic import arithmetic_space
from courtside.tasks.base import (
    FiniteSource,
    GeneratedSource,
    PromptLimit,
    TaskSource,
    TaskSpace,
    add_system_message,
)
from courtside.tasks.chat_logs import read_chat_logs
from courtside.tasks.custom import load_custom_tasks
from courtside.tasks.documents import TextTokenizer, make_document_source
from courtside.tasks.hf_datasets import load_dataset_tasks
from courtside.tasks.instructions import instruction_space
from courtside.tasks.maze import maze_space
from courtside.tasks.parsing import read_jsonl_tasks
from courtside.tasks.stored_trajectories import make_replay_source
from courtside.tasks.student_prefixes import read_prefix_tasks
from courtside.types import Task


def make_task_source(
    config: TasksConfig,
    seed: int,
    prompt_limit: PromptLimit | None = None,
    environment: HostedEnvironment | None = None,
    hinted: Collection[str] = frozenset(),
    *,
    tokenizer: TextTokenizer | None = None,
    trains: bool = True,
) -> TaskSource:
    """The tasks of a recipe.

    `prompt_limit`: longer prompts are refused or dropped (`tasks.overlong_prompts`) before anything
    runs. `environment`: that of `make_environment`, to be made once. `hinted`: ids that the hints
    of human readers name. `tokenizer`: the student's, which documents need. `trains`: False for
    a suite, whose tasks are evaluated only.
    """
    if prompt_limit is not None:
        prompt_limit = replace(prompt_limit, overlong=config.overlong_prompts)
    generate = partial(
        GeneratedSource,
        seed=seed,
        limit=config.limit,
        limit_by=config.limit_by,
        system_prompt=config.system_prompt,
        prompt_limit=prompt_limit,
    )

    notes: list[str] = []

    def finite(tasks: Sequence[Task], path: Path | str) -> FiniteSource:
        prompted = [add_system_message(task, config.system_prompt) for task in tasks]
        fitting = [t for t in prompted if not prompt_limit or prompt_limit.fits(t, str(path))]
        if prompt_limit and prompted and not fitting:
            raise prompt_limit.error(prompted[0], str(path))
        source = FiniteSource(
            fitting,
            name=str(path),
            seed=seed,
            limit=config.limit,
            limit_by=config.limit_by,
            trains=trains,
        )
        source.num_dropped = len(prompted) - len(fitting)
        source.notes = tuple(notes)
        return source

    match config:
        case ArithmeticTasks():
            return generate(arithmetic_space(config))
        case MazeTasks():
            return generate(maze_space(config))
        case InstructionTasks():
            return generate(instruction_space(config))
        case ToolboxTasks():
            toolbox = Toolbox(config)
            name = "tasks.kind = 'toolbox'"
            return generate(TaskSpace(name, toolbox.size, toolbox.split, toolbox.task))
        case SwitchboardTasks():
            board = Switchboard(config)
            name = "tasks.kind = 'switchboard'"
            return generate(
                TaskSpace(
                    name, board.size, board.split, board.task, board.stratum, board.num_strata
                )
            )
        case EnvironmentTasks():
            environment = environment or make_environment(config)
            assert environment is not None
            return generate(environment_space(environment, f"tasks.path = {config.path!r}"))
        case JsonlTasks():
            path = find_data_path(config.path)
            return finite(read_jsonl_tasks(path, config.grader, notes), path)
        case CustomTasks():
            return finite(load_custom_tasks(config, notes), config.path)
        case DatasetTasks():
            return finite(load_dataset_tasks(config, notes), config.path)
        case ConversationTasks():
            return finite(read_chat_logs(config.path, notes), config.path)
        case DocumentTasks():
            assert tokenizer is not None, "documents become windows of tokens"
            return make_document_source(config, tokenizer, seed=seed)
        case PrefixTasks():
            return finite(read_prefix_tasks(config, notes), config.path)
        case TrajectoryTasks():
            max_tokens = None if prompt_limit is None else prompt_limit.max_tokens
            return make_replay_source(config, seed=seed, max_tokens=max_tokens, hinted=hinted)


def environment_space(environment: HostedEnvironment, name: str) -> TaskSpace:
    """The tasks of a guarded environment; making one may be expensive (a server's `reset`)."""
    task = lru_cache(maxsize=4096)(environment.task)
    return TaskSpace(name, environment.size, lambda index: task(index).split, task)
