"""What is known of a recipe's hints before any model is loaded: those that can never train."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from courtside.assemble.recordings import Recordings
from courtside.chat.hint_splicing import SpliceError, splice_hint
from courtside.chat.incremental import IncrementalTemplate
from courtside.environments.switchboard import episode as switchboard
from courtside.environments.toolbox import episode as toolbox
from courtside.errors import RecipeError
from courtside.reader.checks import (
    HintTargets,
    find_doubtful_slots,
    find_hint_problems,
    find_rule_problems,
)
from courtside.reader.human import HumanReader
from courtside.recipe import Recipe
from courtside.recipe.reader import CombinedReaderConfig, HumanReaderConfig, RuleReaderConfig
from courtside.recipe.tasks import SwitchboardTasks, ToolboxTasks
from courtside.tasks.base import FiniteSource, TaskSource
from courtside.tasks.stored_trajectories import ReplaySource
from courtside.types import Hint, Trajectory

MAX_NOTES = 5
"""Hints that are named; the others are counted."""


def check_readers(
    recipe: Recipe, tasks: TaskSource, template: IncrementalTemplate, context_length: int
) -> list[str]:
    """Notes on hints that cannot train; an error where none can, and nothing else trains."""
    reader = recipe.reader
    readers = reader.readers if isinstance(reader, CombinedReaderConfig) else (reader,)
    notes: list[str] = []
    num_useful = 0
    for config in readers:
        if isinstance(config, HumanReaderConfig):
            problems, num_hints = _check_hints_file(config, recipe, tasks, template, context_length)
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
    template: IncrementalTemplate,
    context_length: int,
) -> tuple[list[str], int]:
    """Notes, and the number of hints that can train."""
    hints, skipped = HumanReader(config).read
    unfinished = [
        f"{config.path}: the last line is no JSON and has no line break, as if it were still being "
        "written, and is left out until it is complete"
    ]
    unfinished = unfinished if skipped else []
    if not hints:
        return [
            f"reader.path = {str(config.path)!r}: the file holds no hint. Write one, as with "
            "`courtside view RUN`",
            *unfinished,
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
            count_tokens=lambda text: len(template.renderer.tokenizer(text)["input_ids"]),
            context_length=context_length,
            find_splice_problem=_make_splice_check(recipe, tasks, template, context_length),
        )
    )
    num_unnamed = len(problems) - MAX_NOTES
    more = [f"{config.path}: and {num_unnamed} more hints that cannot train"]
    more = more if num_unnamed > 0 else []
    return [*problems[:MAX_NOTES], *more, *unfinished], len(hints) - len(problems)


def _make_splice_check(
    recipe: Recipe, tasks: TaskSource, template: IncrementalTemplate, context_length: int
) -> Callable[[Hint], str | None] | None:
    """Inserts a hint into its recording, as the step would; None: trajectories are sampled."""
    if not recipe.tasks.is_recorded:
        return None
    recordings = Recordings(recipe, tasks, template, context_length)

    def find_problem(hint: Hint) -> str | None:
        problems: list[str | None] = []
        for trajectory in recordings.find(hint.trajectory):
            addressed = replace(hint, trajectory=trajectory.id)
            problems.append(_find_splice_problem(addressed, trajectory))
        return problems[0] if problems and all(problems) else None

    def _find_splice_problem(hint: Hint, trajectory: Trajectory) -> str | None:
        try:
            branch = splice_hint(
                trajectory,
                hint,
                template,
                place=recipe.hints.position,
                role=recipe.hints.role or "user",
                max_tokens=context_length,
            )
        except SpliceError as error:
            return error.why
        num_tokens = branch.splice + len(branch.token_ids)
        if num_tokens <= context_length:
            return None
        return (
            f"with it, the conversation has {num_tokens:,} tokens up to the end of that turn, and "
            f"the model's context {context_length:,}; shorten it"
        )

    return find_problem


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
    kinds, details = _known_events(recipe, tasks)
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


def _known_events(
    recipe: Recipe, tasks: TaskSource
) -> tuple[Collection[str] | None, Collection[str] | None]:
    """Kinds and details of the environment's events; None: not known before it runs."""
    if isinstance(recipe.tasks, ToolboxTasks):
        return toolbox.EVENT_KINDS, toolbox.EVENT_DETAILS
    if isinstance(recipe.tasks, SwitchboardTasks):
        return switchboard.EVENT_KINDS, switchboard.EVENT_DETAILS
    if isinstance(tasks, ReplaySource):
        return tasks.event_kinds, None
    return (None, None) if recipe.tasks.is_environment else ((), ())


def check_penalties(recipe: Recipe, tasks: TaskSource) -> None:
    """A kind that never occurs would be a penalty that never applies."""
    kinds, _ = _known_events(recipe, tasks)
    for index, loss in enumerate(recipe.losses):
        penalized = (loss.penalized_events or ()) if loss.kind == "policy_gradient" else ()
        unknown = [kind for kind in penalized if kinds is not None and kind not in kinds]
        if unknown:
            raise RecipeError(
                f"losses[{index}].penalized_events: no event of tasks.kind = "
                f"{recipe.tasks.kind!r} is of kind {unknown[0]!r}; they are "
                f"{', '.join(sorted(kinds or ()))}"
            )


def _some_tasks(recipe: Recipe, tasks: TaskSource) -> Iterator[Any]:
    """All train tasks where they are listed, else those of the first step."""
    if isinstance(tasks, FiniteSource):
        yield from tasks.train_tasks
    else:
        yield from tasks.batch(0, recipe.train.prompts_per_step)
