"""Packed batches on the device: hidden states and gradients against separate float64 passes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.float64 import in_float64, relative_error
from support.gpu_models import VOCAB_SIZE, qwen3
from support.gradients import take_gradients
from torch import Tensor

from courtside.engines.forward.forward import ForwardPasses, probe_packing, probe_prefix_sharing
from courtside.engines.forward.tree_scoring import (
    TrunkCache,
    forward_branches,
    probe_tree_scoring,
)
from courtside.engines.forward.varlen import VarlenBackend, supports_varlen_kernel
from courtside.types import Branch

LENGTHS = (130, 1, 64, 7, 300, 33)
PRECISIONS = {
    "float32": (torch.float32, None),
    "autocast": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, None),
}


@contextmanager
def casting(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


def sequences() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_sequences_equal_separate_passes(
    precision: str, checkpointing: bool, device: torch.device
) -> None:
    dtype, cast = PRECISIONS[precision]
    model = qwen3().to(device, dtype)
    exact = in_float64(model)
    kernel_calls: list[bool] = []

    def record_kernel(*states: Tensor) -> bool:
        kernel_calls.append(supports_varlen_kernel(*states))
        return kernel_calls[-1]

    backend = VarlenBackend(supports_kernel=record_kernel)
    with casting(device, cast):
        assert probe_packing(model) is None
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    results: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    weight_ND = torch.randn(sum(LENGTHS), model.config.hidden_size, dtype=torch.float64)
    for name, padding_reason in (("packed", None), ("padded", "asked for")):
        passes = ForwardPasses(
            model=model, pad_id=1, padding_reason=padding_reason, backend=backend
        )
        with passes.patch_model(), casting(device, cast):
            hidden_ND, spans = passes.forward(sequences())
            pieces = [hidden_ND[p.start : p.start + n] for p, n in zip(spans, LENGTHS, strict=True)]
            samples_ND = torch.cat(pieces)
            samples_ND.backward(weight_ND.to(samples_ND))
        results[name] = samples_ND, take_gradients(dict(model.named_parameters()))
    expected_calls = model.config.num_hidden_layers * (2 if checkpointing else 1)
    has_kernel = device.type == "cuda" and precision != "float32"
    assert sum(kernel_calls) == (expected_calls if has_kernel else 0)

    exact_ND = torch.cat(
        [
            exact.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            for ids in sequences()
        ]
    )
    exact_ND.backward(weight_ND)
    expected = take_gradients(dict(exact.named_parameters()))
    # The rounding error is that of the padded pass; attention across sequences would be far off.
    packed_ND, packed = results["packed"]
    padded_ND, padded = results["padded"]
    assert relative_error(packed_ND, exact_ND.detach()) < 1e-5 + 1.5 * relative_error(
        padded_ND, exact_ND.detach()
    )
    assert relative_error(packed_ND, exact_ND.detach()) < (1e-4 if precision == "float32" else 0.05)
    assert packed.keys() == padded.keys() == expected.keys()
    slack = 1e-5 if precision == "float32" else 0.01
    for name, gradient in expected.items():
        assert relative_error(packed[name], gradient) < slack + 2 * relative_error(
            padded[name], gradient
        ), name


def two_groups() -> list[list[int]]:
    """Two prompts with four samples each, one of them empty, and one other sequence."""
    rng = random.Random(2)
    samples: list[list[int]] = []
    for num_prompt, suffixes in ((150, (40, 1, 0, 130)), (33, (64, 7, 65, 200))):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt)]
        samples += [prompt + [rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in suffixes]
    return [*samples[1:], [rng.randrange(VOCAB_SIZE) for _ in range(77)], samples[0]]


NUM_SHARED = 150 + 171 + 33 + 336 + 77


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_samples_with_a_shared_prompt_equal_separate_passes(
    precision: str, checkpointing: bool, device: torch.device
) -> None:
    dtype, cast = PRECISIONS[precision]
    model = qwen3().to(device, dtype)
    exact = in_float64(model)
    with casting(device, cast):
        assert probe_prefix_sharing(model) is None
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    sequences = two_groups()
    sizes = [len(ids) for ids in sequences]
    weight_ND = torch.randn(sum(sizes), model.config.hidden_size, dtype=torch.float64)
    results: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for name, unshared in (("shared", None), ("separate", "asked for")):
        passes = ForwardPasses(model=model, pad_id=1, padding_reason=None, unshared_reason=unshared)
        with passes.patch_model(), casting(device, cast):
            hidden_ND, spans = passes.forward(sequences)
            assert len(hidden_ND) == (sum(sizes) if unshared else NUM_SHARED)
            indices = [i for p, n in zip(spans, sizes, strict=True) for i in p.indices(range(n))]
            samples_ND = hidden_ND.index_select(0, torch.tensor(indices, device=device))
            samples_ND.backward(weight_ND.to(samples_ND))
        results[name] = samples_ND, take_gradients(dict(model.named_parameters()))
    exact_ND = torch.cat(
        [exact.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in sequences]
    )
    exact_ND.backward(weight_ND)
    expected = take_gradients(dict(exact.named_parameters()))
    # The rounding error is that of unshared samples; a missing prompt key would be far off.
    shared_ND, shared = results["shared"]
    separate_ND, separate = results["separate"]
    assert relative_error(shared_ND, exact_ND.detach()) < 1e-5 + 1.5 * relative_error(
        separate_ND, exact_ND.detach()
    )
    assert relative_error(shared_ND, exact_ND.detach()) < (1e-4 if precision == "float32" else 0.05)
    assert shared.keys() == separate.keys() == expected.keys()
    slack = 1e-5 if precision == "float32" else 0.01
    for name, gradient in expected.items():
        assert relative_error(shared[name], gradient) < slack + 2 * relative_error(
            separate[name], gradient
        ), name


SHAPES = [(0, 130, 40), (0, 17, 1), (1, 1, 64), (4, 300, 9), (4, 150, 200), (5, 0, 30), (4, 1, 3)]
"""Trunk, splice and length of each branch."""


def branches() -> list[tuple[int, Branch]]:
    rng = random.Random(1)
    return [
        (trunk, Branch(trajectory="t", turn=1, splice=splice, scored=(False,) * size,
                       token_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(size))))
        for trunk, splice, size in SHAPES
    ]  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
def test_branches_equal_separate_passes(precision: str, device: torch.device) -> None:
    """Kernels must align queries with the last keys, and gradients of the trunk must not change."""
    dtype, cast = PRECISIONS[precision]
    model = qwen3().to(device, dtype)
    exact = in_float64(model)
    passes = ForwardPasses(model=model, pad_id=1, padding_reason=None)
    with casting(device, cast):
        assert probe_tree_scoring(passes) is None
    model.train()
    results: dict[bool, tuple[Tensor, dict[str, Tensor]]] = {}
    hidden: list[Tensor] = []
    for with_branches in (False, True):
        cache = TrunkCache() if with_branches else None
        with passes.patch_model(), casting(device, cast):
            trunk_ND, spans = passes.forward(sequences(), cache=cache)
            if cache is not None:
                placed = [(spans[trunk], branch) for trunk, branch in branches()]
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    hidden = forward_branches(passes, cache, placed)
                finally:
                    if device.type == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
            trunk_ND.square().mean().backward()
        results[with_branches] = trunk_ND.detach(), take_gradients(dict(model.named_parameters()))
    slack = 1e-5 if precision == "float32" else 0.01
    for name, gradient in results[False][1].items():
        assert relative_error(results[True][1][name], gradient) < slack, name
    with torch.no_grad():
        for (trunk, branch), hidden_ND in zip(branches(), hidden, strict=True):
            ids = [*sequences()[trunk][: branch.splice], *branch.token_ids]
            out = exact.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            exact_ND = out[branch.splice :]
            assert relative_error(hidden_ND, exact_ND) < (1e-4 if precision == "float32" else 0.05)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_pass_does_not_synchronize(precision: str, device: torch.device) -> None:
    dtype, cast = PRECISIONS[precision]
    model = qwen3().to(device, dtype)
    passes = ForwardPasses(model=model, pad_id=1, padding_reason=None)
    for batch, num_tokens in ((sequences(), sum(LENGTHS)), (two_groups(), NUM_SHARED)):
        with passes.patch_model(), casting(device, cast):
            passes.forward(batch)
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                hidden_ND, _ = passes.forward(batch)
            finally:
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        assert len(hidden_ND) == num_tokens
