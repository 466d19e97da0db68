"""Fallback for non-standard KV caches: one left-padded batch, eager decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from courtside.engines.forward.batching import pad_left


class LeftPaddedBatch:
    """Prompts aligned at their ends, over the KV cache that transformers makes for the model."""

    def __init__(self, model: Any, prompts: Sequence[tuple[int, ...]], *, pad_id: int):
        self.model, self.prompts, self.device = model, prompts, model.device
        self.order = list(range(len(prompts)))
        """The prompt of each row of the batch."""
        unique = list(dict.fromkeys(prompts))
        self._ids_UL, mask_UL = pad_left(unique, pad_id, self.device)
        self._cache: Any = DynamicCache(config=model.config)
        index = {prompt: i for i, prompt in enumerate(unique)}
        self._unique_B = torch.tensor([index[prompt] for prompt in prompts], device=self.device)
        self._mask_UL = mask_UL
        self._is_padded = not bool(mask_UL.all())
        self._mask_BL = mask_UL[self._unique_B]
        self._length_B = self._mask_BL.sum(-1)

    def prefill(self) -> Tensor:
        """Hidden states [B, D] of the last prompt tokens. Equal prompts share one row of the
        forward pass, and its KV cache is copied for each of them."""
        position_UL = (self._mask_UL.cumsum(-1) - 1).clamp(min=0)
        hidden_UD = self._forward(self._ids_UL, self._mask_UL, position_UL)
        if len(self.prompts) > 1:  # some kinds of states cannot be selected
            self._cache.batch_select_indices(self._unique_B)
        return hidden_UD[self._unique_B]

    def advance(self, next_ids: Mapping[int, int]) -> tuple[list[int], Tensor]:
        """One new token per prompt that goes on; the others leave the batch."""
        if len(next_ids) < len(self.order):
            keep = [row for row, prompt in enumerate(self.order) if prompt in next_ids]
            keep_B = torch.tensor(keep, device=self.device)
            self.order = [self.order[row] for row in keep]
            self._cache.batch_select_indices(keep_B)
            self._mask_BL, self._length_B = self._mask_BL[keep_B], self._length_B[keep_B]
        mask_BL = None
        if self._is_padded:
            new_B1 = self._mask_BL.new_ones(len(self.order), 1)
            mask_BL = self._mask_BL = torch.cat([self._mask_BL, new_B1], dim=-1)
        ids_B1 = torch.tensor([[next_ids[prompt]] for prompt in self.order], device=self.device)
        hidden_BD = self._forward(ids_B1, mask_BL, self._length_B[:, None])
        self._length_B = self._length_B + 1
        return self.order, hidden_BD

    def _forward(self, ids_BN: Tensor, mask_BL: Tensor | None, position_BN: Tensor) -> Tensor:
        out = self.model.base_model(
            input_ids=ids_BN,
            attention_mask=mask_BL,
            position_ids=position_BN,
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden_BD: Tensor = out.last_hidden_state[:, -1]
        return hidden_BD
