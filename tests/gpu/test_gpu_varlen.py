"""Packed passes on the device: hidden states and gradients against sequences alone in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gpu_models import NUM_WORDS, in_float64, off, qwen3
from torch import Tensor

from courtside.engines.forward import varlen
from courtside.engines.forward.forward import ForwardPasses, probe_packing, probe_prefix_sharing
from courtside.engines.forward.tree_scoring import (
    forward_branches,
    make_trunk_cache,
    probe_tree_scoring,
)
from courtside.types import Branch

LENGTHS = (130, 1, 64, 7, 300, 33)
ARITHMETIC = {
    "float32": (torch.float32, None),
    "autocast": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, None),
}


@contextmanager
def casting(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


def sequences() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(NUM_WORDS) for _ in range(length)] for length in LENGTHS]


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_a_row_of_sequences_is_each_of_them_alone(
    arithmetic: str, checkpointing: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, cast = ARITHMETIC[arithmetic]
    model = qwen3().to(device, dtype)
    exact = in_float64(model)
    in_one: list[bool] = []
    real = varlen._in_one

    def note(*args: Any) -> Tensor:
        in_one.append(True)
        return real(*args)

    monkeypatch.setattr(varlen, "_in_one", note)
    with casting(device, cast):
        assert probe_packing(model) is None
    in_one.clear()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    found: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    weight_ND = torch.randn(sum(LENGTHS), model.config.hidden_size, dtype=torch.float64)
    for name, problem in (("packed", None), ("padded", "asked for")):
        passes = ForwardPasses(model=model, pad_id=1, padding_reason=problem)
        with passes.patch_model(), casting(device, cast):
            hidden_ND, places = passes.forward(sequences())
            own = [hidden_ND[p.start : p.start + n] for p, n in zip(places, LENGTHS, strict=True)]
            own_ND = torch.cat(own)
            own_ND.backward(weight_ND.to(own_ND))
        found[name] = own_ND, gradients(model)
    wanted = model.config.num_hidden_layers * (2 if checkpointing else 1)
    assert len(in_one) == (wanted if device.type == "cuda" and arithmetic != "float32" else 0)

    right_ND = torch.cat(
        [
            exact.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            for ids in sequences()
        ]
    )
    right_ND.backward(weight_ND)
    expected = gradients(exact)
    # Rounding is that of the padded pass; a token that saw a neighbour would be far off.
    packed_ND, packed = found["packed"]
    padded_ND, padded = found["padded"]
    assert off(packed_ND, right_ND.detach()) < 1e-5 + 1.5 * off(padded_ND, right_ND.detach())
    assert off(packed_ND, right_ND.detach()) < (1e-4 if arithmetic == "float32" else 0.05)
    assert packed.keys() == padded.keys() == expected.keys()
    slack = 1e-5 if arithmetic == "float32" else 0.01
    for name, gradient in expected.items():
        assert off(packed[name], gradient) < slack + 2 * off(padded[name], gradient), name


def group() -> list[list[int]]:
    """Two prompts, four samples of each, one with nothing behind its prompt; one of neither."""
    draw = random.Random(2)
    found = []
    for num_prompt, rests in ((150, (40, 1, 0, 130)), (33, (64, 7, 65, 200))):
        prompt = [draw.randrange(NUM_WORDS) for _ in range(num_prompt)]
        found += [prompt + [draw.randrange(NUM_WORDS) for _ in range(n)] for n in rests]
    return [*found[1:], [draw.randrange(NUM_WORDS) for _ in range(77)], found[0]]


NUM_SHARED = 150 + 171 + 33 + 336 + 77


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_samples_that_share_a_prompt_are_each_alone(
    arithmetic: str, checkpointing: bool, device: torch.device
) -> None:
    dtype, cast = ARITHMETIC[arithmetic]
    model = qwen3().to(device, dtype)
    exact = in_float64(model)
    with casting(device, cast):
        assert probe_prefix_sharing(model) is None
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    sequences = group()
    sizes = [len(ids) for ids in sequences]
    weight_ND = torch.randn(sum(sizes), model.config.hidden_size, dtype=torch.float64)
    found: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for name, unshared in (("shared", None), ("separate", "asked for")):
        passes = ForwardPasses(model=model, pad_id=1, padding_reason=None, unshared_reason=unshared)
        with passes.patch_model(), casting(device, cast):
            hidden_ND, places = passes.forward(sequences)
            assert len(hidden_ND) == (sum(sizes) if unshared else NUM_SHARED)
            where = [i for p, n in zip(places, sizes, strict=True) for i in p.of(range(n))]
            own_ND = hidden_ND.index_select(0, torch.tensor(where, device=device))
            own_ND.backward(weight_ND.to(own_ND))
        found[name] = own_ND, gradients(model)
    right = [exact.base_model(input_ids=torch.tensor([ids])).last_hidden_state for ids in sequences]
    right_ND = torch.cat([own_1LD[0] for own_1LD in right])
    right_ND.backward(weight_ND)
    expected = gradients(exact)
    # Rounding is that of samples apart; a rest that missed a key of its prompt would be far off.
    shared_ND, shared = found["shared"]
    separate_ND, separate = found["separate"]
    assert off(shared_ND, right_ND.detach()) < 1e-5 + 1.5 * off(separate_ND, right_ND.detach())
    assert off(shared_ND, right_ND.detach()) < (1e-4 if arithmetic == "float32" else 0.05)
    assert shared.keys() == separate.keys() == expected.keys()
    slack = 1e-5 if arithmetic == "float32" else 0.01
    for name, gradient in expected.items():
        assert off(shared[name], gradient) < slack + 2 * off(separate[name], gradient), name


ASKED = [(0, 130, 40), (0, 17, 1), (1, 1, 64), (4, 300, 9), (4, 150, 200), (5, 0, 30), (4, 1, 3)]
"""Sequence, splice and size of each branch."""


def branches() -> list[tuple[int, Branch]]:
    draw = random.Random(1)
    return [
        (which, Branch(trajectory="t", turn=1, splice=splice, scored=(False,) * size,
                       token_ids=tuple(draw.randrange(NUM_WORDS) for _ in range(size))))
        for which, splice, size in ASKED
    ]  # fmt: skip


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_branches_off_a_row_are_sequences_of_their_own(
    arithmetic: str, device: torch.device
) -> None:
    """Kernels must align the ends of queries and keys, and the pass must train as it would."""
    dtype, cast = ARITHMETIC[arithmetic]
    model = qwen3().to(device, dtype)
    exact = in_float64(model)
    passes = ForwardPasses(model=model, pad_id=1, padding_reason=None)
    with casting(device, cast):
        assert probe_tree_scoring(model) is None
    model.train()
    found: dict[bool, tuple[Tensor, dict[str, Tensor]]] = {}
    hidden: list[Tensor] = []
    for looked in (False, True):
        cache = make_trunk_cache() if looked else None
        with passes.patch_model(), casting(device, cast):
            trunk_ND, places = passes.forward(sequences(), cache=cache)
            if cache is not None:
                asked = [(places[which], branch) for which, branch in branches()]
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    hidden = forward_branches(model, cache, asked)
                finally:
                    if device.type == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
            trunk_ND.square().mean().backward()
        found[looked] = trunk_ND.detach(), gradients(model)
    slack = 1e-5 if arithmetic == "float32" else 0.01
    for name, gradient in found[False][1].items():
        assert off(found[True][1][name], gradient) < slack, name
    with torch.no_grad():
        for (which, branch), hidden_ND in zip(branches(), hidden, strict=True):
            ids = [*sequences()[which][: branch.splice], *branch.token_ids]
            out = exact.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            right_ND = out[branch.splice :]
            assert off(hidden_ND, right_ND) < (1e-4 if arithmetic == "float32" else 0.05)


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_the_host_does_not_wait_for_a_pass(arithmetic: str, device: torch.device) -> None:
    dtype, cast = ARITHMETIC[arithmetic]
    model = qwen3().to(device, dtype)
    passes = ForwardPasses(model=model, pad_id=1, padding_reason=None)
    for asked, num_tokens in ((sequences(), sum(LENGTHS)), (group(), NUM_SHARED)):
        with passes.patch_model(), casting(device, cast):
            passes.forward(asked)
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                hidden_ND, _ = passes.forward(asked)
            finally:
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        assert len(hidden_ND) == num_tokens
