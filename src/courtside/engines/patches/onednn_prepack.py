"""oneDNN weight prepacking for inference on a CPU.

A decoding step multiplies every weight by a few rows, which takes about half the time with weights
in oneDNN's blocked layout. Prepacking costs as much as a few steps, so it is done once for many of
them, and undone before training. Where autocast would cast float32 weights to bfloat16, they are
cast once.

Layers with the same input (QKV, gate/up) are one matmul, because a call costs as much as reading a
small weight. Their LoRA adapters add two narrow ones: the stacked A matrices, and the B matrices as
one block-diagonal matrix, which accumulates into the output of the layers. Adapters are not merged:
bfloat16 would round most of what they learned away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from courtside.engines.lm_head import LMHead
from courtside.engines.patches.fused_layers import FUSED_PROJECTIONS, FusedLinear
from courtside.engines.patches.patch import Patch

MIN_DECODE_STEPS = 12
"""For which prepacking pays."""
MIN_PARAMETERS = 10**7
"""Of the model; the matmuls of smaller ones are bound by call overhead."""
PREPACK_ROWS = 16
"""Batch size that the layout is chosen for. Measured from 1 to 256, it makes no difference."""


def make_prepacked_patches(model: Any, head: LMHead, *, num_steps: int = 0) -> list[Patch]:
    """Of the current weights, for `num_steps` decoding steps (0: prefill or scoring); none where
    they would not pay."""
    autocasts = model.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocasts else model.dtype
    if not is_worth_prepacking(model, dtype, num_steps=num_steps):
        return []
    return prepack_linear_layers(model, head, dtype)


def is_worth_prepacking(model: Any, dtype: torch.dtype, *, num_steps: int) -> bool:
    casts = dtype != model.dtype  # of all weights, which costs almost as much as prepacking
    return (
        (casts or num_steps >= MIN_DECODE_STEPS)
        and model.device.type == "cpu"
        and model.dtype in (torch.float32, torch.bfloat16)
        and _is_supported(dtype)
        and all(type(p) is nn.Parameter for p in model.parameters())  # no shards
        and sum(p.numel() for p in model.parameters()) >= MIN_PARAMETERS
    )


def _is_supported(dtype: torch.dtype) -> bool:
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return hasattr(ops, "_is_mkldnn_bf16_supported") and ops._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def prepack_linear_layers(model: Any, head: LMHead, dtype: torch.dtype) -> list[Patch]:
    """Patches that run model and LM head on prepacked copies of their current weights."""
    head_linear = _prepacked_linear(*head.parameters(), dtype)
    patches = [Patch(head, "linear", lambda hidden_ND, *_: head_linear(hidden_ND))]
    for group in group_layers(model, set(head.module.modules())):
        fused = FusedLinear(prepack_group(group, dtype), [m.out_features for m in group])
        patches += [Patch(m, "forward", partial(fused.forward, i)) for i, m in enumerate(group)]
    return patches


def group_layers(model: Any, head_modules: set[nn.Module]) -> list[tuple[Any, ...]]:
    """Linear layers and PEFT layers of LoRA adapters; those that may have one input together."""
    modules = [m for m in model.modules() if m not in head_modules]
    adapted = [m for m in modules if _is_plain_lora(m)]
    inside = {child for layer in adapted for child in layer.modules()} - set(adapted)
    layers = dict.fromkeys(m for m in modules if type(m) is nn.Linear and m not in inside)
    layers |= dict.fromkeys(adapted)
    groups: list[tuple[Any, ...]] = []
    for names in FUSED_PROJECTIONS:
        for parent in modules:
            group: Any = tuple(getattr(parent, name, None) for name in names)
            if all(m in layers for m in group) and len({m.bias is None for m in group}) == 1:
                groups.append(group)
                for m in group:
                    del layers[m]
    return groups + [(m,) for m in layers]


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


def prepack_group(layers: Sequence[Any], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The outputs of the layers next to each other. PEFT enables the adapters of all or of none."""
    bases = [getattr(layer, "base_layer", layer) for layer in layers]
    biases = None if bases[0].bias is None else torch.cat([base.bias for base in bases])
    linear = _prepacked_linear(torch.cat([base.weight for base in bases]), biases, dtype)
    adapters = [_low_rank(layer) for layer in layers]
    adapted = [layer for layer in layers if _is_plain_lora(layer)]
    if not adapted:
        return linear
    reduce = _prepacked_linear(torch.cat([down_RI for down_RI, _ in adapters]), None, dtype)
    up = _prepack(torch.block_diag(*(up_OR for _, up_OR in adapters)), dtype)

    def adapted_linear(x: Tensor) -> Tensor:
        x = x.to(dtype)
        y = linear(x)
        if not adapted[0].disable_adapters:
            y = torch.ops.mkldnn._linear_pointwise.binary(reduce(x), y, up, None, "add")
        return y

    return adapted_linear


def _low_rank(layer: Any) -> tuple[Tensor, Tensor]:
    """Both matrices of the layer's adapter, the second with its scale; of rank 0 without one."""
    if not _is_plain_lora(layer):
        weight_OI = layer.weight.detach()
        return weight_OI[:0], weight_OI[:, :0]
    (name,) = layer.active_adapters
    up_OR = layer.lora_B[name].weight.detach() * layer.scaling[name]
    return layer.lora_A[name].weight.detach(), up_OR
