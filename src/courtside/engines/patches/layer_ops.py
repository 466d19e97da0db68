"""Parts of a layer that can be had with fewer launches, and where a model has them.

Norms, rotary embedding, gated MLPs: each is compared with the model's own on an example, on the
device at hand, and left alone where it is something else. On a GPU each is one kernel
(`layer_kernels`); elsewhere the same numbers by torch (`layer_memory`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from courtside.engines.patches import lean_layers

ROTARY = "apply_rotary_pos_emb"
"""What the modules of transformers call their rotary embedding."""
KERNEL_DTYPES = frozenset([torch.float16, torch.bfloat16, torch.float32])


def can_run_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in KERNEL_DTYPES


# ── norms ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RMSNormMatch:
    """A module that is a plain RMS norm."""

    module: Any
    eps: float
    gives: Mapping[torch.dtype, torch.dtype]
    """The numbers that it makes of numbers."""
    rounds: bool
    """To the numbers of its input, before it multiplies by its weights."""

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """`dtype`: where all who read the result round it to that."""
        if x.dtype not in self.gives:
            untried: Tensor = type(self.module).forward(self.module, x)
            return untried
        return rms_norm(
            x, self.module.weight, eps=self.eps, dtype=dtype or self.gives[x.dtype],
            rounds=self.rounds,
        )  # fmt: skip


def rms_norm(
    x: Tensor, weight_D: Tensor, *, eps: float, dtype: torch.dtype, rounds: bool
) -> Tensor:
    if can_run_kernels(x):
        from courtside.engines.kernels import layers_autograd  # needs Triton, which CPUs do without

        return layers_autograd.rms_norm(x, weight_D, eps=eps, dtype=dtype, rounds=rounds)
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if y.dtype == x.dtype == weight_D.dtype:  # then nothing is rounded on the way
        return lean_layers.scale_rows(y, scale, weight_D).to(dtype)
    y = y * scale
    return ((y.to(x.dtype) if rounds else y) * weight_D).to(dtype)


def match_rms_norm(module: Any, dtype: torch.dtype | None) -> RMSNormMatch | None:
    """The norm that the module is, tried on numbers of its weights and of `dtype`."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or eps is None:
        return None
    if weight.dim() != 1:
        return None
    example = torch.linspace(-2, 3, 3 * len(weight), device=weight.device).view(3, -1)
    tried = [example.to(d) for d in dict.fromkeys((weight.dtype, dtype or weight.dtype))]
    theirs = [module(x) for x in tried]
    gives = {x.dtype: y.dtype for x, y in zip(tried, theirs, strict=True)}
    ours = [RMSNormMatch(module, float(eps), gives, rounds) for rounds in (True, False)]
    gaps = [
        max(_gap(norm.forward(x), y) for x, y in zip(tried, theirs, strict=True)) for norm in ours
    ]
    return ours[gaps.index(min(gaps))] if min(gaps) < 1e-2 else None


# ── rotary embedding ─────────────────────────────────────────────────────────────────────────────


