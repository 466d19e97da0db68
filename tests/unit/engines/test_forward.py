"""Forward passes with shared prefixes against separate passes; which strategy a model gets."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.float64 import double, relative_error
from support.gradients import take_gradients
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

from courtside.engines.base import ScoreRequest
from courtside.engines.forward.batching import pack_sequences
from courtside.engines.forward.forward import (
    ForwardPasses,
    probe_forward_passes,
    probe_prefix_sharing,
)
from courtside.engines.forward.tree_scoring import TrunkCache, forward_branches
from courtside.engines.forward.varlen import (
    VarlenBackend,
    VarlenLayout,
    attend_with_kernel,
    gather_segments,
    make_packed_layout,
    make_varlen_layout,
)
from courtside.engines.kernels import prefix_gather
from courtside.engines.local import LocalEngine

Make = Callable[..., LocalEngine]
CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Of `relative_error`."""


def two_groups() -> list[list[int]]:
    """Samples of prompts of 20 and 33 ids, one of them empty, and one other sequence."""
    rng = random.Random(0)
    prompts = [[rng.randrange(258) for _ in range(n)] for n in (20, 33)]
    shapes = [(0, 7), (1, 1), (0, 0), (1, 12), (0, 31)]
    samples = [prompts[prompt] + [rng.randrange(258) for _ in range(n)] for prompt, n in shapes]
    return [*samples[:3], [rng.randrange(258) for _ in range(9)], *samples[3:]]


NUM_SHARED = 20 + 7 + 31 + 33 + 1 + 12 + 9
"""Tokens of `two_groups` where both prompts are computed once."""


def make_passes(model: Any, backend: VarlenBackend | None = None) -> ForwardPasses:
    return ForwardPasses(
        model=model, pad_id=1, padding_reason=None, backend=backend or VarlenBackend()
    )


def forward_alone(model: Any, ids: list[int]) -> Tensor:
    hidden_LD: Tensor = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return hidden_LD


def check_shared(
    model: Any,
    sequences: list[list[int]],
    num_tokens: int,
    backend: VarlenBackend | None = None,
) -> None:
    """Hidden states, and gradients of all weights from a weighted sum over every sequence:
    positions of a prompt count once per sample."""
    limit = TOLERANCE[model.dtype]
    passes = make_passes(model, backend)
    with passes.patch_model():
        hidden_ND, spans = passes.forward(sequences)
        assert len(hidden_ND) == num_tokens
        indices = [
            i
            for span, ids in zip(spans, sequences, strict=True)
            for i in span.indices(range(len(ids)))
        ]
        torch.manual_seed(0)
        samples_ND = hidden_ND.index_select(0, torch.tensor(indices))
        weight_ND = torch.randn_like(samples_ND)
        samples_ND.backward(weight_ND)
    shared = take_gradients(dict(model.named_parameters()))
    lengths = [len(ids) for ids in sequences]
    for ids, shared_LD, weight_LD in zip(
        sequences, samples_ND.detach().split(lengths), weight_ND.split(lengths), strict=True
    ):
        alone_LD = forward_alone(model, ids)
        assert relative_error(shared_LD, alone_LD.detach()) < limit
        alone_LD.backward(weight_LD)
    separate = take_gradients(dict(model.named_parameters()))
    assert shared.keys() == separate.keys() and shared
    for name, gradient in separate.items():
        assert relative_error(shared[name], gradient) < limit or gradient.norm() < limit, name


# ── exactness ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_samples_with_a_shared_prompt_equal_separate_passes(name: str, dtype: torch.dtype) -> None:
    model = double(MODELS[name]()) if dtype == torch.float64 else MODELS[name]()
    assert probe_prefix_sharing(model) is None
    check_shared(model, two_groups(), NUM_SHARED)


def test_equal_samples_are_computed_once() -> None:
    check_shared(double(tiny_model()), [two_groups()[0]] * 3, 27)


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_with_a_varlen_kernel(backend: VarlenBackend) -> None:
    check_shared(double(qwen3()), two_groups(), NUM_SHARED, backend)


