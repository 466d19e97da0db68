"""Patches: applied in order, visible on one stack, restored in reverse order, conflicts refused."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from support.tiny_model import tiny_model, tiny_tokenizer
from torch import nn
from transformers import RecurrentGemmaConfig

from courtside.engines.local import LocalEngine
from courtside.engines.patches.patch import (
    Patch,
    PatchError,
    active_patches,
    apply_patches,
    patch_attention,
)


class Doubling:
    factor = 2

    def scale(self, x: int) -> int:
        return self.factor * x


def test_patches_are_in_effect_inside_and_undone_afterwards() -> None:
    target = Doubling()
    patches = [Patch(target, "scale", lambda x: -x), Patch(target, "factor", 3)]
    with apply_patches(patches):
        assert (target.scale(5), target.factor) == (-5, 3)
        assert active_patches() == tuple(patches)
    assert (target.scale(5), vars(target), active_patches()) == (10, {}, ())


def test_an_instance_attribute_gets_its_original_back_after_an_error() -> None:
    layer = nn.Linear(2, 2)
    original = layer.forward = lambda x: 7 * x
    with pytest.raises(KeyError), apply_patches([Patch(layer, "forward", lambda x: x)]):
        assert layer(torch.ones(2)).tolist() == [1, 1]
        raise KeyError
    assert vars(layer)["forward"] is original and not active_patches()


def test_a_second_patch_of_an_attribute_is_a_conflict_and_undoes_its_list() -> None:
    first, second = Doubling(), Doubling()
    with apply_patches([Patch(first, "factor", 3)]):
        conflicting = [Patch(second, "factor", 5), Patch(first, "factor", 4)]
        with pytest.raises(PatchError, match=r"Doubling\.factor is patched already"):
            apply_patches(conflicting).__enter__()
        assert (first.factor, second.factor, len(active_patches())) == (3, 2, 1)
    twice = [Patch(first, "factor", 5), Patch(first, "factor", 6)]
    with pytest.raises(PatchError, match="patched already"), apply_patches(twice):
        pass
    assert (first.factor, active_patches()) == (2, ())


def test_nesting_patches_are_restored_one_by_one() -> None:
    model = tiny_model()
    config = model.config.get_text_config()
    with apply_patches([patch_attention(model, "eager")]):
        with apply_patches([patch_attention(model, "courtside_grouped")]):
            assert [p.value for p in active_patches()] == ["eager", "courtside_grouped"]
            assert config._attn_implementation == "courtside_grouped"
        assert config._attn_implementation == "eager"
    assert config._attn_implementation == "sdpa"


def test_restoring_out_of_order_is_an_error() -> None:
    target = Doubling()
    outer, inner = (apply_patches([Patch(target, "factor", n, nests=True)]) for n in (3, 4))
    with ExitStack() as stack:
        stack.enter_context(outer)
        with inner, pytest.raises(PatchError, match="out of order"):
            stack.pop_all().close()
    assert target.factor == 3, "the inner patch restored what it had replaced"
    patch = active_patches()[0]
    assert patch.target is target
    _forget(patch)


def _forget(patch: Patch) -> None:
    from courtside.engines.patches import patch as module

    module._active.remove(patch)


def test_a_forward_pass_shows_its_patches() -> None:
    engine = LocalEngine(tiny_model(), tiny_tokenizer(), name="tiny", vocab_size=200)
    with engine.passes.patch_model():
        assert [p.attribute for p in active_patches()] == ["_attn_implementation"]
    assert not active_patches()


def test_an_attribute_that_a_config_holds_under_another_name_is_restored() -> None:
    config = RecurrentGemmaConfig(attention_window_size=16)
    with apply_patches([Patch(config, "sliding_window", 5)]):
        assert config.attention_window_size == config.sliding_window == 5
    assert config.attention_window_size == config.sliding_window == 16
    assert not active_patches()
