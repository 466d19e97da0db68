"""The values of attention with repeated keys and values, inside the context only."""

from __future__ import annotations

import pytest
import torch
from support.tiny_model import tiny_model

from courtside.engines.patches.attention import GQA_ATTENTION, gains_from_gqa
from courtside.engines.patches.patch import apply_patches, patch_attention


def masked_logits(model, ids, mask):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def test_values_are_those_of_sdpa() -> None:
    model = tiny_model().double()
    ids = torch.arange(2, 26).view(2, 12)
    visible = torch.tril(torch.ones(12, 12, dtype=torch.bool))
    visible[7:, 2:5] = False
    mask = visible[None, None].expand(2, 1, 12, 12)
    plain = masked_logits(model, ids, mask)
    with apply_patches([patch_attention(model, GQA_ATTENTION)]):
        assert model.config._attn_implementation == GQA_ATTENTION
        torch.testing.assert_close(masked_logits(model, ids, mask), plain, rtol=1e-10, atol=1e-12)
        # Without a mask, and with a padding mask, attention is causal as before.
        torch.testing.assert_close(
            model(input_ids=ids, use_cache=False).logits,
            masked_logits(model, ids, torch.ones(2, 12, dtype=torch.long)),
        )
    assert model.config._attn_implementation == "sdpa"


def test_an_error_restores_the_implementation() -> None:
    model = tiny_model()
    patches = [patch_attention(model, GQA_ATTENTION)]
    with pytest.raises(RuntimeError), apply_patches(patches):
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"


def test_another_attention_is_left_alone() -> None:
    model = tiny_model()
    assert gains_from_gqa(model)
    model.set_attn_implementation("eager")
    assert not gains_from_gqa(model)
