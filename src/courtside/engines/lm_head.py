"""The LM head: last hidden states to logits, with the LoRA adapter that may be on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from courtside.errors import ModelError
from courtside.types import LowRank


class LMHead:
    """Logits over the first `vocab_size` tokens, in float32 or better.

    A linear map, to which a LoRA adapter of the model may add another of low rank.
    """

    def __init__(self, module: nn.Module, *, vocab_size: int, softcap: float | None, scale: float):
        self.module = module
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.scale = scale
        self.linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self._fixed_low_rank: tuple[LowRank | None] | None = None
        """None: `low_rank` follows the module's adapter."""

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the first `vocab_size` tokens."""
        weight: Any = self.module.weight
        bias: Any = getattr(self.module, "bias", None)
        return weight[: self.vocab_size], None if bias is None else bias[: self.vocab_size]

    @property
    def adapter(self) -> LowRank | None:
        """The adapter's parameters for all tokens, enabled or not; None: there is none."""
        layer: Any = self.module
        if not hasattr(layer, "lora_A"):
            return None
        (name,) = layer.active_adapters
        return LowRank(
            down_RD=layer.lora_A[name].weight,
            up_VR=layer.lora_B[name].weight,
            scale=float(layer.scaling[name]),
        )

    def low_rank(self) -> LowRank | None:
        """What the enabled adapter adds for the first `vocab_size` tokens; None: nothing."""
        if self._fixed_low_rank is not None:
            return self._fixed_low_rank[0]
        adapter: Any = None if getattr(self.module, "disable_adapters", False) else self.adapter
        return None if adapter is None else replace(adapter, up_VR=adapter.up_VR[: self.vocab_size])

    def with_current_adapter(self) -> LMHead:
        """A head that keeps the adapter of this moment, or its absence, when the model's changes:
        a teacher's logits are computed in the update, when its weights are no longer in place."""
        if self.adapter is None:
            return self
        current = self.low_rank()
        if current is not None:
            current = replace(
                current, down_RD=current.down_RD.detach(), up_VR=current.up_VR.detach()
            )
        head = copy(self)
        head._fixed_low_rank = (current,)
        return head

    def raw_logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits before scale and softcap, in the dtype of the matmul."""
        weight, bias = self.parameters()
        logits_NV = self.linear(hidden_ND.to(weight.dtype), weight, bias)
        low = self.low_rank()
        if low is None:
            return logits_NV
        # In the dtype of the model's other adapters, rounded once.
        dtype = logits_NV.dtype
        if not torch.is_autocast_enabled(logits_NV.device.type):
            dtype = torch.promote_types(dtype, low.up_VR.dtype)
        # Cast explicitly: autocast would cache a weight that was first cast without a graph.
        reduced_NR = F.linear(hidden_ND.to(dtype), low.down_RD.to(dtype)) * low.scale
        return torch.addmm(logits_NV.to(dtype), reduced_NR, low.up_VR.to(dtype).t())

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = self.raw_logits(hidden_ND)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV


def find_lm_head(model: Any, *, vocab_size: int | None = None) -> LMHead:
    """The model's LM head, checked against the model's own logits."""
    module = model.get_output_embeddings()
    if module is None or not hasattr(module, "weight"):
        raise ModelError(f"{type(model).__name__} has no linear output head that can be used")
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    head = LMHead(
        module,
        vocab_size=module.weight.shape[0],
        softcap=getattr(config, "final_logit_softcapping", None),
        scale=scale,
    )
    probe = torch.arange(4, device=model.device)[None] % module.weight.shape[0]
    with torch.no_grad(), _autocast_of(model):
        logits_NV = head(model.base_model(input_ids=probe, use_cache=False).last_hidden_state[0])
        expected_NV = model(input_ids=probe, use_cache=False).logits[0].to(logits_NV.dtype)
    if not torch.allclose(
        logits_NV, expected_NV, rtol=1e-2, atol=1e-2 * float(expected_NV.abs().max())
    ):
        raise ModelError(
            f"{type(model).__name__} does more between hidden states and logits than a linear map, "
            "a soft cap and a scale; it cannot be used here yet"
        )
    head.vocab_size = vocab_size or head.vocab_size
    return head


def _autocast_of(model: Any) -> AbstractContextManager[Any]:
    """For a model whose linear weights have been cast ahead of autocast, beside float32
    embeddings."""
    embeddings = model.get_input_embeddings().weight
    linear = next((m for m in model.base_model.modules() if isinstance(m, nn.Linear)), None)
    dtype = embeddings.dtype if linear is None else linear.weight.dtype
    if dtype not in (torch.bfloat16, torch.float16) or embeddings.dtype != torch.float32:
        return nullcontext()
    return torch.autocast(embeddings.device.type, dtype)
