"""Branches of a packed trunk against separate forward passes; the trunk's pass is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model
from support.varlen import (
    KERNEL_BACKENDS,
    MODELS,
    first_key_kernel,
    kernel_backend,
    make_branch,
    qwen3,
)
from torch import Tensor

from courtside.engines.forward.forward import ForwardPasses, probe_forward_passes, probe_packing
from courtside.engines.forward.tree_scoring import (
    TrunkCache,
    forward_branches,
    probe_tree_scoring,
)
from courtside.engines.forward.varlen import VarlenBackend
from courtside.types import Branch

SEQUENCES = [[3 + (7 * i * i + n) % 250 for i in range(n)] for n in (25, 40, 1, 12)]
SHAPES = [(0, 25, 4), (0, 11, 3), (0, 11, 6), (3, 3, 5), (3, 0, 2), (1, 40, 1), (2, 1, 9)]
"""Trunk, splice and length of each branch."""


def packed_passes(model: Any, backend: VarlenBackend | None = None) -> ForwardPasses:
    return ForwardPasses(
        model=model, pad_id=1, padding_reason=None, backend=backend or VarlenBackend()
    )


def make_branches() -> list[tuple[int, Branch]]:
    return [
        (trunk, make_branch(splice, [(11 * n + 5 * i) % 258 for i in range(length)]))
        for n, (trunk, splice, length) in enumerate(SHAPES)
    ]


def forward_tree(passes: ForwardPasses, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Hidden states of the trunks with their graph, and of every branch."""
    cache = TrunkCache()
    with passes.patch_model():
        trunk_ND, spans = passes.forward(SEQUENCES, cache=cache)
        branches = [(spans[trunk], branch) for trunk, branch in make_branches()]
        return trunk_ND, forward_branches(passes, cache, branches, **options)


def forward_separately(model: Any, trunk: int, branch: Branch) -> Tensor:
    ids = [*SEQUENCES[trunk][: branch.splice], *branch.token_ids]
    with torch.no_grad():
        out = model.base_model(input_ids=torch.tensor([ids]))
    hidden_ND: Tensor = out.last_hidden_state[0, branch.splice :]
    return hidden_ND


def check_branches(passes: ForwardPasses, **options: Any) -> None:
    _, hidden = forward_tree(passes, **options)
    for (trunk, branch), hidden_ND in zip(make_branches(), hidden, strict=True):
        assert not hidden_ND.requires_grad
        expected_ND = forward_separately(passes.model, trunk, branch)
        torch.testing.assert_close(hidden_ND, expected_ND, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("max_tokens", [None, 7, 1])
@pytest.mark.parametrize("name", MODELS)
def test_branches_equal_separate_passes(name: str, max_tokens: int | None) -> None:
    passes = packed_passes(MODELS[name]().double())
    assert probe_tree_scoring(passes) is None
    check_branches(passes, max_tokens=max_tokens)


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_branches_with_a_varlen_kernel(backend: VarlenBackend) -> None:
    check_branches(packed_passes(qwen3().double(), backend))


@pytest.mark.parametrize("max_keys", [2**17, 45])
def test_keys_gathered_by_index_as_on_a_gpu(max_keys: int) -> None:
    passes = packed_passes(qwen3().double())
    check_branches(passes, by_index=True, max_keys=max_keys)
    _, sliced = forward_tree(passes, by_index=False, max_keys=max_keys)
    _, indexed = forward_tree(passes, by_index=True, max_keys=max_keys)
    assert all(torch.equal(a, b) for a, b in zip(sliced, indexed, strict=True))


def test_max_keys_splits_the_branches() -> None:
    passes = packed_passes(tiny_model().double())
    num_keys: list[int] = []
    passes.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: num_keys.append(sum(kwargs["varlen_layout"].key_lengths)),
        with_kwargs=True,
    )
    forward_tree(passes, max_keys=45)
    assert num_keys == [sum(map(len, SEQUENCES)), 29 + 14, 17 + 8 + 2, 41, 10]


def test_gradients_of_the_trunk_are_unchanged() -> None:
    model = tiny_model().double().train()
    passes = packed_passes(model)
    gradients = []
    for with_branches in (False, True):
        model.zero_grad()
        if with_branches:
            trunk_ND, _ = forward_tree(passes)
        else:
            with passes.patch_model():
                trunk_ND, _ = passes.forward(SEQUENCES)
        trunk_ND.square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        assert all(module.training for module in model.modules())
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_the_cache_has_the_dtype_of_the_attention() -> None:
    """Under autocast values are bfloat16 and rotated keys float32; a CPU attends in float32."""
    passes, cache = packed_passes(qwen3()), TrunkCache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert probe_tree_scoring(passes) is None
        with passes.patch_model():
            passes.forward(SEQUENCES, cache=cache)
    for layer in cache.layers:
        assert {layer.keys.dtype, layer.values.dtype} == {torch.float32}
        assert not layer.keys.requires_grad and layer.keys.shape[2] == sum(map(len, SEQUENCES))


def test_a_kernel_that_aligns_with_the_first_key_is_detected() -> None:
    model, backend = tiny_model(), kernel_backend(first_key_kernel)
    assert probe_packing(model, backend) is None
    assert probe_tree_scoring(packed_passes(model, backend)) == (
        "on a small example its hidden states are not those of separate passes"
    )


def test_a_model_that_ignores_the_cache_is_detected() -> None:
    model = tiny_model()
    for layer in model.base_model.layers:
        original = layer.self_attn.forward

        def forward(*args: Any, original: Any = original, **options: Any) -> Any:
            return original(*args, **(options | {"past_key_values": None}))

        layer.self_attn.forward = forward
    assert "a small example fails" in str(probe_tree_scoring(packed_passes(model)))


def test_a_model_that_is_padded_has_no_tree_scoring() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    passes = probe_forward_passes(model, pad_id=1)
    assert passes.padding_reason is not None
    assert probe_tree_scoring(passes) == passes.padding_reason
