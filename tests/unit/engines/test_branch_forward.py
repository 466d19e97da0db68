"""Branches off a packed pass against each as a sequence of its own; the pass is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_models import MODELS, newer_stand_in, qwen3, stand_in
from tiny import tiny_model
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from courtside.engines.forward import tree_scoring, varlen
from courtside.engines.forward.forward import ForwardPasses, probe_packing
from courtside.engines.forward.tree_scoring import (
    forward_branches,
    make_trunk_cache,
    probe_tree_scoring,
)
from courtside.types import Branch

SEQUENCES = [[3 + (7 * i * i + n) % 250 for i in range(n)] for n in (25, 40, 1, 12)]
ASKED = [(0, 25, 4), (0, 11, 3), (0, 11, 6), (3, 3, 5), (3, 0, 2), (1, 40, 1), (2, 1, 9)]
"""Sequence, splice and size of each branch."""


def branches() -> list[tuple[int, Branch]]:
    return [
        (which, Branch(trajectory="t", turn=1, splice=splice,
                       token_ids=tuple((11 * n + 5 * i) % 258 for i in range(size)),
                       scored=(False,) * size))
        for n, (which, splice, size) in enumerate(ASKED)
    ]  # fmt: skip


def read(model: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Of the trunk with its graph, and of every branch."""
    passes = ForwardPasses(model=model, pad_id=1, padding_reason=None)
    cache = make_trunk_cache()
    with passes.patch_model():
        trunk_ND, places = passes.forward(SEQUENCES, cache=cache)
        asked = [(places[which], branch) for which, branch in branches()]
        return trunk_ND, forward_branches(model, cache, asked, **options)


def alone(model: Any, which: int, branch: Branch) -> Tensor:
    ids = [*SEQUENCES[which][: branch.splice], *branch.token_ids]
    with torch.no_grad():
        out = model.base_model(input_ids=torch.tensor([ids]))
    found: Tensor = out.last_hidden_state[0, branch.splice :]
    return found


def compare(model: Any, **options: Any) -> None:
    _, found = read(model, **options)
    for (which, branch), hidden_ND in zip(branches(), found, strict=True):
        assert not hidden_ND.requires_grad
        torch.testing.assert_close(hidden_ND, alone(model, which, branch), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("max_tokens", [None, 7, 1])
@pytest.mark.parametrize("name", MODELS)
def test_every_branch_is_a_sequence_of_its_own(name: str, max_tokens: int | None) -> None:
    model = MODELS[name]().double()
    assert probe_tree_scoring(model) is None
    compare(model, max_tokens=max_tokens)


@pytest.mark.parametrize("kernel", [stand_in, newer_stand_in])
def test_the_kernel_of_a_gpu_is_called_as_it_should_be(
    monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    compare(qwen3().double())


@pytest.mark.parametrize("most", [2**17, 45])
def test_keys_that_are_picked_by_index_as_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    model = qwen3().double()
    _, joined = read(model)
    monkeypatch.setattr(tree_scoring, "by_index", lambda device: True)
    monkeypatch.setattr(tree_scoring, "default_max_keys", lambda device: most)
    compare(model)
    _, picked = read(model)
    if most > 45:  # the same passes, and so the same numbers
        assert all(torch.equal(a, b) for a, b in zip(joined, picked, strict=True))


def test_few_keys_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model().double()
    sizes: list[int] = []
    real = tree_scoring.make_varlen_layout

    def noted(lengths: Any, keys: Any, **options: Any) -> Any:
        sizes.append(sum(keys))
        return real(lengths, keys, **options)

    monkeypatch.setattr(tree_scoring, "make_varlen_layout", noted)
    monkeypatch.setattr(tree_scoring, "default_max_keys", lambda device: 45)
    compare(model)
    assert sizes == [29 + 14, 17 + 8 + 2, 41, 10]


def test_the_pass_trains_as_if_nobody_had_looked() -> None:
    model = tiny_model().double().train()
    found = []
    for looked in (False, True):
        model.zero_grad()
        if looked:
            trunk_ND, _ = read(model)
        else:
            passes = ForwardPasses(model=model, pad_id=1, padding_reason=None)
            with passes.patch_model():
                trunk_ND, _ = passes.forward(SEQUENCES)
        trunk_ND.square().mean().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
        assert all(module.training for module in model.modules())
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_keys_are_kept_as_the_attention_has_them() -> None:
    """In one kind of numbers: values come out of a product in bfloat16, rotated keys in float32. A
    CPU attends in float32."""
    model = qwen3()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert probe_tree_scoring(model) is None
        passes, cache = (
            ForwardPasses(model=model, pad_id=1, padding_reason=None),
            make_trunk_cache(),
        )
        with passes.patch_model():
            passes.forward(SEQUENCES, cache=cache)
    for layer in cache.layers:
        assert {layer.keys.dtype, layer.values.dtype} == {torch.float32}
        assert not layer.keys.requires_grad and layer.keys.shape[2] == sum(map(len, SEQUENCES))


def from_the_first_key(*args: Any, window_size: Any, **options: Any) -> Tensor:
    """A kernel that aligns the beginnings: right for a pass, wrong for its branches."""
    query, key, value, ends, key_ends, *_ = args
    parts = []
    for n, (start, key_start) in enumerate(zip(ends[:-1], key_ends[:-1], strict=True)):
        own = [s[a:b].transpose(0, 1) for s, a, b in (
            (query, start, ends[n + 1]), (key, key_start, key_ends[n + 1]),
            (value, key_start, key_ends[n + 1]))]  # fmt: skip
        parts.append(torch.nn.functional.scaled_dot_product_attention(
            *own, is_causal=True, scale=options.get("scale")).transpose(0, 1))  # fmt: skip
    return torch.cat(parts)


def test_a_kernel_that_aligns_the_other_end_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    monkeypatch.setattr(varlen, "varlen_attn", from_the_first_key)
    assert probe_packing(model) is None
    assert probe_tree_scoring(model) == (
        "on a small example its hidden states are not those of separate passes"
    )


def test_a_model_that_keeps_nothing_is_found_out() -> None:
    model = tiny_model()
    for layer in model.base_model.layers:
        real = layer.self_attn.forward

        def forward(*args: Any, own: Any = real, **options: Any) -> Any:
            return own(*args, **(options | {"past_key_values": None}))

        layer.self_attn.forward = forward
    assert "a small example fails" in str(probe_tree_scoring(model))


def test_windows_are_refused_where_they_would_act() -> None:
    config = tiny_model().config
    shape = {n: getattr(config, n) for n in ("vocab_size", "hidden_size", "intermediate_size",
             "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}  # fmt: skip
    model = MistralForCausalLM(MistralConfig(**shape, sliding_window=10)).eval()
    assert "looks through a window" in str(probe_tree_scoring(model))
