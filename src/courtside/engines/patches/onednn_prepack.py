"""oneDNN weight prepacking for inference on a CPU.

A decoding step multiplies every weight by a few rows, which takes about half the time with weights
in oneDNN's blocked layout. Prepacking costs as much as a few steps, so it is done once for many of
them, and undone before training. Where autocast would cast float32 weights to bfloat16, they are
cast once.

A LoRA adapter adds two narrow matmuls, the second of which accumulates into the output of the
layer; in PEFT's forward they take as long as a wide one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from courtside.engines.lm_head import LMHead
from courtside.engines.patches.patch import Patch, apply_patches

MIN_DECODE_STEPS = 12
"""For which prepacking pays."""
MIN_PARAMETERS = 10**7
"""Of the model; the matmuls of smaller ones are bound by call overhead."""
PREPACK_ROWS = 16
"""Batch size that the layout is chosen for. Measured from 1 to 256, it makes no difference."""


@contextmanager
def prepack_if_faster(model: Any, head: LMHead, *, num_steps: int = 0) -> Iterator[None]:
    """Around `num_steps` decoding steps, or around prefill and scoring."""
    autocasts = model.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocasts else model.dtype
    is_faster = is_worth_prepacking(model, dtype, num_steps=num_steps)
    with prepack_linear_layers(model, head, dtype) if is_faster else nullcontext():
        yield


def is_worth_prepacking(model: Any, dtype: torch.dtype, *, num_steps: int) -> bool:
    casts = dtype != model.dtype  # of all weights, which costs almost as much as prepacking
    return (
        (casts or num_steps >= MIN_DECODE_STEPS)
        and model.device.type == "cpu"
        and model.dtype in (torch.float32, torch.bfloat16)
        and _is_supported(dtype)
        and sum(p.numel() for p in model.parameters()) >= MIN_PARAMETERS
    )


def _is_supported(dtype: torch.dtype) -> bool:
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return hasattr(ops, "_is_mkldnn_bf16_supported") and ops._is_mkldnn_bf16_supported()
    return dtype == torch.float32


@contextmanager
def prepack_linear_layers(model: Any, head: LMHead, dtype: torch.dtype) -> Iterator[None]:
    """Run model and LM head on prepacked copies of their current weights."""
    head_modules = set(head.module.modules())
    modules = [m for m in model.modules() if m not in head_modules]
    linear = [m for m in modules if type(m) is nn.Linear]
    adapted = [m for m in modules if _is_plain_lora(m)]
    head_linear = _prepacked_linear(*head.parameters(), dtype)
    with apply_patches(
        [
            *(Patch(m, "forward", _prepacked_linear(m.weight, m.bias, dtype)) for m in linear),
            *(Patch(m, "forward", _prepacked_lora(m, dtype)) for m in adapted),
            Patch(head, "linear", lambda hidden_ND, *_: head_linear(hidden_ND)),
        ]
    ):
        yield


def _prepack(weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight_OI.detach().to(dtype), PREPACK_ROWS
    )
    return packed


def _prepacked_linear(
    weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    packed = _prepack(weight_OI, dtype)
    bias_O = None if bias_O is None else bias_O.detach().to(dtype)

    def linear(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, bias_O, "none", [], "")
        return y

    return linear


# ── LoRA ─────────────────────────────────────────────────────────────────────────────────────────


def _is_plain_lora(module: Any) -> bool:
    """A linear layer with one active LoRA adapter, unmerged, without variants or biases."""
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


def _prepacked_lora(layer: Any, dtype: torch.dtype) -> Callable[..., Tensor]:
    """PEFT's forward in inference; `base_layer` and `lora_A` are prepacked themselves."""
    (name,) = layer.active_adapters
    down = layer.lora_A[name]
    up = _prepack(layer.lora_B[name].weight.detach() * layer.scaling[name], dtype)

    def linear(x: Tensor, *args: Any, **settings: Any) -> Tensor:
        x = x.to(dtype)
        y: Tensor = layer.base_layer(x, *args, **settings)
        if not layer.disable_adapters:
            y = torch.ops.mkldnn._linear_pointwise.binary(down(x), y, up, None, "add")
        return y

    return linear
