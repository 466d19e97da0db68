"""Samples that share their prompt in a pass against each of them alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from packed_models import MODELS, newer_stand_in, qwen3, stand_in
from peft import LoraConfig, get_peft_model
from textbook import double
from tiny import tiny_model
from torch import Tensor

from courtside.engines.base import ScoreRequest
from courtside.engines.forward import varlen
from courtside.engines.forward.forward import (
    ForwardPasses,
    probe_forward_passes,
    probe_prefix_sharing,
)
from courtside.engines.forward.prefix_sharing import pack_sequences
from courtside.engines.forward.tree_scoring import forward_branches, make_trunk_cache
from courtside.engines.forward.varlen import (
    make_packed_layout,
    make_varlen_layout,
    varlen_attention,
)
from courtside.engines.kernels import prefix_gather
from courtside.engines.local import LocalEngine
from courtside.types import Branch

Make = Callable[..., LocalEngine]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""‖ours − theirs‖ over ‖theirs‖."""


def two_groups() -> list[list[int]]:
    """Prompts of 20 and 33 ids, one sample with nothing behind its prompt, one with another."""
    draw = random.Random(0)
    prompts = [[draw.randrange(258) for _ in range(n)] for n in (20, 33)]
    own = [(0, 7), (1, 1), (0, 0), (1, 12), (0, 31)]
    found = [prompts[which] + [draw.randrange(258) for _ in range(n)] for which, n in own]
    return [*found[:3], [draw.randrange(258) for _ in range(9)], *found[3:]]


NUM_SHARED = 20 + 7 + 31 + 33 + 1 + 12 + 9
"""Tokens of `two_groups` where both prompts are read once."""


def exact(model: Any) -> Any:
    double(model)
    return model


