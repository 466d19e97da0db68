"""RoPE whose factors depend on the length (longrope, dynamic NTK), with one set of factors a model.

transformers takes such factors from the largest position of a batch. A token's log-prob then
depends on its neighbors in the batch and on how long its sequence will become: what was sampled
with one set would be scored and trained with another. Here all sequences get the factors of a
plain pass over `context_length` tokens, as in vLLM, where `--max-model-len` decides for longrope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from courtside.errors import ModelError

LENGTH_DEPENDENT = ("dynamic", "longrope")


def find_original_length(config: Any) -> int | None:
    """The longest sequence with the factors that the model was first trained with; None: its RoPE
    does not depend on the length.

    >>> from transformers import Phi3Config
    >>> find_original_length(Phi3Config(pad_token_id=0))
    """
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    lengths = []
    for settings in _rope_settings(config):
        if settings["rope_type"] == "longrope":
            lengths.append(
                settings.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or longest
            )
        elif settings["rope_type"] == "dynamic":
            lengths.append(longest)
    return min((int(length) for length in lengths if length is not None), default=None)


def _rope_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """Of all layers, or of each kind of layer; with a "rope_type"."""
    pending = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while pending:
        settings = pending.pop()
        if isinstance(settings, Mapping):
            rope_type = settings.get("rope_type", settings.get("type"))
            if isinstance(rope_type, str):
                yield {**settings, "rope_type": rope_type}
            pending.extend(settings.values())


def find_rope_types(config: Any) -> set[str]:
    return {settings["rope_type"] for settings in _rope_settings(config.get_text_config())}


def is_rope_fixed(model: Any) -> bool:
    """Whether no factor depends on the positions of a pass."""
    return not any(_length_dependent_kinds(module) for module in model.modules())


@torch.no_grad()
def fix_rope(model: Any, context_length: int) -> None:
    """Gives all sequences the factors of a sequence of `context_length` tokens, for good."""
    if find_original_length(model.config) is None:
        return
    for module in model.modules():
        fixed_length = getattr(module, "courtside_context_length", None)
        if fixed_length not in (None, context_length):
            raise ModelError(
                f"one model has RoPE factors for {fixed_length:,} tokens and is asked for those of "
                f"{context_length:,}: give student and teacher the same context_length"
            )
        kinds = _length_dependent_kinds(module)
        if kinds:
            _fix_module(module, kinds, context_length, model)


def _fix_module(module: Any, kinds: list[str | None], context_length: int, model: Any) -> None:
    first = torch.arange(min(4, context_length), device=model.device)
    expected = _factors(module, kinds, torch.cat([first, first.new_tensor([context_length - 1])]))
    adaptive = module.rope_type
    module.rope_type = (
        {kind: "default" if kind in kinds else name for kind, name in adaptive.items()}
        if isinstance(adaptive, Mapping)
        else "default"
    )
    module.courtside_context_length = context_length
    passes = (first, torch.cat([first, first.new_tensor([8 * context_length])]))
    if all(torch.equal(_factors(module, kinds, position_N), expected) for position_N in passes):
        return
    module.rope_type = adaptive  # it has a rule of its own
    original = find_original_length(model.config)
    if original is not None and context_length > original:
        raise ModelError(
            f"{type(model).__name__}: its RoPE factors change after {original:,} tokens and cannot "
            f"be fixed. Set context_length to {original:,} at most"
        )


def _factors(module: Any, kinds: list[str | None], position_N: Tensor) -> Tensor:
    """Cosines and sines of the first positions of a pass over `position_N`."""
    example = torch.zeros(1, 1, 1, device=position_N.device)
    tables: list[Tensor] = []
    for kind in kinds:
        options = {} if kind is None else {"layer_type": kind}
        tables += module(example, position_N[None], **options)
    return torch.cat([table[:, :4].flatten() for table in tables])


def _length_dependent_kinds(module: Any) -> list[str | None]:
    """Kinds of layers, or None for all, whose factors `module` takes from the positions."""
    rope_type = vars(module).get("rope_type")
    if isinstance(rope_type, Mapping):
        return [kind for kind, name in rope_type.items() if _depends_on_length(name)]
    return [None] if _depends_on_length(rope_type) else []


def _depends_on_length(rope_type: Any) -> bool:
    return isinstance(rope_type, str) and any(name in rope_type for name in LENGTH_DEPENDENT)
