"""The same numbers as attention that repeats keys and values, and only while it is asked for."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from courtside.engines.patches.gqa_cpu import NAME, use_gqa_attention


def masked(model, ids, mask):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def test_numbers_are_those_of_the_models_own_attention() -> None:
    model = tiny_model().double()
    ids = torch.arange(2, 26).view(2, 12)
    see = torch.tril(torch.ones(12, 12, dtype=torch.bool))
    see[7:, 2:5] = False
    mask = see[None, None].expand(2, 1, 12, 12)
    plain = masked(model, ids, mask)
    with use_gqa_attention(model):
        assert model.config._attn_implementation == NAME
        torch.testing.assert_close(masked(model, ids, mask), plain, rtol=1e-10, atol=1e-12)
        # Without a mask, and with the template's padding mask, it is the causal attention it was.
        torch.testing.assert_close(
            model(input_ids=ids, use_cache=False).logits,
            masked(model, ids, torch.ones(2, 12, dtype=torch.long)),
        )
    assert model.config._attn_implementation == "sdpa"


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError), use_gqa_attention(model):
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"


def test_another_attention_is_left_alone() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    with use_gqa_attention(model):
        assert model.config._attn_implementation == "eager"
