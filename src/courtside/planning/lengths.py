"""Lengths of a recipe's trajectories: measured on its tasks, given, or assumed. Each is noted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from courtside.errors import PlanError
from courtside.planning.workload import HINT_TOKENS, Lengths
from courtside.recipe import Recipe
from courtside.recipe.rollout import TurnRamp

NUM_MEASURED = 64
"""Tasks whose prompts are rendered."""
OBSERVATION_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLengths:
    """What a user or an earlier run says. None: not given."""

    prompt_tokens: float | None = None
    new_tokens: float | None = None
    """Of one turn."""
    turns: float | None = None
    observation_tokens: float | None = None
    """Of an environment's message between two turns."""
    context_tokens: float | None = None
    source: str = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTasks:
    """Means over the tasks of the first steps."""

    prompt: float
    new: float | None
    """Of recorded answers. None: answers are sampled."""
    context: float | None
    """None: known only after an answer."""
    num_tasks: int


def choose_lengths(
    recipe: Recipe, lengths: KnownLengths, measure: Callable[[], MeasuredTasks]
) -> tuple[Lengths, list[str]]:
    """`measure` is called only where something was not given: it loads tasks and a tokenizer."""
    notes: list[str] = []
    is_recorded = recipe.tasks.is_recorded or recipe.rollout.student_fraction_range[1] == 0
    has_context = any(teacher.context for teacher in recipe.model_teachers)
    missing = lengths.prompt_tokens is None or (is_recorded and lengths.new_tokens is None)
    measured = measure() if missing else None
    where = f"mean of {measured.num_tasks} tasks" if measured else lengths.source

    prompt = lengths.prompt_tokens
    if prompt is None:
        assert measured is not None
        prompt = measured.prompt
    notes.append(f"prompts of {prompt:,.0f} tokens ({where})")
    turns = _choose_turns(recipe, lengths, notes)
    new = lengths.new_tokens
    if new is not None:
        notes.append(f"{new:,.0f} sampled tokens a turn ({lengths.source})")
    elif measured is not None and measured.new is not None:
        new = measured.new
        notes.append(f"answers of {new:,.0f} tokens ({where})")
    else:
        new = float(recipe.rollout.max_new_tokens)
        notes.append(
            f"{new:,.0f} sampled tokens a turn: every answer as long as rollout.max_new_tokens "
            "allows. --new-tokens says what they really have"
        )
    observed = 0.0
    if turns > 1:
        size = lengths.observation_tokens
        text = lengths.source if size is not None else "assumed; --observation-tokens"
        size = OBSERVATION_TOKENS if size is None else size
        observed = (turns - 1) * size
        notes.append(f"messages of the environment of {size:,.0f} tokens ({text})")
    context = lengths.context_tokens
    if context is not None:
        notes.append(f"{context:,.0f} more tokens for the teacher ({lengths.source})")
    elif recipe.reader is not None:
        context = HINT_TOKENS + new
        notes.append(
            f"a hint for each trajectory, {context:,.0f} tokens with its turn (assumed; "
            "--context-tokens)"
        )
    elif has_context and measured is not None and measured.context is not None:
        context = measured.context
        notes.append(f"{context:,.0f} more tokens in the teacher's context ({where})")
    elif has_context:
        context = new
        notes.append(
            f"{context:,.0f} more tokens in the teacher's context (assumed; --context-tokens)"
        )
    limit = recipe.evaluate.max_new_tokens
    if limit is None:
        evaluated = None
    else:
        evaluated = turns * (
            limit if lengths.new_tokens is None else min(limit, lengths.new_tokens)
        )
    return (
        Lengths(
            prompt=prompt,
            new=turns * new,
            observed=observed,
            context=context or 0.0,
            trained=_trained_tokens(recipe, new, turns),
            turns=turns,
            evaluated=evaluated,
        ),
        notes,
    )


def _trained_tokens(recipe: Recipe, new: float, turns: float) -> float | None:
    """With losses on hinted turns alone: one turn of each trajectory. None: all turns."""
    only_hinted = all(loss.on == "hinted_turns" for loss in recipe.losses)
    return new if only_hinted and turns > 1 else None


def _choose_turns(recipe: Recipe, lengths: KnownLengths, notes: list[str]) -> float:
    if lengths.turns is not None:
        return lengths.turns
    if not recipe.tasks.is_environment:
        return 1.0
    limit = recipe.rollout.limits.turns
    if isinstance(limit, TurnRamp):
        steps = recipe.train.steps
        mean = sum(limit.at(step) for step in range(steps)) / steps
        notes.append(f"episodes of {mean:.1f} turns (the mean of the recipe's ramp)")
        return mean
    turns = limit or recipe.tasks.max_turns
    if turns is None:
        raise PlanError(
            f"tasks.kind = {recipe.tasks.kind!r} does not say how many turns an episode has. Give "
            "--turns, the mean number of assistant turns"
        )
    notes.append(f"episodes of {turns} turns (the recipe's most)")
    return float(turns)


def measure_tasks(recipe: Recipe) -> MeasuredTasks:
    """Renders the prompts of the first tasks with the student's tokenizer; loads no weights."""
    from courtside.assemble.chat_templates import load_teacher_template
    from courtside.assemble.inputs import load_inputs
    from courtside.assemble.recordings import Recordings
    from courtside.chat.privileged_context import insert_context_text, task_context

    inputs = load_inputs(recipe)
    template = inputs.template
    tasks = inputs.tasks.batch(0, min(NUM_MEASURED, max(1, recipe.train.prompts_per_step)))
    if recipe.tasks.is_recorded:
        context_length = inputs.settings.context_length
        recordings = Recordings(recipe, inputs.tasks, inputs.incremental, context_length)
        trajectories = [recordings.load(task) for task in tasks]
        new = mean(t.num_completion_tokens for t in trajectories)
        prompt = mean(len(t.token_ids) - t.num_completion_tokens for t in trajectories)
        return MeasuredTasks(prompt=prompt, new=new, context=None, num_tasks=len(tasks))
    prompts = {task.id: len(template.prompt_ids(task.messages)) for task in tasks}
    longer = []
    for config in recipe.model_teachers:
        teacher = load_teacher_template(config, recipe, template) if config.context else template
        for task in tasks if config.context is not None else ():
            assert config.context is not None
            if (text := task_context(config.context, task)) is not None:
                ids = teacher.prompt_ids(insert_context_text(config.context, task, text))
                longer.append(len(ids) - prompts[task.id])
    answers = [
        len(template.completion_ids(task.messages, task.completion, task.completion_thoughts))
        for task in tasks
        if task.completion is not None and recipe.rollout.student_fraction_range[1] == 0
    ]
    return MeasuredTasks(
        prompt=mean(prompts.values()),
        new=mean(answers) if answers else None,
        context=mean(longer) if longer else None,
        num_tasks=len(tasks),
    )
