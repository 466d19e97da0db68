"""From the recipe's section to a reader."""

from __future__ import annotations

from collections.abc import Callable

from courtside.errors import RecipeError
from courtside.reader.base import Reader
from courtside.reader.combine import Composed
from courtside.reader.human import ByPerson
from courtside.reader.model.client import Ask
from courtside.reader.model.reader import ByModel
from courtside.reader.rules.reader import ByRules
from courtside.recipe.reader import (
    ModelReader,
    PersonReader,
    RulesReader,
    SeveralReaders,
)


def reader_for(
    config: RulesReader | ModelReader | PersonReader | SeveralReaders,
    *,
    ask_self: Callable[[ModelReader], Ask] | None = None,
    seed: int,
) -> Reader:
    """A reader whose hints can be used as they are: existing turns, one hint each, in the budget.

    `ask_self` is how the student itself can be asked; `own.own_ask` makes one.
    """
    if isinstance(config, SeveralReaders):
        members = [reader_for(one, ask_self=ask_self, seed=seed) for one in config.readers]
    else:
        members = [_one(config, ask_self, seed)]
    return Composed(members, max_hints=config.max_hints, control=config.control, seed=seed)


def _one(
    config: RulesReader | ModelReader | PersonReader,
    ask_self: Callable[[ModelReader], Ask] | None,
    seed: int,
) -> Reader:
    if isinstance(config, RulesReader):
        return ByRules(config, seed=seed)
    if isinstance(config, PersonReader):
        return ByPerson(config)
    if config.endpoint is not None:
        from courtside.reader.model.openai_client import EndpointAsk

        return ByModel(config, EndpointAsk(config))
    if ask_self is None:
        raise RecipeError(
            "reader.kind = 'model' without an endpoint lets the student read, and there is no "
            "student here. Set reader.endpoint"
        )
    return ByModel(config, ask_self(config))
