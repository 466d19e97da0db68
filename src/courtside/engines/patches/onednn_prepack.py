"""Linear layers with their weights laid out for a CPU's products, while nothing trains.

A step of decoding multiplies every weight with a handful of rows. Over weights as they are stored
that takes about twice as long as over a copy in oneDNN's own layout. The copy costs as much as a
few steps, so it is made once for many, and dropped before anything trains. Where autocast would
round float32 weights to bfloat16, the copy is rounded, once for all passes.

A LoRA adapter is two narrow products more, of which the second adds to the layer's own: peft's way
there takes as long as a wide one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from courtside.engines.lm_head import LMHead
from courtside.engines.patches.patch import Patch, apply_patches

MIN_DECODE_STEPS = 12
"""Of decoding, for the copy to pay for itself."""
MIN_PARAMETERS = 10**7
"""In all; below, products cost less than calling them."""
PREPACK_ROWS = 16
"""For which weights are laid out. Measured, it makes no difference from 1 row to 256."""


@contextmanager
def prepack_if_faster(model: Any, head: LMHead, *, num_steps: int = 0) -> Iterator[None]:
    """`num_steps` of decoding will be made in here, or passes over prompts and sequences."""
    dtype = matmul_dtype(model)
    if not is_worth_prepacking(model, dtype, num_steps=num_steps):
        yield
        return
    with prepack_linear_layers(model, head, dtype):
        yield


def matmul_dtype(model: Any) -> torch.dtype:
    """What products of the model multiply in, here and now."""
    if model.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    dtype: torch.dtype = model.dtype
    return dtype


def is_worth_prepacking(model: Any, dtype: torch.dtype, *, num_steps: int) -> bool:
    """Whether copies are worth making, and possible."""
    rounds = dtype != model.dtype  # all weights, which costs almost as much as the copies
    return (
        (rounds or num_steps >= MIN_DECODE_STEPS)
        and model.device.type == "cpu"
        and model.dtype in (torch.float32, torch.bfloat16)
        and _can_multiply(dtype)
        and sum(p.numel() for p in model.parameters()) >= MIN_PARAMETERS
    )


def _can_multiply(dtype: torch.dtype) -> bool:
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return hasattr(ops, "_is_mkldnn_bf16_supported") and ops._is_mkldnn_bf16_supported()
    return dtype == torch.float32


@contextmanager
def prepack_linear_layers(model: Any, head: LMHead, dtype: torch.dtype) -> Iterator[None]:
    """Passes of the model and its head in here use copies of their weights of this moment."""
    own_layers = set(head.module.modules())
    others = [m for m in model.modules() if m not in own_layers]
    layers = [m for m in others if type(m) is nn.Linear]
    adapted = [m for m in others if _is_plain_adapter(m)]
    head_linear = _product(*head.parameters(), dtype)
    with apply_patches(
        [
            *(Patch(m, "forward", _product(m.weight, m.bias, dtype)) for m in layers),
            *(Patch(m, "forward", _adapted(m, dtype)) for m in adapted),
            Patch(head, "linear", lambda hidden_ND, *_: head_linear(hidden_ND)),
        ]
    ):
        yield


def _product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), PREPACK_ROWS)
    bias = None if bias is None else bias.detach().to(dtype)

    def product(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(dtype), copy, bias, "none", [], "")
        return found

    return product


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────


def _is_plain_adapter(module: Any) -> bool:
    """A linear layer with one LoRA adapter and nothing that would act beside it."""
    lora = sys.modules.get("peft.tuners.lora.layer")
    return (
        lora is not None
        and type(module) is lora.Linear
        and type(module.base_layer) is nn.Linear
        and len(module.active_adapters) == 1
        and list(module.lora_A) == module.active_adapters
        and not (module.merged or module.lora_variant or any(module.lora_bias.values()))
        and not module.fan_in_fan_out
    )


def _adapted(layer: Any, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Like peft's forward, while nothing trains; the layers inside are laid out already."""
    (name,) = layer.active_adapters
    down, up_OR = layer.lora_A[name], layer.lora_B[name].weight.detach()
    up = torch.ops.mkldnn._reorder_linear_weight(
        (up_OR * layer.scaling[name]).to(dtype), PREPACK_ROWS
    )

    def product(x: Tensor, *args: Any, **settings: Any) -> Tensor:
        x = x.to(dtype)
        found: Tensor = layer.base_layer(x, *args, **settings)
        if not layer.disable_adapters:
            add = torch.ops.mkldnn._linear_pointwise.binary
            found = add(down(x), found, up, None, "add")
        return found

    return product