def with_gather_index(layout: VarlenLayout) -> VarlenLayout:
    """The layout as on a GPU, where kernels gather keys."""
    assert layout.key_segments is not None and layout.gather_index is None
    index = prefix_gather.make_gather_index(layout.lengths, layout.key_segments)
    layout = copy(layout)
    layout.gather_index = index
    return layout


@pytest.mark.parametrize("heads", [1, 3, 20], ids=["narrow", "odd", "several blocks"])
def test_kernels_gather_and_sum_as_torch_does(heads: int) -> None:
    """Bit for bit in float32: both sum the samples of a group in the same order."""
    batch = pack_sequences([*two_groups(), [7] * 5], share_prefixes=True)
    layout = make_packed_layout(batch, device=CPU)
    torch.manual_seed(0)
    state = torch.randn(1, batch.num_tokens, heads, 64).transpose(1, 2)
    gradient = torch.randn(1, heads, sum(layout.key_lengths), 64)
    results = []
    for variant in (layout, with_gather_index(layout)):
        leaf = state.clone().requires_grad_()
        gathered = gather_segments(leaf, variant)
        gathered.backward(gradient)
        results.append((gathered.detach(), leaf.grad))
    for by_torch, by_kernel in zip(*results, strict=True):
        assert torch.equal(by_torch, by_kernel)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_adapters_and_recomputed_layers(checkpointing: bool) -> None:
    model = qwen3()
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    double(model).eval()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    check_shared(model, two_groups(), NUM_SHARED)


