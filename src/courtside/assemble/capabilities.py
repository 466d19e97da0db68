"""What a recipe needs of an engine, refused where the engine cannot give it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from courtside.engines.base import Engine, Want
from courtside.errors import RecipeError
from courtside.recipe import Recipe


class Needs(NamedTuple):
    """What the losses need of a teacher's distributions, as `Engine.score` takes it."""

    want: Want
    top_k: int = 0


def require_capabilities(
    recipe: Recipe, engine: Engine, role: Literal["rollout", "teacher"]
) -> Needs:
    """Hidden states where the engine has them, else top-k, where the losses need no more."""
    has = engine.capabilities
    if role == "rollout":
        if not has.weight_updates:
            raise RecipeError(
                f"rollout: {engine.name} cannot load new weights, so its samples would not be the "
                "student's after the first step. Use an engine with weight updates"
            )
        return Needs("logp")
    ks: list[int] = []
    has_distribution_loss = False
    for index, loss in enumerate(recipe.losses):
        field = f"losses[{index}]"
        if loss.kind == "policy_gradient" and loss.baseline:
            _require_hidden(engine, f"{field}.baseline = true")
        elif loss.kind == "divergence" and loss.support.kind == "top_k":
            _require_top_k(engine, f"{field}.support.k", loss.support.k)
            if loss.support.of != "teacher":
                _require_hidden(engine, f"{field}.support.of = {loss.support.of!r}")
            ks.append(loss.support.k)
        elif loss.kind == "divergence":
            _require_hidden(engine, f"{field}.support.kind = {loss.support.kind!r}")
        else:
            continue
        has_distribution_loss = True
    if not has_distribution_loss:
        return Needs("logp")
    return Needs("hidden") if has.hidden_states else Needs("top_k", max(ks))


def _require_top_k(engine: Engine, field: str, k: int) -> None:
    if k > engine.capabilities.top_k:
        raise RecipeError(
            f"{field} = {k}: {engine.name} gives at most the {engine.capabilities.top_k} likeliest "
            "tokens a position (its vocabulary, or its server's limit). Use a smaller k (20 to 100 "
            "is common), or support = { kind = 'full' } with a model in this process"
        )


def _require_hidden(engine: Engine, setting: str) -> None:
    if not engine.capabilities.hidden_states:
        raise RecipeError(
            f"{setting} needs the teacher's whole distributions, and {engine.name} gives the "
            f"{engine.capabilities.top_k} likeliest tokens a position. Use a divergence with "
            "support = { kind = 'top_k', of = 'teacher' }, or a teacher in this process"
        )
