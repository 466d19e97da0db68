"""What parts of a recipe cannot go together: the field, the reason and the fix of each."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.config.losses import Loss
from courtside.config.recipe import Recipe, teachers_of
from courtside.config.rollout import Ramp
from courtside.config.teacher import EMA_DECAY, SelfTeacher


def _asks_teacher(loss: Loss) -> bool:
    return loss.kind == "divergence" or (
        loss.kind == "policy_gradient" and loss.advantage == "teacher_gap"
    )


def problems_of(recipe: Recipe) -> Iterator[str]:
    names = recipe.loss_names()
    if len(set(names)) != len(names):
        yield f"losses: two are logged as the same name in {list(names)}; give each its own `name`"
    shares = recipe.rollout.student_share
    least = min(shares.start, shares.end) if isinstance(shares, Ramp) else shares
    most = max(shares.start, shares.end) if isinstance(shares, Ramp) else shares
    if least == 1 and recipe.rollout.rest == "teacher":
        yield "rollout.rest = 'teacher' needs a rest; set rollout.student_share below 1"
    if least < 1 and recipe.rollout.rest == "teacher" and recipe.teacher is None:
        yield "rollout.rest = 'teacher' needs a [teacher] to write; add it, or use rest = 'dataset'"
    if least < 1 and recipe.rollout.rest == "dataset" and recipe.tasks.kind == "instructions":
        yield (
            "rollout.student_share < 1 with rest = 'dataset' needs tasks with a `completion`; "
            "tasks.kind = 'instructions' has none. Use rest = 'teacher'"
        )
    rest = recipe.rollout.rest if least < 1 else None
    written_by = {"student": most > 0, "dataset": rest == "dataset", "teacher": rest == "teacher"}
    for index, loss in enumerate(recipe.losses):
        where = f"losses[{index}] ({loss.kind})"
        if loss.kind == "preference":
            if not (least == most == 0 and recipe.rollout.rest == "dataset"):
                yield (
                    f"{where}: preference pairs come from the tasks (`completion` and `rejected`); "
                    "set rollout.student_share = 0"
                )
            if loss.on not in ("all", "dataset"):
                yield f"{where}: on = {loss.on!r}, but preference pairs are written by the dataset"
            continue
        if loss.on != "all" and not written_by[loss.on]:
            yield (
                f"{where}: on = {loss.on!r}, but rollout.student_share and rollout.rest give no "
                f"trajectories written by the {loss.on}"
            )
        if _asks_teacher(loss) and recipe.teacher is None:
            yield f"{where}: compares with a teacher; add a [teacher] section"
        if loss.kind == "policy_gradient":
            if least < 1 and loss.on != "student":
                yield (
                    f"{where}: a policy gradient is defined on the student's own samples; "
                    "set on = 'student', or rollout.student_share = 1"
                )
            if loss.advantage == "reward" and recipe.rollout.samples < 2:
                yield (
                    f"{where}: advantage = 'reward' compares samples of one prompt; "
                    "set rollout.samples to 2 or more"
                )
        if loss.kind == "cross_entropy" and loss.on in ("student", "all") and most > 0:
            yield (
                f"{where}: imitating the student's own samples degrades it. Use on = 'dataset' or "
                "'teacher' (with rollout.student_share below 1)"
            )
    for teacher in teachers_of(recipe):
        if not isinstance(teacher, SelfTeacher):
            continue
        if teacher.weights != "ema" and teacher.ema_decay != EMA_DECAY:
            yield "teacher: ema_decay belongs to weights = 'ema'; set that, or remove it"
        if teacher.weights == "live" and not teacher.context and not recipe.needs_reference:
            yield (
                "teacher: kind = 'self' with weights = 'live' and no context is the student "
                "itself; every gap is zero. Give it a context, or weights = 'frozen'"
            )
    asked = any(_asks_teacher(loss) for loss in recipe.losses) or recipe.rollout.rest == "teacher"
    if recipe.teacher is not None and not asked:
        yield "teacher: no loss asks it anything; remove the section, or add a divergence"
    if recipe.train.warmup >= recipe.train.steps:
        yield "train.warmup must be smaller than train.steps"
