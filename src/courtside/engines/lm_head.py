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

SOFTCAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names that configs have for c in c·tanh(logits / c)."""
DIVISOR_FIELDS = ("logits_scaling", "logits_mup_width_multiplier")
"""Names that configs have for a divisor of the logits."""


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
    name = type(model).__name__
    if module is None or not hasattr(module, "weight"):
        raise ModelError(f"{name} has no linear output head that can be used")
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    for field in DIVISOR_FIELDS:
        scale /= float(getattr(config, field, None) or 1.0)
    softcaps = [getattr(config, field, None) for field in SOFTCAP_FIELDS]
    head = LMHead(
        module,
        vocab_size=module.weight.shape[0],
        softcap=next((float(softcap) for softcap in softcaps if softcap), None),
        scale=scale,
    )
    probe = torch.arange(4, device=model.device)[None] % module.weight.shape[0]
    with torch.no_grad(), _autocast_of(model):
        out = model.base_model(input_ids=probe, use_cache=False)
        expected_NV = model(input_ids=probe, use_cache=False).logits[0]
    hidden_ND = getattr(out, "last_hidden_state", None)
    if hidden_ND is None:
        raise ModelError(
            f"{name}: its base model ({type(model.base_model).__name__}) gives no hidden states. "
            "Use a model whose decoder is a module of its own"
        )
    if hidden_ND.shape[-1] != module.weight.shape[1] or not _is_close(
        head(hidden_ND[0]), expected_NV, tolerance=1e-2 if _is_16bit(model, expected_NV) else 1e-4
    ):
        raise ModelError(
            f"{name} does more between hidden states and logits than a linear map, a soft cap and "
            "a scale, as the heads of BERT-like models do. Use a model whose logits are "
            "hidden · Wᵀ; the table of docs/models.md has those that were tried"
        )
    head.vocab_size = vocab_size or head.vocab_size
    return head


def _is_close(logits_NV: Tensor, expected_NV: Tensor, *, tolerance: float) -> bool:
    expected_NV = expected_NV.to(logits_NV.dtype)
    if logits_NV.shape != expected_NV.shape:
        return False
    atol = tolerance * float(expected_NV.abs().max())
    return torch.allclose(logits_NV, expected_NV, rtol=tolerance, atol=atol)


def _is_16bit(model: Any, logits_NV: Tensor) -> bool:
    """Whether some matmul of the model rounds to 16 bits, or to TF32 on a GPU."""
    if torch.is_autocast_enabled(model.device.type) or logits_NV.dtype.itemsize < 4:
        return True
    is_tf32 = model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return is_tf32 or any(p.dtype.itemsize < 4 for p in model.parameters())


def _autocast_of(model: Any) -> AbstractContextManager[Any]:
    """For a model whose linear weights have been cast ahead of autocast, beside float32
    embeddings."""
    embeddings = model.get_input_embeddings().weight
    linear = next((m for m in model.base_model.modules() if isinstance(m, nn.Linear)), None)
    dtype = embeddings.dtype if linear is None else linear.weight.dtype
    if dtype not in (torch.bfloat16, torch.float16) or embeddings.dtype != torch.float32:
        return nullcontext()
    return torch.autocast(embeddings.device.type, dtype)
