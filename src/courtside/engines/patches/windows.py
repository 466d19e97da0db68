"""Sliding windows of a model: which layers have one, and a smaller one for the length of a probe.

A window of w positions: a token attends to the last w positions, its own included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from courtside.engines.patches.patch import Patch

PROBE_WINDOW = 5
"""Positions: a small example crosses it."""


def find_layer_kinds(model: Any) -> tuple[str, ...] | None:
    """Distinct kinds of layers in the config; None: it names none."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    return tuple(dict.fromkeys(kinds)) if kinds else None


def find_window(model: Any) -> int | None:
    """The sliding window of the layers that have one; None: none has."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    kinds = find_layer_kinds(model)
    if not window or (kinds is not None and "sliding_attention" not in kinds):
        return None
    return int(window)


def shrink_window(model: Any) -> Iterator[Patch]:
    """Patches by which the windows of the model's layers and masks are `PROBE_WINDOW` at most."""
    window = find_window(model)
    if window is None or window <= PROBE_WINDOW:
        return
    config = model.config.get_text_config()
    yield Patch(config, "sliding_window", PROBE_WINDOW)
    for module in model.modules():
        if module is not model and vars(module).get("sliding_window") == window:
            yield Patch(module, "sliding_window", PROBE_WINDOW)
