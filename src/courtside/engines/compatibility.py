"""The versions of torch, transformers and PEFT that were tested. Loads none of them.

An older one is refused before anything of it is imported. A newer one is not: every fast path is
compared with plain forward passes before it is used, whatever the version, and a note says so once.
What another version calls by another name belongs here, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from courtside.errors import ModelError

Release = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedVersions:
    package: str
    oldest: Release
    """As pyproject.toml has it: the tests run with it."""
    newest: Release
    """The tests run with it, too; `make versions` repeats both."""


TESTED = (
    TestedVersions(package="torch", oldest=(2, 11), newest=(2, 15)),
    TestedVersions(package="transformers", oldest=(5, 17), newest=(5, 23)),
    TestedVersions(package="peft", oldest=(0, 21), newest=(0, 21)),
)


def refuse_old_versions() -> None:
    for tested in TESTED:
        installed = _installed_version(tested.package)
        if parse_release(installed) < tested.oldest:
            oldest = format_release(tested.oldest)
            raise ModelError(
                f"{tested.package} {installed} is installed, and courtside needs {oldest} or "
                "newer: its tests run with no older one. To update it: pip install -e ."
            )


def describe_new_versions() -> list[str]:
    """A note for each package that is newer than any that was tested."""
    notes = []
    for tested in TESTED:
        installed = _installed_version(tested.package)
        if parse_release(installed) > tested.newest:
            notes.append(
                f"{tested.package} {installed} is newer than {format_release(tested.newest)}, the "
                "newest that was tested: fast paths are used where a probe finds them right, as "
                "always"
            )
    return notes


def parse_release(text: str) -> Release:
    """
    >>> parse_release("2.15.0+cu132"), parse_release("5.24.0.dev0")
    ((2, 15), (5, 24))
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    assert match is not None, f"{text!r} is no version"
    return int(match[1]), int(match[2])


def format_release(release: Release) -> str:
    return ".".join(map(str, release))


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise ModelError(f"{package} is not installed: pip install -e .") from None


# ── what has two names ───────────────────────────────────────────────────────────────────────────


def enable_activation_checkpointing(model: Any) -> None:
    """`gradient_checkpointing_enable` until transformers 5.22, and gone in 6."""
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def disable_activation_checkpointing(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_disable"):
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()


def uses_activation_checkpointing(model: Any) -> bool:
    if hasattr(model, "is_activation_checkpointing"):
        return bool(model.is_activation_checkpointing)
    return bool(model.is_gradient_checkpointing)
