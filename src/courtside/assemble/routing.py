"""Whether a student's experts can be recorded, replayed and balanced as its recipe asks."""

from __future__ import annotations

from courtside.engines.local import LocalEngine
from courtside.engines.routing import Routers
from courtside.errors import ModelError
from courtside.recipe import Recipe
from courtside.training.student import Student


def check_routing(recipe: Recipe, local: LocalEngine, student: Student) -> None:
    """Refuses what the model cannot do, with the reason."""
    coefficient = recipe.student.router_aux_loss_coef
    fields = []
    if recipe.student.router_replay:
        fields.append("student.router_replay = true")
    if coefficient:
        fields.append(f"student.router_aux_loss_coef = {coefficient:g}")
    for field in fields:
        reason = find_routing_problem(local, student)
        if reason is not None:
            raise ModelError(f"{field}: {reason}. Leave it out, or use another model")
    if coefficient:
        reason = _find_balance_problem(local)
        if reason is not None:
            raise ModelError(f"{fields[-1]}: {reason}. Leave it out")


def find_routing_problem(local: LocalEngine, student: Student) -> str | None:
    """Why the update cannot go through the experts that the sampler selected; None: it can."""
    if local.routers is None:
        return f"{local.name} has no experts"
    if isinstance(local.routers, str):
        return f"the routing of {local.name} is out of reach ({local.routers})"
    if local.stateless_reason is not None:
        return (
            f"{local.name} samples without a plain KV cache ({local.stateless_reason}), and "
            "experts are recorded beside one only"
        )
    if student.passes.separate_reason is not None:
        return f"sequences of {local.name} pass one at a time ({student.passes.separate_reason})"
    return None


def _find_balance_problem(local: LocalEngine) -> str | None:
    assert isinstance(local.routers, Routers)
    if not hasattr(local.model.config.get_text_config(), "router_aux_loss_coef"):
        return (
            f"transformers has no load-balancing loss for {type(local.model).__name__}, whose "
            "training balanced its experts otherwise"
        )
    silent = [router for router in local.routers.routers if router.logits_index is None]
    return f"{type(silent[0].module).__name__} returns no router logits" if silent else None
