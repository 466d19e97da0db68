"""Combinations of sections that cannot work: the field, the reason and the fix of each."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from courtside.recipe.draft_validation import find_draft_problems
from courtside.recipe.hint_validation import find_hint_problems
from courtside.recipe.losses import Loss
from courtside.recipe.mixed_sampling_validation import find_mixed_sampling_problems
from courtside.recipe.recipe import Recipe
from courtside.recipe.recorded_validation import find_recorded_problems
from courtside.recipe.reward_validation import (
    find_contrast_problems,
    find_gate_problems,
    find_reward_problems,
    find_route_problems,
)
from courtside.recipe.rollout import LimitsConfig
from courtside.recipe.router_validation import find_router_problems
from courtside.recipe.server_validation import find_server_problems
from courtside.recipe.store_validation import find_store_problems
from courtside.recipe.takeover_validation import find_takeover_problems
from courtside.recipe.tasks import override_tasks
from courtside.recipe.teacher import (
    EMA_DECAY,
    CustomTeacherConfig,
    SelfTeacherConfig,
)

MAX_SAMPLES = 1_000_000
"""Trajectories of one step, or answers of one evaluation."""
TOKENS_PER_SECOND = 10_000
"""Of one GPU, for estimates in messages."""


def find_problems(recipe: Recipe) -> Iterator[str]:
    names = recipe.loss_names()
    if len(set(names)) != len(names):
        yield f"losses: two are logged as the same name in {list(names)}; give each its own `name`"
    yield from _rollout_problems(recipe)
    for index, loss in enumerate(recipe.losses):
        for problem in _loss_problems(recipe, loss):
            yield f"losses[{index}] ({loss.kind}): {problem}"
    yield from find_reward_problems(recipe)
    yield from _teacher_problems(recipe)
    for name, changes in recipe.evaluate.suites.items():
        if not name.isidentifier():
            yield f"evaluate.suites: {name!r} is no plain name; use letters, digits and _"
        try:
            tasks = override_tasks(recipe.tasks, changes)
            if "kind" in changes and tasks.is_recorded:
                yield (
                    f"evaluate.suites.{name}: nothing answers the student with kind = "
                    f"{tasks.kind!r}; use a kind with prompts, such as 'jsonl'"
                )
        except ValidationError as error:
            for details in error.errors():
                # The first part is the kind of the section.
                path = ".".join([f"evaluate.suites.{name}", *map(str, details["loc"][1:])])
                text = details["msg"].removeprefix("Value error, ")
                if details["type"] == "union_tag_invalid":
                    text = (
                        f"kind = {changes['kind']!r} is not known; leave it out, or use one of the "
                        "kinds of [tasks]"
                    )
                yield f"{path}: {text.replace('Input should be', 'must be', 1)}"
    yield from find_takeover_problems(recipe)
    yield from find_mixed_sampling_problems(recipe)
    yield from find_router_problems(recipe)
    yield from find_server_problems(recipe)
    yield from find_store_problems(recipe)
    yield from _environment_problems(recipe)
    yield from find_recorded_problems(recipe)
    yield from find_hint_problems(recipe)
    yield from find_draft_problems(recipe)
    yield from find_contrast_problems(recipe)
    yield from _size_problems(recipe)
    if recipe.evaluate.collateral and recipe.evaluate.temperature == 0:
        yield (
            "evaluate.collateral is a mean over what the student samples, and evaluate.temperature "
            "= 0 samples nothing. Use a temperature above 0"
        )
    if not recipe.evaluate.before and (recipe.tasks.is_environment or recipe.evaluate.collateral):
        yield (
            "evaluate.before = false: errors of episodes and evaluate.collateral are compared with "
            "the evaluation before training. Set it to true"
        )
    if recipe.train.budget and recipe.train.lr_schedule != "constant":
        yield (
            f"train.lr_schedule = {recipe.train.lr_schedule!r} reaches zero at train.steps, and "
            f"train.max_{next(iter(recipe.train.budget))} may end the run before. Use 'constant'"
        )
    has_teacher = recipe.teacher is not None or recipe.needs_reference or recipe.drafts
    if recipe.train.max_teacher_tokens and not (has_teacher or recipe.takeover):
        yield (
            "train.max_teacher_tokens: the recipe has no teacher, no reference and no drafts, so "
            "that none would be spent. Use train.max_student_tokens"
        )
    if recipe.train.warmup_steps >= recipe.train.steps:
        yield "train.warmup_steps must be smaller than train.steps"


def _size_problems(recipe: Recipe) -> Iterator[str]:
    """Batches that no machine holds, with what they would take."""
    train, rollout, evaluate = recipe.train, recipe.rollout, recipe.evaluate
    new = rollout.max_new_tokens
    is_recorded = recipe.tasks.is_recorded
    for first, a, second, b, unit, tokens in (
        ("train.prompts_per_step", train.prompts_per_step, "rollout.samples_per_prompt",
         1 if is_recorded else rollout.samples_per_prompt, "trajectories a step", new),
        ("evaluate.num_tasks", evaluate.num_tasks, "evaluate.samples_per_task",
         evaluate.samples_per_task, "answers an evaluation", evaluate.max_new_tokens or new),
    ):  # fmt: skip
        if a * b > MAX_SAMPLES:
            hours = a * b * tokens / TOKENS_PER_SECOND / 3600
            yield (
                f"{first} × {second} = {a:,} × {b:,} = {a * b:,} {unit}: about "
                f"{a * b * tokens:.1e} tokens, {hours:,.0f} hours at {TOKENS_PER_SECOND:,} tokens "
                f"a second. Use at most {MAX_SAMPLES:,}"
            )
    if recipe.tasks.limit is None and recipe.tasks.limit_by == "seed":
        yield (
            "tasks.limit_by = 'seed' says which prompts tasks.limit takes, and there is none; set "
            "tasks.limit, or remove it"
        )
    if recipe.tasks.limit is not None and recipe.tasks.limit > MAX_SAMPLES:
        yield f"tasks.limit = {recipe.tasks.limit:,}: use at most {MAX_SAMPLES:,}, or leave it out"


def _rollout_problems(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    if rollout.off_policy_source == "teacher" and rollout.off_policy is None:
        yield (
            "rollout.off_policy_source = 'teacher' needs a rest; set rollout.student_fraction "
            "below 1"
        )
    if rollout.off_policy == "teacher" and recipe.teacher is None:
        yield (
            "rollout.off_policy_source = 'teacher' needs a [teacher] to sample from; add it, or "
            "use off_policy_source = 'dataset'"
        )
    if rollout.off_policy == "teacher" and isinstance(recipe.teacher, CustomTeacherConfig):
        yield (
            "rollout.off_policy_source = 'teacher': a teacher of kind = 'custom' scores and "
            "does not sample. Use off_policy_source = 'dataset'"
        )
    if rollout.off_policy == "dataset" and recipe.tasks.kind == "instructions":
        yield (
            "rollout.student_fraction < 1 with off_policy_source = 'dataset' needs tasks with a "
            "`completion`; tasks.kind = 'instructions' has none. Use off_policy_source = 'teacher'"
        )


def _loss_problems(recipe: Recipe, loss: Loss) -> Iterator[str]:
    yield from find_route_problems(recipe, loss)
    yield from find_gate_problems(recipe, loss)
    rollout = recipe.rollout
    low, high = rollout.student_fraction_range
    if loss.kind == "preference":
        if recipe.makes_pairs:
            if loss.on != "all":
                yield f"on = {loss.on!r}: a pair trains as a whole; remove it"
        elif high > 0 or rollout.off_policy_source != "dataset":
            yield (
                "preference pairs come from the tasks (`completion` and `rejected`); set "
                "rollout.student_fraction = 0. Or from the student's samples; add [[drafts]] with "
                "kind = 'choose', or [takeover] with pair = true"
            )
        elif loss.on not in ("all", "dataset"):
            yield f"on = {loss.on!r}, but preference pairs are written by the dataset"
        return
    if loss.on == "chosen" and not recipe.makes_pairs:
        yield (
            "on = 'chosen' are the better members of preference pairs; add [[drafts]] with kind = "
            "'choose'"
        )
    # The source of stored trajectories is known when they are read.
    is_stored = recipe.tasks.kind == "trajectories"
    has_source = {
        "student": high > 0 or is_stored,
        "dataset": rollout.off_policy == "dataset" or rollout.corrections,
        "teacher": rollout.off_policy == "teacher" or recipe.teacher_adds_text or is_stored,
    }
    if not has_source.get(loss.on, True):
        yield (
            f"on = {loss.on!r}, but rollout.student_fraction and rollout.off_policy_source give "
            f"no trajectories written by the {loss.on}"
        )
    if loss.needs_teacher and recipe.teacher is None:
        has_endpoint = recipe.takeover is not None and recipe.takeover.endpoint is not None
        yield (
            "compares with a teacher; add a [teacher] section"
            + has_endpoint * ", as takeover.endpoint gives text and no log-probs"
            + (has_endpoint and loss.on == "teacher") * ", or use kind = 'cross_entropy'"
        )
    if loss.kind == "policy_gradient":
        has_other_authors = low < 1 or rollout.corrections or recipe.teacher_adds_text
        if has_other_authors and loss.on not in ("student", "hinted_turns"):
            yield (
                "a policy gradient is defined on the student's own samples; "
                "set on = 'student', or rollout.student_fraction = 1"
            )
        if loss.advantage == "reward" and rollout.samples_per_prompt < 2 and not is_stored:
            yield (
                "advantage = 'reward' compares samples of one prompt; "
                "set rollout.samples_per_prompt to 2 or more"
            )
    corrected = ("dataset", "teacher", "chosen")
    is_imitation = loss.kind == "cross_entropy" and loss.on not in corrected
    is_control = loss.kind == "cross_entropy" and loss.self_imitation
    if is_imitation and has_source["student"] and not is_control:
        yield (
            "imitating the student's own samples degrades it. Use on = 'dataset' or "
            "'teacher' (with rollout.student_fraction below 1), or 'chosen' (with [[drafts]]); as "
            "a control, on = 'student' with self_imitation = true"
        )


def _teacher_problems(recipe: Recipe) -> Iterator[str]:
    if isinstance(recipe.teacher, CustomTeacherConfig) and recipe.reader is not None:
        yield (
            "reader: hints go into the context of a model, and teacher.kind = 'custom' has "
            "none. Use teacher.kind = 'self', 'model' or 'server', or remove the reader"
        )
    for teacher in recipe.model_teachers:
        if not isinstance(teacher, SelfTeacherConfig):
            continue
        if teacher.weights != "ema" and teacher.ema_decay != EMA_DECAY:
            yield "teacher: ema_decay belongs to weights = 'ema'; set that, or remove it"
        differs = teacher.context or recipe.reader or recipe.needs_reference
        differs = differs or not recipe.scores_with_teacher
        if teacher.weights == "live" and not differs:
            yield (
                "teacher: kind = 'self' with weights = 'live' and no context is the student "
                "itself; every gap is zero. Give it a context, or weights = 'frozen'"
            )
    samples = (
        (recipe.takeover is not None and recipe.takeover.endpoint is None)
        or recipe.rollout.mixed_sampling is not None
        or recipe.rollout.off_policy_source == "teacher"
        or any(config.asks_teacher for config in recipe.drafts)
    )
    if recipe.teacher is not None and not (samples or recipe.scores_with_teacher):
        yield "teacher: no loss uses it; remove the section, or add a divergence"


def _environment_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.tasks.is_environment:
        if recipe.evaluate.forward_kl:
            yield "evaluate.forward_kl: a teacher is not evaluated in episodes; remove it"
        return
    kind = f"tasks.kind = {recipe.tasks.kind!r}"
    if recipe.rollout.corrections:
        yield f"rollout.corrections come from an environment, and {kind} is none; remove it"
    if recipe.rollout.limits != LimitsConfig():
        yield f"rollout.limits are those of episodes, and {kind} has none; remove them"
    for index, loss in enumerate(recipe.losses):
        if loss.kind == "policy_gradient" and loss.turn_penalty and not recipe.tasks.is_recorded:
            yield (
                f"losses[{index}]: turn_penalty needs an environment that reports errors; {kind} "
                "reports none. Set it to 0"
            )
