"""Temporary replacements of a model's attributes: one mechanism, one stack.

Models are code of transformers and stay so. For the length of a `with`, a layer's `forward`, the LM
head's matmul or the attention implementation is another one; then the original is back in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

MISSING: Any = object()


class PatchError(RuntimeError):
    """Patches of one attribute conflict, or one was restored out of order."""


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    target: Any
    """A module of the model, its config, its LM head, or a Python module."""
    attribute: str
    value: Any
    nests: bool = False
    """May replace a patch that is active already; otherwise that is a conflict."""

    def __str__(self) -> str:
        return f"{type(self.target).__name__}.{self.attribute}"


_active: list[Patch] = []


def active_patches() -> tuple[Patch, ...]:
    """In the order of their application: the last patch of an attribute is in effect."""
    return tuple(_active)


@contextmanager
def apply_patches(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply the patches in order, and restore the originals in reverse order."""
    originals: list[tuple[Patch, Any]] = []
    active = {_key(patch) for patch in _active}
    try:
        for patch in patches:
            if _key(patch) in active and not patch.nests:
                raise PatchError(f"{patch} is patched already. Active: {_summary()}")
            active.add(_key(patch))
            originals.append((patch, _current(patch)))
            _assign(patch, patch.value)
            _active.append(patch)
        yield
    finally:
        for patch, original in reversed(originals):
            if _current(patch) is not patch.value:
                raise PatchError(f"{patch} is restored out of order. Active: {_summary()}")
            if _active[-1] is patch:
                _active.pop()
            else:
                _active.remove(patch)
            _assign(patch, original)


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Without dropout, and without gradient checkpointing, which discards the KV cache."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def patch_attention(model: Any, name: str) -> Patch:
    """Run the model's attention by the implementation that is registered under `name`."""
    return Patch(model.config.get_text_config(), "_attn_implementation", name, nests=True)


# A model of 28 layers has 140 patches, applied for every batch of passes: what depends on
# classes alone is looked up once, and functions do not go through `nn.Module.__setattr__`.


def _key(patch: Patch) -> tuple[int, str]:
    kind: Any = type(patch.target)
    return id(patch.target), _stored_name(kind, patch.attribute)


@cache
def _stored_name(kind: type, attribute: str) -> str:
    """A config of transformers may hold an attribute under another name (`attribute_map`)."""
    names = getattr(kind, "attribute_map", None)
    return str(names.get(attribute, attribute)) if isinstance(names, dict) else attribute


@cache
def _is_property(kind: type, attribute: str) -> bool:
    return inspect.isdatadescriptor(inspect.getattr_static(kind, attribute, None))


def _current(patch: Patch) -> Any:
    """MISSING where the class provides the attribute and the instance does not."""
    kind: Any = type(patch.target)
    if _is_property(kind, patch.attribute):
        return getattr(patch.target, patch.attribute)
    return vars(patch.target).get(_stored_name(kind, patch.attribute), MISSING)


def _assign(patch: Patch, value: Any) -> None:
    kind: Any = type(patch.target)
    is_of_module = issubclass(kind, nn.Module) and not _is_property(kind, patch.attribute)
    if value is MISSING:
        delattr(patch.target, patch.attribute)
    elif is_of_module and not isinstance(value, Tensor | nn.Module):
        vars(patch.target)[patch.attribute] = value
    else:
        setattr(patch.target, patch.attribute, value)


def _summary() -> str:
    names = list(map(str, _active))
    return ", ".join(f"{name} ({names.count(name)})" for name in dict.fromkeys(names)) or "none"
