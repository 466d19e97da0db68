"""What a recipe reads besides weights: tokenizer, tasks, hints. All of it is checked before any
model is loaded, so that a mistake costs seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from courtside.assemble.contexts import check_contexts, make_prompt_limit
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.loading import ModelSettings, load_settings, load_tokenizer
from courtside.environments.base import HostedEnvironment
from courtside.environments.loading import make_environment
from courtside.environments.switchboard import episode as switchboard
from courtside.environments.toolbox import episode as toolbox
from courtside.errors import RecipeError
from courtside.reader.checks import (
    HintTargets,
    find_doubtful_slots,
    find_hint_problems,
    find_rule_problems,
)
from courtside.reader.human import HumanReader, hinted_task_ids
from courtside.recipe import Recipe
from courtside.recipe.reader import CombinedReaderConfig, HumanReaderConfig, RuleReaderConfig
from courtside.recipe.tasks import SwitchboardTasks, ToolboxTasks
from courtside.tasks.base import FiniteSource, PromptLimit, TaskSource
from courtside.tasks.loading import make_task_source
from courtside.tasks.stored_trajectories import ReplaySource

MAX_NOTES = 5
"""Hints that are named; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    tokenizer: Any
    settings: ModelSettings
    template: ChatTemplate
    incremental: IncrementalTemplate
    limit: PromptLimit
    environment: HostedEnvironment | None
    tasks: TaskSource
    notes: tuple[str, ...]
    """What a user should know before the run starts."""


def load_inputs(recipe: Recipe, *, trains: bool = False) -> Inputs:
    """`trains`: also check that the reader's hints can train."""
    student = recipe.student
    settings = load_settings(student.model, trust_remote_code=student.trust_remote_code)
    check_sizes(recipe, settings)
    tokenizer = load_tokenizer(student.model, trust_remote_code=student.trust_remote_code)
    template = ChatTemplate(tokenizer, name=student.model, eos_ids=settings.eos_ids(tokenizer))
    limit = make_prompt_limit(recipe, template, settings.context_length)
    environment = make_environment(recipe.tasks, recipe.rollout.limits)
    hinted = {id for human in recipe.human_readers for id in hinted_task_ids(human)}
    tasks = make_task_source(recipe.tasks, recipe.seed, limit, environment, hinted)
    check_contexts(recipe, tasks)
    return Inputs(
        tokenizer=tokenizer,
        settings=settings,
        template=template,
        incremental=IncrementalTemplate(template),
        limit=limit,
        environment=environment,
        tasks=tasks,
        notes=(
            *tasks.notes,
            *(check_readers(recipe, tasks, template, settings) if trains else ()),
        ),
    )


def check_sizes(recipe: Recipe, settings: ModelSettings) -> None:
    """Fields that do not fit the model."""
    lora, width = recipe.student.lora, settings.hidden_size
    if lora is not None and width is not None and lora.rank > width:
        raise RecipeError(
            f"student.lora.rank = {lora.rank:,}: the layers of {recipe.student.model} are "
            f"{width:,} wide, and an adapter of a higher rank has more weights than the layer it "
            f"adapts. Use a rank of at most {width:,}, or remove [student.lora] to train all "
            "weights"
        )
    if recipe.tasks.is_recorded:
        return
    for section, new in (
        ("rollout", recipe.rollout.max_new_tokens),
        ("evaluate", recipe.evaluate.max_new_tokens or 0),
    ):
        if new >= settings.context_length:
            raise RecipeError(
                f"{section}.max_new_tokens = {new:,}: the context of {recipe.student.model} is "
                f"{settings.context_length:,} tokens, prompt included. Use fewer, such as "
                f"{settings.context_length // 2:,}"
            )


# ── hints ────────────────────────────────────────────────────────────────────────────────────────


