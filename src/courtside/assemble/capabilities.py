"""What a recipe's losses need of a teacher, refused where its engine cannot give it."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.engines.base import Engine, Want
from courtside.errors import RecipeError
from courtside.recipe import Recipe
from courtside.teacher.custom import Need


def find_needs(recipe: Recipe) -> Iterator[Need]:
    """One for each loss that needs more than log-probs of the sampled tokens."""
    for index, loss in enumerate(recipe.losses):
        field = f"losses[{index}]"
        if loss.kind == "policy_gradient" and loss.baseline:
            yield Need(f"{field}.baseline = true", "hidden")
        elif loss.kind == "divergence" and loss.support.kind == "top_k":
            yield Need(f"{field}.support.k = {loss.support.k}", "top_k", loss.support.k)
            if loss.support.of != "teacher":
                yield Need(f"{field}.support.of = {loss.support.of!r}", "hidden")
        elif loss.kind == "divergence":
            yield Need(f"{field}.support.kind = {loss.support.kind!r}", "hidden")


def choose_want(recipe: Recipe, engine: Engine) -> tuple[Want, int]:
    """What to ask of `score`: hidden states if there are any, else top-k where that is enough."""
    has = engine.capabilities
    needs = list(find_needs(recipe))
    for need in needs:
        if need.want == "hidden" and not has.hidden_states:
            raise RecipeError(
                f"{need.setting} needs the teacher's whole distributions, and {engine.name} gives "
                f"the {has.top_k} likeliest tokens a position. Use a divergence with "
                "support = { kind = 'top_k', of = 'teacher' }, or a teacher in this process"
            )
        if need.top_k > has.top_k:
            raise RecipeError(
                f"{need.setting}: {engine.name} gives at most the {has.top_k} likeliest tokens a "
                "position (its vocabulary, or its server's limit). Use a smaller k (20 to 100 is "
                "common), or support = { kind = 'full' } with a model in this process"
            )
    if not needs:
        return "logp", 0
    if has.hidden_states:
        return "hidden", 0
    return "top_k", max(need.top_k for need in needs)
