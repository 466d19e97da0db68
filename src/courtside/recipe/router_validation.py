"""Recording, replaying and balancing the routing of a mixture of experts: what cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.recipe import Recipe

LOSS_NAME = "router_aux"
"""Under which the load-balancing loss is logged."""


def find_router_problems(recipe: Recipe) -> Iterator[str]:
    student, rollout = recipe.student, recipe.rollout
    fields = {
        "student.router_replay": student.router_replay,
        "student.router_aux_loss_coef": student.router_aux_loss_coef > 0,
    }
    for field in (name for name, is_set in fields.items() if is_set):
        if rollout.server is not None:
            yield (
                f"{field} takes the experts that the sampler selected, and a server's are not "
                "requested. Remove it, or rollout.server"
            )
        if rollout.mixed_sampling is not None:
            yield (
                f"{field} takes the experts that the sampler selected, and "
                "rollout.mixed_sampling records none. Remove one of the two"
            )
        if recipe.tasks.is_recorded or rollout.student_fraction_range[1] == 0:
            yield (
                f"{field} takes the experts that the student selected when it sampled, and this "
                "recipe samples nothing from it. Remove it"
            )
    if student.router_aux_loss_coef and LOSS_NAME in recipe.loss_names():
        yield (
            f"losses: {LOSS_NAME!r} is the name of the loss of student.router_aux_loss_coef. Give "
            "yours another `name`"
        )
