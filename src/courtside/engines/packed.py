"""Linear layers with their weights laid out for products with few rows, while a CPU decodes.

A step of decoding multiplies every weight with a handful of rows. Over weights as they are stored
that takes about twice as long as over a copy in oneDNN's own layout. The copy costs as much as a
few steps, so it is made once for many, and dropped before anything trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from courtside.engines.base import Head

LEAST_STEPS = 12
"""Of decoding, for the copy to pay for itself."""
LEAST_WEIGHTS = 10**7
"""In all; below, products cost less than calling them."""


def pays(model: Any, *, num_steps: int) -> bool:
    """Whether decoding on copies is worth making them, and possible."""
    return (
        num_steps >= LEAST_STEPS
        and model.device.type == "cpu"
        and model.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and sum(p.numel() for p in model.parameters()) >= LEAST_WEIGHTS
    )


@contextmanager
def packed(model: Any, head: Head, num_rows: int) -> Iterator[None]:
    """Passes of the model and its head in here use copies of their weights of this moment."""
    own_layers = set(head.module.modules())
    layers = [m for m in model.modules() if type(m) is nn.Linear and m not in own_layers]
    own = head.linear
    try:
        for layer in layers:
            # What is called is the object's own `forward`, before its class's.
            layer.__dict__["forward"] = _product(layer.weight, layer.bias, num_rows)
        weight, bias = head.parameters()
        product = _product(weight, bias, num_rows)
        head.linear = lambda hidden_ND, *_: product(hidden_ND)
        yield
    finally:
        head.linear = own
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _product(weight: Tensor, bias: Tensor | None, num_rows: int) -> Callable[[Tensor], Tensor]:
    copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), num_rows)
    bias = None if bias is None else bias.detach()

    def product(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
        return found

    return product
