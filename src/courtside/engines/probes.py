"""Whether a model does what its settings promise, tried on a small example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def run_probe(model: Any, error: Callable[[], float]) -> str | None:
    """What is wrong with an example whose hidden states are off by `error`; None: nothing."""
    try:
        found = error()
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        return f"a small example fails ({type(e).__name__}: {e})"
    narrow = torch.is_autocast_enabled(model.device.type) or model.dtype.itemsize < 4
    if not found < (0.05 if narrow else 0.01):
        return "on a small example its hidden states are not those of separate passes"
    return None


def distance_from_plain_forward(model: Any, ids: list[int], found_ND: Tensor) -> float:
    """How far the last N hidden states are from those of a pass over these ids alone."""
    out = model.base_model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    alone_ND = out.last_hidden_state[0, -len(found_ND) :].float()
    error_N = (found_ND.float() - alone_ND).norm(dim=-1) / alone_ND.norm(dim=-1)
    # The median: rounding may send a single token to another expert.
    return float(error_N.median())
