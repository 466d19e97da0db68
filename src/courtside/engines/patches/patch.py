"""Temporary replacements of a model's attributes: one mechanism, one stack.

Models are code of transformers and stay so. For the length of a `with`, a layer's `forward`, the LM
head's matmul or the attention implementation is another one; then the original is back in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


def _key(patch: Patch) -> tuple[int, str]:
    return id(patch.target), _stored_name(patch)


def _stored_name(patch: Patch) -> str:
    """A config of transformers may hold an attribute under another name (`attribute_map`)."""
    names = getattr(type(patch.target), "attribute_map", None)
    return (
        names.get(patch.attribute, patch.attribute) if isinstance(names, dict) else patch.attribute
    )


def _current(patch: Patch) -> Any:
    """MISSING where the class provides the attribute and the instance does not."""
    of_class = inspect.getattr_static(type(patch.target), patch.attribute, None)
    if inspect.isdatadescriptor(of_class):
        return getattr(patch.target, patch.attribute)
    return vars(patch.target).get(_stored_name(patch), MISSING)


def _assign(patch: Patch, value: Any) -> None:
    if value is MISSING:
        delattr(patch.target, patch.attribute)
    else:
        setattr(patch.target, patch.attribute, value)


def _summary() -> str:
    names = list(map(str, _active))
    return ", ".join(f"{name} ({names.count(name)})" for name in dict.fromkeys(names)) or "none"