def check_readers(
    recipe: Recipe, tasks: TaskSource, template: ChatTemplate, settings: ModelSettings
) -> list[str]:
    """Notes on hints that cannot train; an error where none can, and nothing else trains."""
    reader = recipe.reader
    readers = reader.readers if isinstance(reader, CombinedReaderConfig) else (reader,)
    notes: list[str] = []
    num_useful = 0
    for config in readers:
        if isinstance(config, HumanReaderConfig):
            problems, num_hints = _check_hints_file(config, recipe, tasks, template, settings)
            notes += problems
            num_useful += num_hints
        elif isinstance(config, RuleReaderConfig):
            problems, num_rules = _check_rules(config, recipe, tasks)
            notes += problems
            num_useful += num_rules
        else:
            num_useful += config is not None
    trains_otherwise = any(loss.on != "hinted_turns" for loss in recipe.losses)
    if reader is not None and not num_useful and not trains_otherwise:
        raise RecipeError(
            "reader: no hint could ever train, and every loss is on = 'hinted_turns':\n"
            + "\n".join(f"  {note}" for note in notes)
        )
    return notes


def _check_hints_file(
    config: HumanReaderConfig,
    recipe: Recipe,
    tasks: TaskSource,
    template: ChatTemplate,
    settings: ModelSettings,
) -> tuple[list[str], int]:
    """Notes, and the number of hints that can train."""
    hints, _ = HumanReader(config).read
    if not hints:
        return [
            f"reader.path = {str(config.path)!r}: the file holds no hint. Write one, as with "
            "`courtside view RUN`"
        ], 0
    targets = HintTargets(
        turns=_hintable_turns(tasks) if recipe.tasks.is_recorded else None,
        num_steps=recipe.train.steps,
        batch_shape=(recipe.train.prompts_per_step, recipe.rollout.samples_per_prompt),
    )
    problems = list(
        find_hint_problems(
            config,
            hints,
            targets,
            count_tokens=lambda text: len(template.tokenizer(text)["input_ids"]),
            context_length=settings.context_length,
        )
    )
    num_unnamed = len(problems) - MAX_NOTES
    more = [f"{config.path}: and {num_unnamed} more hints that cannot train"]
    more = more if num_unnamed > 0 else []
    return [*problems[:MAX_NOTES], *more], len(hints) - len(problems)


def _hintable_turns(tasks: TaskSource) -> Mapping[str, Collection[int]]:
    """By the id that a hints file may name."""
    if isinstance(tasks, ReplaySource):
        return tasks.assistant_turns
    assert isinstance(tasks, FiniteSource)
    turns = {}
    for task in tasks.train_tasks:
        num_answers = sum(message["role"] == "assistant" for message in task.conversation)
        turns[task.id] = range(1, 2 * num_answers, 2)  # what answers an assistant is one turn
    return turns


def _check_rules(
    config: RuleReaderConfig, recipe: Recipe, tasks: TaskSource
) -> tuple[list[str], int]:
    """Notes, and the number of rules that can give a hint."""
    kinds: Collection[str] | None = ()
    details: Collection[str] | None = ()
    if isinstance(recipe.tasks, ToolboxTasks):
        kinds, details = toolbox.EVENT_KINDS, toolbox.EVENT_DETAILS
    elif isinstance(recipe.tasks, SwitchboardTasks):
        kinds, details = switchboard.EVENT_KINDS, switchboard.EVENT_DETAILS
    elif isinstance(tasks, ReplaySource):
        kinds, details = tasks.event_kinds, None
    elif recipe.tasks.is_environment:
        kinds = details = None
    privileged = {name for task in _some_tasks(recipe, tasks) for name in task.privileged}
    problems = list(
        find_rule_problems(config.rules, privileged=privileged, kinds=kinds, details=details)
    )
    useless = {index for index, _ in problems}
    # Rules of the default list that do not apply here are not the user's mistake.
    is_default = "rules" not in config.model_fields_set
    notes = [] if is_default and len(useless) < len(config.rules) else [
        f"reader.rules[{index}] ({config.rules[index].detect}): {problem}"
        for index, problem in problems
    ]  # fmt: skip
    if details is None and not is_default:
        notes += [
            f"reader.rules[{index}]: {{{slot}}} is no privileged field of the tasks "
            f"({', '.join(sorted(privileged)) or 'they have none'}). Where an event has no detail "
            "of that name, the rule gives no hint"
            for index, slot in find_doubtful_slots(config.rules, privileged=privileged)
            if index not in useless
        ]
    return notes, len(config.rules) - len(useless)


def _some_tasks(recipe: Recipe, tasks: TaskSource) -> Iterator[Any]:
    """All train tasks where they are listed, else those of the first step."""
    if isinstance(tasks, FiniteSource):
        yield from tasks.train_tasks
    else:
        yield from tasks.batch(0, recipe.train.prompts_per_step)