def apply_rotary(
    query_BHND: Tensor, key_BKND: Tensor, cos_BND: Tensor, sin_BND: Tensor
) -> tuple[Tensor, Tensor]:
    """In the numbers of both; under autocast in those that attention would round them to."""
    if can_run_kernels(query_BHND) and can_run_kernels(cos_BND):
        from courtside.engines.kernels import layers_autograd

        dtype = torch.promote_types(query_BHND.dtype, cos_BND.dtype)
        if torch.is_autocast_enabled(query_BHND.device.type):
            dtype = torch.get_autocast_dtype(query_BHND.device.type)
        return layers_autograd.apply_rotary(query_BHND, key_BKND, cos_BND, sin_BND, dtype)
    cos, sin = cos_BND[:, None], sin_BND[:, None]
    return _rotated(query_BHND, cos, sin), _rotated(key_BKND, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def wrap_rotary(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, by `rotate` where it is given what that takes."""

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        plain = not more and not named and q.dim() == k.dim() == 4
        angles = cos.shape[1:] == q.shape[2:] and len(cos) in (1, len(q))
        if not plain or k.shape[2:] != q.shape[2:] or cos.shape != sin.shape or not angles:
            return own(q, k, cos, sin, *more, **named)
        return apply_rotary(q, k, cos, sin)

    return rotated


def find_rotary_modules(model: Any) -> list[ModuleType]:
    """Modules of Python with a rotary embedding that the model's layers use and `rotate` is."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    found = [sys.modules[name] for name in names if hasattr(sys.modules[name], ROTARY)]
    return [module for module in found if _rotates(getattr(module, ROTARY), model.device)]


def _rotates(own: Callable[..., Any], device: torch.device) -> bool:
    numbers = torch.linspace(-3, 4, 2 * 3 * 8, device=device).sin()
    query, key = numbers.view(2, 3, 1, 8), numbers.flip(0)[:32].view(2, 2, 1, 8)
    cos, sin = (3 * numbers)[:16].view(2, 1, 8), (5 * numbers)[7:23].view(2, 1, 8)
    with torch.autocast(device.type, enabled=False):
        try:
            theirs = own(query, key, cos, sin)
        except (RuntimeError, TypeError):  # it takes angles of another form
            return False
        ours = apply_rotary(query, key, cos, sin)
    return all(_gap(x, y) < 1e-5 for x, y in zip(ours, theirs, strict=True))


# ── gated MLPs ───────────────────────────────────────────────────────────────────────────────────


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    if can_run_kernels(gate):
        from courtside.engines.kernels import layers_autograd

        return layers_autograd.swiglu(gate, up)
    return lean_layers.swiglu(gate, up)


def swiglu_linear(layer: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """`layer` of silu(gate) · up."""
    if can_run_kernels(gate):
        return layer(swiglu(gate, up))
    return lean_layers.swiglu_linear(layer, gate, up)


def match_swiglu_mlp(module: Any) -> Callable[[Tensor], Tensor] | None:
    """The forward of a module that is an MLP gated by SiLU, with whatever layers it has."""
    act = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    if act is None or not hasattr(module, "down_proj"):
        return None
    forward: Callable[[Tensor], Tensor]
    if hasattr(module, "gate_proj") and hasattr(module, "up_proj"):

        def forward(x: Tensor) -> Tensor:
            return swiglu_linear(module.down_proj, module.gate_proj(x), module.up_proj(x))

    elif hasattr(module, "gate_up_proj"):

        def forward(x: Tensor) -> Tensor:
            return swiglu_linear(module.down_proj, *module.gate_up_proj(x).chunk(2, -1))

    else:
        return None
    size = getattr(module.down_proj, "out_features", None)
    weight = next(module.parameters(), None)
    if size is None or weight is None:
        return None
    # The activation by itself, too: weights may be so small that any of them is a straight line.
    z = torch.linspace(-6, 6, 101, device=weight.device)
    x = torch.linspace(-2, 3, 3 * size, device=weight.device).sin().view(3, size).to(weight.dtype)
    same = _gap(act(z), F.silu(z)) < 1e-4 and _gap(forward(x), module(x)) < 1e-2
    return forward if same else None


# ── keys and values ──────────────────────────────────────────────────────────────────────────────


def append_kv(
    keys_BKLD: Tensor, values_BKLD: Tensor, key_BK1D: Tensor, value_BK1D: Tensor, length_B: Tensor
) -> None:
    """Write each row's new key and value behind the `length_B` that it has."""
    if can_run_kernels(keys_BKLD):
        from courtside.engines.kernels import layers

        layers.append_kv(keys_BKLD, values_BKLD, key_BK1D, value_BK1D, length_B)
        return
    row_B = torch.arange(len(length_B), device=length_B.device)
    for room, new in ((keys_BKLD, key_BK1D), (values_BKLD, value_BK1D)):
        room[row_B, :, length_B] = new[:, :, 0].to(room.dtype)


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, by the largest number."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    scale = theirs.double().abs().max().clamp(min=1e-6)
    return float((ours.double() - theirs.double()).abs().max() / scale)
