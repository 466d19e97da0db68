"""From the recipe's section to a reader."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from courtside.chat.model_client import ModelClient
from courtside.errors import RecipeError
from courtside.ranks import ALONE, Ranks
from courtside.reader.base import CombinedReader, Reader
from courtside.reader.controls import CONTROLS, control_all_ranks, pair_wrong_hints
from courtside.reader.custom import CustomReader
from courtside.reader.human import HumanReader
from courtside.reader.model.reader import ModelReader
from courtside.reader.rules import RuleReader
from courtside.recipe.reader import (
    CombinedReaderConfig,
    CustomReaderConfig,
    HumanReaderConfig,
    ModelReaderConfig,
    ReaderConfig,
    RuleReaderConfig,
)


def make_reader(
    config: ReaderConfig,
    *,
    ask_self: Callable[[ModelReaderConfig], ModelClient] | None = None,
    seed: int,
    contrast: Literal["random_hint", "other_kind"] | None = None,
    ranks: Ranks = ALONE,
) -> Reader:
    """A reader whose hints can be used as they are: existing turns, one hint each, in the budget.

    `ask_self` makes the client whose model is the student (`model.client.StudentClient`).
    `contrast`: which other hints of the batch are wrong ones (`hints.contrast`). `ranks`: each
    reads its own part of a batch.
    """
    if isinstance(config, CombinedReaderConfig):
        members = [
            make_reader(member, ask_self=ask_self, seed=seed, ranks=ranks)
            for member in config.readers
        ]
    else:
        members = [_make_single(config, ask_self, seed)]
    controls = {name: control_all_ranks(control, ranks) for name, control in CONTROLS.items()}
    return CombinedReader(
        readers=members,
        max_hints=config.max_hints,
        control=controls.get(config.control),
        pair=None if contrast is None else partial(pair_wrong_hints, controls[contrast]),
        seed=seed,
    )


def _make_single(
    config: RuleReaderConfig | ModelReaderConfig | HumanReaderConfig | CustomReaderConfig,
    ask_self: Callable[[ModelReaderConfig], ModelClient] | None,
    seed: int,
) -> Reader:
    match config:
        case RuleReaderConfig():
            return RuleReader(config, seed=seed)
        case HumanReaderConfig():
            return HumanReader(config)
        case CustomReaderConfig():
            return CustomReader(config)
    if config.endpoint is not None:
        from courtside.chat.openai_client import OpenAIClient

        client = OpenAIClient(
            config.endpoint,
            field="reader.endpoint",
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            shorten="lower reader.window_chars or reader.max_message_chars",
        )
        return ModelReader(config, client)
    if ask_self is None:
        raise RecipeError(
            "reader.kind = 'model' without an endpoint lets the student read, and there is no "
            "student here. Set reader.endpoint"
        )
    return ModelReader(config, ask_self(config))