def off(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def alone(model: Any, ids: list[int]) -> Tensor:
    found: Tensor = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return found


def take_gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def compare(model: Any, sequences: list[list[int]], num_tokens: int) -> None:
    """Hidden states, and gradients of all weights from a sum of its own of each sequence's. The
    positions of a prompt count once for every sample."""
    limit = TOLERANCE[model.dtype]
    passes = ForwardPasses(model=model, pad_id=1, padding_reason=None)
    with passes.patch_model():
        hidden_ND, places = passes.forward(sequences)
        assert len(hidden_ND) == num_tokens
        every = [i for p, ids in zip(places, sequences, strict=True) for i in p.of(range(len(ids)))]
        torch.manual_seed(0)
        own_ND = hidden_ND.index_select(0, torch.tensor(every))
        weight_ND = torch.randn_like(own_ND)
        own_ND.backward(weight_ND)
    shared = take_gradients(model)
    sizes = [len(ids) for ids in sequences]
    for ids, found_LD, weight_LD in zip(
        sequences, own_ND.detach().split(sizes), weight_ND.split(sizes), strict=True
    ):
        own_LD = alone(model, ids)
        assert off(found_LD, own_LD.detach()) < limit
        own_LD.backward(weight_LD)
    separate = take_gradients(model)
    assert shared.keys() == separate.keys() and shared
    for name, gradient in separate.items():
        assert off(shared[name], gradient) < limit or gradient.norm() < limit, name


# ── the numbers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_samples_that_share_a_prompt_are_each_alone(name: str, dtype: torch.dtype) -> None:
    model = exact(MODELS[name]()) if dtype == torch.float64 else MODELS[name]()
    assert probe_prefix_sharing(model) is None
    compare(model, two_groups(), NUM_SHARED)


def test_equal_samples_are_one() -> None:
    compare(exact(tiny_model()), [two_groups()[0]] * 3, 27)


@pytest.mark.parametrize("kernel", [stand_in, newer_stand_in])
def test_the_kernel_of_a_gpu_is_called_as_it_should_be(
    monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    compare(exact(qwen3()), two_groups(), NUM_SHARED)


def with_kernels(where: varlen.VarlenLayout) -> varlen.VarlenLayout:
    assert where.joined is not None and where.shown is None
    found = prefix_gather.make_gather_index(where.lengths, where.joined, device=torch.device("cpu"))
    return replace(where, shown=found)


@pytest.mark.parametrize("heads", [1, 3, 20], ids=["narrow", "odd", "several blocks"])
def test_kernels_lay_out_and_sum_as_parts_do(heads: int) -> None:
    """Bit for bit, in float32: both add the samples of a group in their order."""
    row = pack_sequences([*two_groups(), [7] * 5], shared=True)
    parts = make_packed_layout(row, device=torch.device("cpu"))
    torch.manual_seed(0)
    found = []
    state = torch.randn(1, row.num_tokens, heads, 64).transpose(1, 2)
    push = torch.randn(1, heads, sum(parts.key_lengths), 64)
    for where in (parts, with_kernels(parts)):
        own = state.clone().requires_grad_()
        laid = varlen.gather_segments(own, where)
        laid.backward(push)
        found.append((laid.detach(), own.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_adapters_and_recomputed_layers(checkpointing: bool) -> None:
    model = qwen3()
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    exact(model).eval()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    compare(model, two_groups(), NUM_SHARED)


@pytest.mark.parametrize("block", [1, 5, 31, 32])
def test_masks_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Of queries: a mask of all of them would grow with the square of a sequence."""
    monkeypatch.setattr(varlen, "BLOCK", block)
    made: list[Tensor] = []
    real = varlen._corner
    monkeypatch.setattr(varlen, "_corner", lambda *own: made.append(real(*own)) or made[-1])
    compare(exact(tiny_model()), two_groups(), NUM_SHARED)
    assert len({mask.data_ptr() for mask in made}) == 1, "all layers have the same"
    assert made[0].shape[0] <= block


@pytest.mark.parametrize("kernels", [False, True], ids=["in parts", "by kernel"])
def test_gradients_of_a_prompt_are_summed_in_float32(kernels: bool) -> None:
    """In bfloat16, 1 + 1/256 is 1: of 65 samples only the first would count."""
    row = pack_sequences([[*range(20), 20 + n] for n in range(65)], shared=True)
    where = make_packed_layout(row, device=torch.device("cpu"))
    where = with_kernels(where) if kernels else where
    state = torch.zeros(1, 1, row.num_tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    laid = varlen.gather_segments(state, where)
    gradient = torch.full_like(laid, 1 / 256)
    gradient[:, :, :20] = 1
    laid.backward(gradient)
    assert state.grad is not None
    assert state.grad[0, 0, :20].unique().tolist() == [1.25]


def test_arithmetic_is_that_of_autocast() -> None:
    model, sequences = qwen3(), two_groups()
    passes = ForwardPasses(model=model, pad_id=1, padding_reason=None)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        with passes.patch_model():
            hidden_ND, places = passes.forward(sequences)
        for place, ids in zip(places, sequences, strict=True):
            own_LD = alone(model, ids).float()
            assert off(hidden_ND[place.of(range(len(ids)))].float(), own_LD) < 0.02


def test_the_real_kernel_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, forward and backward, on tensors without numbers."""
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    monkeypatch.setattr(
        varlen, "cast_attention_inputs", lambda *states: states
    )  # knows no such device
    row = pack_sequences(two_groups(), shared=True)
    where = make_packed_layout(row, device=torch.device("meta"))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query = torch.empty(1, row.num_tokens, 6, 16, **options).transpose(1, 2)
    key, value = (torch.empty(1, len(query[0, 0]), 2, 16, **options) for _ in range(2))
    states = [query, key.transpose(1, 2), value.transpose(1, 2)]
    out, _ = varlen_attention(None, *states, None, packing=where)
    assert out.shape == (1, row.num_tokens, 6, 16)
    gradients = torch.autograd.grad(out, states, torch.empty_like(out))
    assert [g.shape for g in gradients] == [state.shape for state in states]


# ── scores ───────────────────────────────────────────────────────────────────────────────────────


def requests() -> list[ScoreRequest]:
    """Some of them score the first token behind the prompt, and one a token inside it."""
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
    whole = make_engine(MODELS[name]())
    hidden = [whole.score([request], want="hidden")[0] for request in requests()]
    best = [whole.score([request], want="top_k", top_k=3)[0] for request in requests()]
    for budget in (1, 45, 60, 65536):
        engine = make_engine(MODELS[name](), max_batch_tokens=budget)
        for one, other in zip(engine.score(requests(), want="hidden"), hidden, strict=True):
            torch.testing.assert_close(one.logp_T, other.logp_T, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(one.hidden_TD, other.hidden_TD, rtol=1e-9, atol=1e-10)
        for one, other in zip(engine.score(requests(), want="top_k", top_k=3), best, strict=True):
            torch.testing.assert_close(one.logp_T, other.logp_T, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(one.top_logp_TK, other.top_logp_TK, rtol=1e-9, atol=1e-10)
            assert torch.equal(one.top_ids_TK, other.top_ids_TK)  # type: ignore[arg-type]


def computed_by(engine: LocalEngine, asked: list[ScoreRequest]) -> list[int]:
    found: list[int] = []
    assert isinstance(
        engine.passes, ForwardPasses
    )  # tried on a small example, which is not counted
    hook = engine.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    engine.score(asked)
    hook.remove()
    return found


def test_a_prompt_is_computed_once(make_engine: Make) -> None:
    engine = make_engine(tiny_model(layers=1))
    assert computed_by(engine, requests()) == [NUM_SHARED]
    engine.passes = ForwardPasses(
        model=engine.model, pad_id=1, padding_reason=None, unshared_reason="asked for"
    )
    assert computed_by(engine, requests()) == [sum(len(r.token_ids) for r in requests())]
    engine.passes = ForwardPasses(model=engine.model, pad_id=1, padding_reason="asked for")
    padded = computed_by(engine, requests())
    assert sum(padded) >= sum(len(r.token_ids) for r in requests())


def test_a_group_is_cut_only_where_it_must_be(make_engine: Make) -> None:
    """Prompts longer than a pass of a CPU, in any order among others."""
    draw = random.Random(1)
    prompts = [[draw.randrange(258) for _ in range(300)] for _ in range(2)]
    asked = [
        ScoreRequest(token_ids=tuple(ids), scored=(False,) * 300 + (True,) * (len(ids) - 300))
        for n in range(4)
        for ids in (prompt + [draw.randrange(258) for _ in range(20 + n)] for prompt in prompts)
    ]
    assert computed_by(make_engine(tiny_model(layers=1)), asked) == [300 + 86] * 2
    cut = computed_by(make_engine(tiny_model(layers=1), max_batch_tokens=345), asked)
    assert sum(cut) == 4 * 300 + 2 * 86 and len(cut) == 4 and max(cut) <= 345
    alone_ = computed_by(make_engine(tiny_model(layers=1), max_batch_tokens=340), asked)
    assert sorted(alone_) == sorted(len(r.token_ids) for r in asked)


# ── branches over what a shared pass kept ────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_branches_leave_a_shared_trunk_anywhere(name: str) -> None:
    model, sequences = exact(MODELS[name]()), two_groups()
    asked = [
        (which, Branch(trajectory="t", turn=1, splice=splice, scored=(False,) * size,
                       token_ids=tuple((11 * splice + 5 * i) % 258 for i in range(size))))
        for which, splice, size in (
            (0, 27, 4), (0, 20, 3), (0, 19, 2), (0, 21, 5), (2, 20, 6), (5, 40, 3), (4, 33, 1),
            (1, 0, 3), (3, 9, 2),
        )
    ]  # fmt: skip
    passes, cache = ForwardPasses(model=model, pad_id=1, padding_reason=None), make_trunk_cache()
    with passes.patch_model():
        hidden_ND, places = passes.forward(sequences, cache=cache)
        assert len(hidden_ND) == NUM_SHARED
        found = forward_branches(model, cache, [(places[which], b) for which, b in asked])
    for (which, branch), branch_ND in zip(asked, found, strict=True):
        own_ND = alone(model, [*sequences[which][: branch.splice], *branch.token_ids])
        assert off(branch_ND, own_ND[branch.splice :].detach()) < 1e-10


# ── which models ─────────────────────────────────────────────────────────────────────────────────


def from_the_first_key(
    query: Tensor, key: Tensor, value: Tensor, *ends: Any, window_size: Any, **options: Any
) -> Tensor:
    """A kernel that aligns the beginnings: right for a packed pass, wrong for a shared one."""
    parts = []
    for n in range(len(ends[0]) - 1):
        q, k, v = (
            state[its[n] : its[n + 1]].transpose(0, 1)
            for state, its in ((query, ends[0]), (key, ends[1]), (value, ends[1]))
        )
        parts.append(torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.get("scale")).transpose(0, 1))  # fmt: skip
    return torch.cat(parts)


def test_where_only_sharing_fails_passes_are_packed_without(
    monkeypatch: pytest.MonkeyPatch, make_engine: Make
) -> None:
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    monkeypatch.setattr(varlen, "varlen_attn", from_the_first_key)
    engine = make_engine(tiny_model())
    assert engine.passes.padding_reason is None
    assert engine.passes.unshared_reason == (
        "on a small example its hidden states are not those of separate passes"
    )
    assert sum(computed_by(engine, requests())) == sum(len(r.token_ids) for r in requests())


def test_a_model_that_counts_positions_itself_is_found_out() -> None:
    model = tiny_model()
    real = model.model.rotary_emb.forward

    def forward(states: Tensor, position_ids: Tensor) -> Any:
        """From the last 0 on, as models do that look for boundaries in positions."""
        N = torch.arange(position_ids.shape[1])
        first = torch.where(position_ids[0] == 0, N, 0).cummax(0).values
        return real(states, (N - first)[None])

    model.model.rotary_emb.forward = forward
    passes = probe_forward_passes(model, pad_id=1)
    assert passes.padding_reason is None and passes.unshared_reason is not None


def test_one_draw_of_dropout_is_not_shared() -> None:
    passes = probe_forward_passes(tiny_model(), pad_id=1, uses_dropout=True)
    assert passes.padding_reason is None and passes.unshared_reason == "dropout acts on each sample"


def test_a_row_without_groups_is_packed_as_before() -> None:
    row = pack_sequences([[1, 2], [3]], shared=True)
    found = make_packed_layout(row, device=torch.device("cpu"))
    plain = make_varlen_layout([2, 1], device=torch.device("cpu"))
    assert found.joined is None and found.key_lengths == plain.key_lengths == (2, 1)


def test_a_gradient_comes_back_through_the_kernels_without_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys come laid out as the kernel takes them and its gradient as it gives it: nothing between
    them makes zeros or copies, which is a launch each in every layer."""
    row = pack_sequences(two_groups(), shared=True)
    where = with_kernels(make_packed_layout(row, device=torch.device("cpu")))
    state = torch.randn(1, row.num_tokens, 2, 16, requires_grad=True)
    keys_KHD = varlen._flat(varlen.gather_segments(state.transpose(1, 2), where))
    assert keys_KHD.is_contiguous()

    def summed(gradient_KHD: Tensor, _: Any) -> Tensor:
        assert gradient_KHD.is_contiguous()
        return gradient_KHD.new_empty(row.num_tokens, 2, 16)

    monkeypatch.setattr(
        prefix_gather, "sum_gathered_gradients", summed
    )  # the interpreter has copies of its own
    gradient = torch.randn_like(keys_KHD)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        torch.autograd.grad(keys_KHD, state, gradient)
    names = {event.key for event in profiled.key_averages()}
    assert not names & {"aten::copy_", "aten::zeros", "aten::select_backward"}, names
