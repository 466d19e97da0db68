"""What a recipe reads besides weights: tokenizer, tasks, hints. All of it is checked before any
model is loaded, so that a mistake costs seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from courtside.assemble.chat_templates import check_teacher_args, make_student_template
from courtside.assemble.contexts import check_contexts, make_prompt_limit
from courtside.assemble.drafts import check_drafts
from courtside.assemble.hint_checks import check_penalties, check_readers
from courtside.assemble.takeovers import check_takeover
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.loading import ModelSettings, load_settings, load_tokenizer
from courtside.environments.base import HostedEnvironment
from courtside.environments.loading import make_environment
from courtside.environments.tool_listing import check_tool_role, choose_tool_listing
from courtside.errors import RecipeError, TaskError
from courtside.evaluate.evaluator import TaskSuite
from courtside.reader.human import hinted_task_ids
from courtside.recipe import Recipe
from courtside.recipe.document_tasks import DocumentTasks
from courtside.tasks.base import PromptLimit, TaskSource
from courtside.tasks.documents import TextTokenizer
from courtside.tasks.graders import make_grader
from courtside.tasks.loading import make_task_source
from courtside.tasks.rewards import RewardFunction, load_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    tokenizer: Any
    settings: ModelSettings
    template: ChatTemplate
    incremental: IncrementalTemplate
    limit: PromptLimit
    environment: HostedEnvironment | None
    tasks: TaskSource
    suites: Mapping[str, TaskSuite]
    """Further held-out tasks, by the name that the recipe gives them."""
    rewards: Mapping[str, RewardFunction]
    """By name; empty: the grade is the reward."""
    notes: tuple[str, ...]
    """What a user should know before the run starts."""


def load_inputs(recipe: Recipe, *, trains: bool = False) -> Inputs:
    """`trains`: also check that the reader's hints can train."""
    student = recipe.student
    settings = load_settings(
        student.model,
        trust_remote_code=student.trust_remote_code,
        context_length=student.context_length,
    )
    check_sizes(recipe, settings)
    tokenizer = load_tokenizer(student.model, trust_remote_code=student.trust_remote_code)
    template = make_student_template(recipe, tokenizer, settings.eos_ids(tokenizer))
    check_teacher_args(recipe, template)
    incremental = IncrementalTemplate(template)
    limit = make_prompt_limit(recipe, incremental, settings.context_length)
    listing = choose_tool_listing(recipe.tasks, template)
    check_tool_role(recipe.tasks, incremental, "tasks")
    environment = make_environment(
        recipe.tasks, recipe.rollout.limits, tools_in_template=listing.uses_template
    )
    hinted = {id for human in recipe.human_readers for id in hinted_task_ids(human)}
    tasks = make_task_source(
        recipe.tasks,
        recipe.seed,
        limit,
        environment,
        hinted,
        tokenizer=TextTokenizer(tokenizer),
    )
    check_contexts(recipe, tasks)
    check_penalties(recipe, tasks)
    check_drafts(recipe, tasks, template)
    check_demonstrations(recipe, environment, tasks)
    check_takeover(recipe, tasks, template)
    return Inputs(
        tokenizer=tokenizer,
        settings=settings,
        template=template,
        incremental=incremental,
        limit=limit,
        environment=environment,
        tasks=tasks,
        suites=make_suites(recipe, incremental, settings.context_length),
        rewards=load_rewards(recipe.rewards, recipe.reward_names()),
        notes=(
            *filter(None, [template.date_note, listing.note]),
            *describe_controls(recipe),
            *tasks.notes,
            *(check_readers(recipe, tasks, incremental, settings.context_length) if trains else ()),
        ),
    )


def describe_controls(recipe: Recipe) -> Iterator[str]:
    """Losses that are not meant to make a better student."""
    for index, loss in enumerate(recipe.losses):
        if loss.kind == "cross_entropy" and loss.self_imitation:
            yield (
                f"losses[{index}] (cross_entropy): self_imitation = true trains on the student's "
                "own samples, right and wrong alike. That is a control: its expected gradient is "
                "zero, and the noise that is left narrows the student down"
            )


def make_suites(
    recipe: Recipe, template: IncrementalTemplate, context_length: int
) -> dict[str, TaskSuite]:
    """Further held-out tasks, by the name that the recipe gives them."""
    suites = {}
    for name, changes in recipe.evaluate.suites.items():
        config = recipe.suite_tasks(name)
        listing = choose_tool_listing(config, template.renderer)
        check_tool_role(config, template, f"evaluate.suites.{name}")
        limit = make_prompt_limit(recipe, template, context_length, suite=config)
        try:
            environment = make_environment(
                config, recipe.rollout.limits, tools_in_template=listing.uses_template
            )
            source = make_task_source(config, recipe.seed, limit, environment, trains=False)
        except TaskError as error:
            raise TaskError(f"evaluate.suites.{name}: {error}") from error
        suites[name] = TaskSuite(
            source, environment, make_grader(config), shares_kind="kind" not in changes
        )
    return suites


def check_demonstrations(
    recipe: Recipe, environment: HostedEnvironment | None, tasks: TaskSource
) -> None:
    """An environment that must demonstrate does so for the first task."""
    if environment is None or not recipe.trains_on_data:
        return
    demonstrate = environment.demonstrate
    if demonstrate is None:
        raise RecipeError(
            "rollout.student_fraction < 1 with off_policy_source = 'dataset' needs "
            "demonstrations, and this environment has no method demonstrate(task). Add one "
            "that returns the messages of a whole episode, or set student_fraction = 1"
        )
    task = tasks.batch(0, 1)[0]
    if not any(message.role == "assistant" for message in demonstrate(task)):
        raise TaskError(
            f"tasks.kind = {recipe.tasks.kind!r}: demonstrate(task) of task {task.id} returned no "
            "message of the assistant, so there is nothing to imitate; add its replies"
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
    tasks = recipe.tasks
    if isinstance(tasks, DocumentTasks) and tasks.max_tokens > settings.context_length:
        raise RecipeError(
            f"tasks.max_tokens = {tasks.max_tokens:,}: the context of {recipe.student.model} is "
            f"{settings.context_length:,} tokens. Use at most that many"
        )
    if tasks.is_recorded and not recipe.evaluate.suites:
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
