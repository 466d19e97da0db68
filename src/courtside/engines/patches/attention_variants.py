"""Sliding windows, soft caps and sinks: which layers have them, and attention with the last two,
which torch's kernels do not compute: forward and backward.

A window of w positions: a token attends to the last w positions, its own included. A soft cap c
replaces each score s by c·tanh(s/c). A sink is one more score per query head, with a value of zero:
it takes a share of the softmax and adds nothing to the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from courtside.engines.patches.patch import Patch

PROBE_WINDOW = 5
"""Positions: a small example crosses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionVariant:
    """What a layer's attention does in addition to a causal softmax."""

    window: int | None = None
    """Positions that a token attends to, its own included; None: all before it."""
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @classmethod
    def of_call(
        cls, module: Any, settings: Mapping[str, Any], *, num_keys: int
    ) -> AttentionVariant:
        """From the keywords of an attention call. A window of at least `num_keys` is none."""
        window = settings.get("sliding_window") or find_layer_window(module)
        return cls(
            window=None if window is None or window >= num_keys else int(window),
            softcap=settings.get("softcap"),
            sinks_H=settings.get("s_aux"),
        )

    @property
    def changes_softmax(self) -> bool:
        return self.softcap is not None or self.sinks_H is not None


def find_layer_window(attention: Any) -> int | None:
    """The window of an attention module by its config, for models that pass it only to masks."""
    config = getattr(attention, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[attention.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def find_layer_kinds(model: Any) -> tuple[str, ...] | None:
    """Distinct kinds of layers in the config; None: it names none."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    return tuple(dict.fromkeys(kinds)) if kinds else None


def find_window(model: Any) -> int | None:
    """The sliding window of the layers that have one; None: none has."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    kinds = find_layer_kinds(model)
    if not window or (kinds is not None and "sliding_attention" not in kinds):
        return None
    return int(window)


def shrink_window(model: Any) -> Iterator[Patch]:
    """Patches by which the windows of the model's layers and masks are `PROBE_WINDOW` at most."""
    window = find_window(model)
    if window is None or window <= PROBE_WINDOW:
        return
    config = model.config.get_text_config()
    yield Patch(config, "sliding_window", PROBE_WINDOW)
    for module in model.modules():
        if module is not model and vars(module).get("sliding_window") == window:
            yield Patch(module, "sliding_window", PROBE_WINDOW)


def needs_own_softmax(model: Any) -> bool:
    """Whether the model's attention has a soft cap or sinks, which torch's SDPA leaves out."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return True
    return any("sinks" in module._parameters for module in model.modules())


# ── soft caps and sinks ──────────────────────────────────────────────────────────────────────────


def attend(
    query_BHND: Tensor,
    key_BKMD: Tensor,
    value_BKMD: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    variant: AttentionVariant,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, D] and the log-sum-exp of its scores, the sink's included, [B, H, N].

    `mask`: boolean, or added to the scores, [B or 1, 1, N, M]; it has the window, if there is one.
    Autograd does not see through this: `attend_backward` is its backward pass.
    """
    num_kv_heads = key_BKMD.shape[1]
    query = _group_heads(query_BHND, num_kv_heads)
    score_BHNM = _capped_scores(query, key_BKMD, query_BHND.shape[2], scale, variant)
    score_BHNM = _apply_mask(score_BHNM, mask)
    lse_BHN = score_BHNM.logsumexp(-1)
    if variant.sinks_H is not None:
        lse_BHN = torch.logaddexp(lse_BHN, variant.sinks_H.to(lse_BHN.dtype)[:, None])
    weight = score_BHNM.sub_(lse_BHN[..., None]).exp_().to(value_BKMD.dtype)
    output = _group_heads(weight, num_kv_heads) @ value_BKMD
    return output.view(*query_BHND.shape[:3], -1), lse_BHN


def attend_backward(
    gradient_BHND: Tensor,
    query_BHND: Tensor,
    key_BKMD: Tensor,
    value_BKMD: Tensor,
    mask: Tensor | None,
    *,
    output_BHND: Tensor,
    lse_BHN: Tensor,
    scale: float,
    variant: AttentionVariant,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; that of the sinks is `sink_gradient`."""
    num_kv_heads, dtype = key_BKMD.shape[1], query_BHND.dtype
    gradient, query = (_group_heads(x, num_kv_heads) for x in (gradient_BHND, query_BHND))
    score_BHNM = _capped_scores(query, key_BKMD, query_BHND.shape[2], scale, variant)
    cap = variant.softcap
    slope = None if cap is None else 1 - (score_BHNM / cap).square_()
    weight_BHNM = _apply_mask(score_BHNM, mask).sub_(lse_BHN[..., None]).exp_()
    weight = _group_heads(weight_BHNM, num_kv_heads)
    value_grad = weight.to(dtype).mT @ gradient
    weight_grad_BHNM = (gradient @ value_BKMD.mT).to(weight.dtype).view_as(weight_BHNM)
    weighted_BHN1 = (gradient_BHND * output_BHND.to(weight.dtype)).sum(-1, keepdim=True)
    score_grad_BHNM = weight_BHNM.mul_(weight_grad_BHNM.sub_(weighted_BHN1)).mul_(scale)
    if slope is not None:
        score_grad_BHNM.mul_(slope)
    score_grad = _group_heads(score_grad_BHNM, num_kv_heads).to(dtype)
    query_grad = (score_grad @ key_BKMD).view(query_BHND.shape)
    return query_grad, score_grad.mT @ query, value_grad


def sink_gradient(
    sinks_H: Tensor, gradient_BHND: Tensor, output_BHND: Tensor, lse_BHN: Tensor
) -> Tensor:
    """A sink moves weight away from the output: by its share of the softmax, in every query."""
    weighted_BHN = (gradient_BHND.to(lse_BHN.dtype) * output_BHND).sum(-1)
    share_BHN = (sinks_H.to(lse_BHN.dtype)[:, None] - lse_BHN).exp()
    return -(share_BHN * weighted_BHN).sum((0, 2)).to(sinks_H.dtype)


def _capped_scores(
    query: Tensor, key_BKMD: Tensor, num_queries: int, scale: float, variant: AttentionVariant
) -> Tensor:
    """[B, H, N, M] in float32 at least."""
    score: Tensor = query @ key_BKMD.mT
    score = score.to(torch.promote_types(score.dtype, torch.float32)) * scale
    if variant.softcap is not None:
        score = score.div_(variant.softcap).tanh_().mul_(variant.softcap)
    score_BHNM: Tensor = score.view(len(score), -1, num_queries, score.shape[-1])
    return score_BHNM


def _apply_mask(score_BHNM: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return score_BHNM
    if mask.dtype == torch.bool:
        return score_BHNM.masked_fill_(~mask, -torch.inf)
    return score_BHNM.add_(mask)


def _group_heads(state_BHNX: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, N, X] to [B, K, H/K · N, X]: the query heads that share a KV head as more queries."""
    B, H, N, X = state_BHNX.shape
    return state_BHNX.reshape(B, num_kv_heads, H // num_kv_heads * N, X)
