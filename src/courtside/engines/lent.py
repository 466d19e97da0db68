"""Copies of the weights in the numbers that decoding multiplies in.

Trained weights are float32 and a pass under autocast rounds them to bfloat16 first. A step of
decoding would round every weight again for each token; copies that are refreshed once a batch are
the same numbers. Norms are one kernel where a model spells them out in eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from courtside.engines.base import Head


class LentWeights:
    def __init__(self, model: Any, head: Head, dtype: torch.dtype | None):
        self.model, self.head, self.dtype = model, head, dtype
        self._linear = [m for m in model.modules() if type(m) is nn.Linear and m is not head.module]
        self._norms = {m: eps for m in model.modules() if (eps := _eps_of_rms_norm(m)) is not None}
        self._copies: list[Tensor] = []

    def refresh(self) -> None:
        """Take over the weights of this moment; addresses stay, as graphs hold them."""
        if self.dtype is None:
            return
        now = [p.detach() for p in self._parameters()]
        same = [c.shape == p.shape for c, p in zip(self._copies, now, strict=False)]
        if len(self._copies) != len(now) or not all(same):
            self._copies = [p.to(self.dtype, copy=True) for p in now]
        else:
            torch._foreach_copy_(self._copies, now)

    @property
    def key(self) -> int:
        """Where the copies lie: a graph holds that for good."""
        return hash(tuple(copy.data_ptr() for copy in self._copies))

    def _parameters(self) -> list[Tensor]:
        head = self.head.parameters()
        every = [p for m in self._linear for p in (m.weight, m.bias)] + list(head)
        return [p for p in every if p is not None]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Passes of the model and its head in here multiply by the copies."""
        own = self.head.linear
        changed: list[nn.Module] = []
        try:
            for module, eps in self._norms.items():
                module.__dict__["forward"] = partial(_rms_norm, module, eps=eps)
                changed.append(module)
            if self.dtype is not None:
                copies = iter(self._copies)
                for module in self._linear:
                    weight = next(copies)
                    bias = None if module.bias is None else next(copies)
                    module.__dict__["forward"] = _product(weight, bias)
                    changed.append(module)
                product = _product(next(copies), next(copies, None))
                self.head.linear = lambda hidden_ND, *_: product(hidden_ND)
            yield
        finally:
            self.head.linear = own
            for module in changed:
                module.__dict__.pop("forward", None)


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x.to(weight.dtype), weight, bias)


def _rms_norm(module: Any, x: Tensor, *, eps: float) -> Tensor:
    return F.rms_norm(x, module.weight.shape, module.weight.to(x.dtype), eps)


def _eps_of_rms_norm(module: nn.Module) -> float | None:
    """Of a module that is a plain RMS norm, tried on an example; None: it is something else."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or eps is None:
        return None
    if weight.dim() != 1:
        return None
    x = torch.linspace(-2, 3, 3 * len(weight), device=weight.device).view(3, -1).to(weight.dtype)
    with torch.no_grad():
        theirs, ours = module(x), _rms_norm(module, x, eps=eps)
    close = theirs.shape == ours.shape and torch.allclose(ours, theirs, rtol=2e-2, atol=1e-3)
    return float(eps) if close else None