@pytest.mark.parametrize("query_block", [1, 5, 31, 32])
def test_masks_are_split_into_query_blocks(query_block: int) -> None:
    """A mask of all queries would grow with the square of a sequence."""
    model = double(tiny_model())
    layouts: list[VarlenLayout] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: layouts.append(kwargs.get("varlen_layout")), with_kwargs=True
    )
    check_shared(model, two_groups(), NUM_SHARED, VarlenBackend(query_block=query_block))
    (mask_QK,) = layouts[0].masks.values()  # one for all layers
    assert mask_QK.shape == (min(query_block, 33), 20 + 31)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_gradients_of_a_prompt_are_summed_in_float32(by_kernel: bool) -> None:
    """In bfloat16, 1 + 1/256 is 1: of 65 samples only the first would count."""
    batch = pack_sequences([[*range(20), 20 + n] for n in range(65)], share_prefixes=True)
    layout = make_packed_layout(batch, device=CPU)
    layout = with_gather_index(layout) if by_kernel else layout
    state = torch.zeros(1, 1, batch.num_tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    gathered = gather_segments(state, layout)
    gradient = torch.full_like(gathered, 1 / 256)
    gradient[:, :, :20] = 1
    gathered.backward(gradient)
    assert state.grad is not None
    assert state.grad[0, 0, :20].unique().tolist() == [1.25]


def test_the_precision_is_that_of_autocast() -> None:
    model, sequences = qwen3(), two_groups()
    passes = make_passes(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        with passes.patch_model():
            hidden_ND, spans = passes.forward(sequences)
        for span, ids in zip(spans, sequences, strict=True):
            shared_LD = hidden_ND[span.indices(range(len(ids)))].float()
            assert relative_error(shared_LD, forward_alone(model, ids).float()) < 0.02


def test_the_kernel_of_torch_takes_the_arguments() -> None:
    """Shapes, forward and backward, on the meta device."""
    batch = pack_sequences(two_groups(), share_prefixes=True)
    layout = make_packed_layout(batch, device=torch.device("meta"))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query, key, value = (
        torch.empty(1, batch.num_tokens, heads, 16, **options).transpose(1, 2)
        for heads in (6, 2, 2)
    )
    gathered = [gather_segments(state, layout) for state in (key, value)]
    out = attend_with_kernel(query, *gathered, layout, None)
    assert out.shape == (1, batch.num_tokens, 6, 16)
    gradients = torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    assert [g.shape for g in gradients] == [state.shape for state in (query, key, value)]


# ── scores ───────────────────────────────────────────────────────────────────────────────────────


def make_requests() -> list[ScoreRequest]:
    """Some score the first token after the prompt, and one a token inside it."""
    return [
        ScoreRequest(
            token_ids=tuple(ids),
            scored=tuple(i > 0 and (i >= len(ids) - 8 or i % 7 == n) for i in range(len(ids))),
            temperature=(0.5, 1.0, 1.4)[n % 3],
        )
        for n, ids in enumerate(two_groups())
    ]


@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_sharing(make_engine: Make, name: str) -> None:
    requests = make_requests()
    unbatched = make_engine(MODELS[name]())
    hidden = [unbatched.score([request], want="hidden")[0] for request in requests]
    top_k = [unbatched.score([request], want="top_k", top_k=3)[0] for request in requests]
    for budget in (1, 45, 60, 65536):
        engine = make_engine(MODELS[name](), max_batch_tokens=budget)
        for ours, reference in zip(engine.score(requests, want="hidden"), hidden, strict=True):
            torch.testing.assert_close(ours.logp_T, reference.logp_T, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(ours.hidden_TD, reference.hidden_TD, rtol=1e-9, atol=1e-10)
        scores = engine.score(requests, want="top_k", top_k=3)
        for ours, reference in zip(scores, top_k, strict=True):
            torch.testing.assert_close(ours.logp_T, reference.logp_T, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(
                ours.top_logp_TK, reference.top_logp_TK, rtol=1e-9, atol=1e-10
            )
            assert torch.equal(ours.top_ids_TK, reference.top_ids_TK)  # type: ignore[arg-type]


def count_tokens(engine: LocalEngine, requests: list[ScoreRequest]) -> list[int]:
    """Computed tokens of each pass."""
    assert isinstance(engine.passes, ForwardPasses)  # the probe is over
    counts: list[int] = []
    hook = engine.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    engine.score(requests)
    hook.remove()
    return counts


def test_a_prompt_is_computed_once(make_engine: Make) -> None:
    engine = make_engine(tiny_model(layers=1))
    requests = make_requests()
    num_tokens = sum(len(request.token_ids) for request in requests)
    assert count_tokens(engine, requests) == [NUM_SHARED]
    engine.passes = replace(engine.passes, unshared_reason="asked for")
    assert count_tokens(engine, requests) == [num_tokens]
    engine.passes = replace(engine.passes, padding_reason="asked for")
    assert sum(count_tokens(engine, requests)) >= num_tokens


def test_a_group_is_split_only_where_it_must_be(make_engine: Make) -> None:
    """Prompts longer than a batch on a CPU, in any order."""
    rng = random.Random(1)
    prompts = [[rng.randrange(258) for _ in range(300)] for _ in range(2)]
    requests = [
        ScoreRequest(token_ids=tuple(ids), scored=(False,) * 300 + (True,) * (len(ids) - 300))
        for n in range(4)
        for ids in (prompt + [rng.randrange(258) for _ in range(20 + n)] for prompt in prompts)
    ]
    assert count_tokens(make_engine(tiny_model(layers=1)), requests) == [300 + 86] * 2
    split = count_tokens(make_engine(tiny_model(layers=1), max_batch_tokens=345), requests)
    assert sum(split) == 4 * 300 + 2 * 86 and len(split) == 4 and max(split) <= 345
    single = count_tokens(make_engine(tiny_model(layers=1), max_batch_tokens=340), requests)
    assert sorted(single) == sorted(len(r.token_ids) for r in requests)


# ── tree scoring over a shared prefix ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_branches_leave_a_shared_trunk_anywhere(name: str) -> None:
    model, sequences = double(MODELS[name]()), two_groups()
    branches = [
        (trunk, make_branch(splice, [(11 * splice + 5 * i) % 258 for i in range(length)]))
        for trunk, splice, length in (
            (0, 27, 4), (0, 20, 3), (0, 19, 2), (0, 21, 5), (2, 20, 6), (5, 40, 3), (4, 33, 1),
            (1, 0, 3), (3, 9, 2),
        )
    ]  # fmt: skip
    passes, cache = make_passes(model), TrunkCache()
    with passes.patch_model():
        hidden_ND, spans = passes.forward(sequences, cache=cache)
        assert len(hidden_ND) == NUM_SHARED
        hidden = forward_branches(passes, cache, [(spans[t], branch) for t, branch in branches])
    for (trunk, branch), branch_ND in zip(branches, hidden, strict=True):
        alone_ND = forward_alone(model, [*sequences[trunk][: branch.splice], *branch.token_ids])
        assert relative_error(branch_ND, alone_ND[branch.splice :].detach()) < 1e-10


# ── strategies ───────────────────────────────────────────────────────────────────────────────────


def test_where_only_sharing_fails_batches_are_packed_without(make_engine: Make) -> None:
    engine = make_engine(tiny_model())
    backend = kernel_backend(first_key_kernel)
    engine.passes = probe_forward_passes(engine.model, pad_id=1, backend=backend)
    assert engine.passes.padding_reason is None
    assert engine.passes.unshared_reason == (
        "on a small example its hidden states are not those of separate passes"
    )
    requests = make_requests()
    num_tokens = sum(len(request.token_ids) for request in requests)
    assert sum(count_tokens(engine, requests)) == num_tokens


def test_a_model_that_counts_positions_itself_is_detected() -> None:
    model = tiny_model()
    original = model.model.rotary_emb.forward

    def forward(states: Tensor, position_ids: Tensor) -> Any:
        """From the last 0 on, as models do that infer boundaries from position ids."""
        N = torch.arange(position_ids.shape[1])
        first = torch.where(position_ids[0] == 0, N, 0).cummax(0).values
        return original(states, (N - first)[None])

    model.model.rotary_emb.forward = forward
    passes = probe_forward_passes(model, pad_id=1)
    assert passes.padding_reason is None and passes.unshared_reason is not None


def test_dropout_is_not_shared() -> None:
    passes = probe_forward_passes(tiny_model(), pad_id=1, uses_dropout=True)
    assert passes.padding_reason is None and passes.unshared_reason == "dropout acts on each sample"


def test_a_batch_without_groups_gathers_nothing() -> None:
    batch = pack_sequences([[1, 2], [3]], share_prefixes=True)
    layout = make_packed_layout(batch, device=CPU)
    plain = make_varlen_layout([2, 1], device=CPU)
    assert layout.key_segments is None and layout.key_lengths == plain.key_lengths == (2, 1)


def test_gathering_copies_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered keys have the memory layout of the kernel, and so have their gradients: nothing in
    between allocates zeros or copies, which would be a launch each in every layer."""
    batch = pack_sequences(two_groups(), share_prefixes=True)
    layout = with_gather_index(make_packed_layout(batch, device=CPU))
    state = torch.randn(1, batch.num_tokens, 2, 16, requires_grad=True)
    keys_KHD = gather_segments(state.transpose(1, 2), layout).squeeze(0).transpose(0, 1)
    assert keys_KHD.is_contiguous()

    def sum_gradients(gradient_KHD: Tensor, _: Any) -> Tensor:
        assert gradient_KHD.is_contiguous()
        return gradient_KHD.new_empty(batch.num_tokens, 2, 16)

    # Triton's interpreter would copy.
    monkeypatch.setattr(prefix_gather, "sum_gathered_gradients", sum_gradients)
    gradient = torch.randn_like(keys_KHD)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad(keys_KHD, state, gradient)
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::copy_", "aten::zeros", "aten::select_backward"}, names
