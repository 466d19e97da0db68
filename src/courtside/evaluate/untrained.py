"""The student as it was before training: in memory only while something is measured with it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from courtside.engines.base import Engine

AnyEngine = TypeVar("AnyEngine", bound=Engine)
Result = TypeVar("Result")


def measure_untrained(
    load_untrained: Callable[[], AnyEngine], measure: Callable[[AnyEngine], Result]
) -> Result:
    """`measure` of the untrained student, whose memory is free afterwards."""
    untrained = load_untrained()
    try:
        return measure(untrained)
    finally:
        del untrained
        gc.collect()  # models and CUDA graphs hold on to each other in circles
        torch.cuda.empty_cache()  # several runs may share a GPU; does nothing without one
