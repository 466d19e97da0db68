"""Sequences in one row against the same sequences alone: hidden states, scores and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from packed_models import MODELS, SHAPE, newer_stand_in, qwen3, stand_in
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from courtside.engines.base import ScoreRequest
from courtside.engines.forward import varlen as packing
from courtside.engines.forward.forward import ForwardPasses, probe_packing
from courtside.engines.forward.varlen import VARLEN_ATTENTION, make_varlen_layout, varlen_attention
from courtside.engines.local import LocalEngine
from courtside.errors import ModelError

Make = Callable[..., LocalEngine]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
"""Relative to the largest number: sums of products are cut differently, nothing else."""


def sequences_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(258) for _ in range(length)] for length in lengths]


def passes_of(model: Any, problem: str | None = None) -> ForwardPasses:
    return ForwardPasses(model=model, pad_id=1, padding_reason=problem)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Relative to the largest number of theirs."""
    limit = TOLERANCE[theirs.dtype] * float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=limit)


def alone(model: Any, ids: list[int]) -> Tensor:
    found: Tensor = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return found


def compare(model: Any, sequences: list[list[int]]) -> None:
    """Hidden states, and gradients of all weights from weighted sums of them."""
    passes = passes_of(model)
    with passes.patch_model():
        hidden_ND, places = passes.forward(sequences)
        assert len(hidden_ND) == sum(map(len, sequences))
        starts = [place.start for place in places]
        torch.manual_seed(0)
        weight_ND = torch.randn_like(hidden_ND)
        hidden_ND.backward(weight_ND)
    packed = take_gradients(model)
    for start, ids in zip(starts, sequences, strict=True):
        own_LD = alone(model, ids)
        assert_near(hidden_ND[start : start + len(ids)].detach(), own_LD.detach())
        own_LD.backward(weight_ND[start : start + len(ids)])
    separate = take_gradients(model)
    assert packed.keys() == separate.keys() and packed
    for name, gradient in separate.items():
        assert_near(packed[name], gradient)


def take_gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


# ── the numbers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lengths", [(3, 1, 4), (1,), (1, 1, 2), (40, 2, 7, 7, 23)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_sequences_is_each_of_them_alone(
    name: str, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    model = MODELS[name]().to(dtype)
    assert probe_packing(model) is None
    compare(model, sequences_of(*lengths))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_and_recomputed_layers(checkpointing: bool) -> None:
    """A layer that is computed again in the backward pass needs the ends of sequences again."""
    model = qwen3()
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.double().eval()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    compare(model, sequences_of(9, 1, 14))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((2, 2, 4), id="the first ends too early"),
        pytest.param((4, 4), id="two are one"),
    ],
)
def test_the_comparison_would_see_a_wrong_boundary(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[int, ...]
) -> None:
    model = tiny_model().double()
    real = packing.VarlenLayout
    lengths = {"lengths": wrong, "key_lengths": wrong}
    monkeypatch.setattr(packing, "VarlenLayout", lambda **own: real(**(own | lengths)))
    with pytest.raises(AssertionError, match="not close"):
        passes = passes_of(model)
        sequences = sequences_of(3, 1, 4)
        with passes.patch_model(), torch.no_grad():
            hidden_ND, _ = passes.forward(sequences)
        for ids, own_LD in zip(sequences, hidden_ND.split([3, 1, 4]), strict=True):
            assert_near(own_LD, alone(model, ids).detach())


@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_the_passes(make_engine: Make, name: str) -> None:
    lengths = [2, 30, 5, 2, 17, 64, 9, 3]
    requests = [
        ScoreRequest(
            token_ids=tuple(ids),
            scored=(False, *(i % 3 > 0 for i in range(1, len(ids)))),
            temperature=(0.5, 1.0, 1.4)[len(ids) % 3],
        )
        for ids in sequences_of(*lengths)
    ]
    whole = make_engine(MODELS[name]())
    hidden = [whole.score([request], want="hidden")[0] for request in requests]
    best = [whole.score([request], want="top_k", top_k=3)[0] for request in requests]
    for budget in (1, 40, 65536):
        engine = make_engine(MODELS[name](), max_batch_tokens=budget)
        for one, other in zip(engine.score(requests, want="hidden"), hidden, strict=True):
            torch.testing.assert_close(one.logp_T, other.logp_T, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(one.hidden_TD, other.hidden_TD, rtol=1e-9, atol=1e-10)
        for one, other in zip(engine.score(requests, want="top_k", top_k=3), best, strict=True):
            torch.testing.assert_close(one.logp_T, other.logp_T, rtol=1e-9, atol=1e-12)
            assert torch.equal(one.top_ids_TK, other.top_ids_TK)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [256, 16384])
def test_every_computed_token_is_a_real_one(make_engine: Make, budget: int) -> None:
    """64 sequences of 4 to 256 ids, of which padding made three quarters in one pass of a GPU."""
    lengths = [round(4 * 64 ** (n / 63)) for n in range(64)]
    engine = make_engine(tiny_model(layers=1))
    engine.score_batch_tokens = budget
    assert engine.passes.padding_reason is None
    computed: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        computed.append(kwargs["input_ids"].numel())
        assert kwargs.get("attention_mask") is None

    engine.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    engine.score(
        [
            ScoreRequest(token_ids=tuple(ids), scored=(False, *(True,) * (len(ids) - 1)))
            for ids in sequences_of(*lengths)
        ]
    )
    assert sum(computed) == sum(lengths)
    assert len(computed) == -(-sum(lengths) // budget), "no pass that a fuller one would save"


# ── no mask, no traces ───────────────────────────────────────────────────────────────────────────


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that any operation made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return out


@pytest.mark.parametrize("name", MODELS)
def test_no_mask_is_made(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask was made")

    for made in list(ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, made, refuse)
    model, sequences = MODELS[name](), sequences_of(*[20] * 30)
    passes = passes_of(model)
    with passes.patch_model(), Largest() as largest:
        hidden_ND, _ = passes.forward(sequences)
        hidden_ND.backward(torch.ones_like(hidden_ND))
    assert 0 < largest.numbers < 600 * 600


def test_a_pass_that_fails_leaves_the_model_as_it_was(make_engine: Make) -> None:
    engine = make_engine()
    assert engine.passes.padding_reason is None

    def fail(*args: Any) -> None:
        assert engine.model.config._attn_implementation == VARLEN_ATTENTION
        raise RuntimeError("out of luck")

    hook = engine.model.base_model.layers[1].register_forward_pre_hook(fail)
    request = ScoreRequest(token_ids=(3, 4, 5), scored=(False, True, True))
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.score([request])
    assert engine.model.config._attn_implementation == "sdpa"
    hook.remove()
    assert len(engine.score([request])[0].logp_T) == 2


def test_a_packed_pass_outside_its_attention_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match=r"need `ForwardPasses\.patch_model`"):
        passes_of(tiny_model()).forward([[3, 4]])


# ── which models ─────────────────────────────────────────────────────────────────────────────────


def eager() -> Any:
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


def windowed() -> Any:
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6)).eval()


def without_positions() -> Any:
    return BloomForCausalLM(BloomConfig(vocab_size=258, hidden_size=32, n_layer=1, n_head=4)).eval()


def deaf() -> Any:
    """A model that does not hand on what it is given, as some do."""
    model = tiny_model()
    for layer in model.model.layers:
        real = layer.self_attn.forward

        def forward(*args: Any, real: Any = real, packing: Any = None, **kwargs: Any) -> Any:
            return real(*args, **kwargs)

        layer.self_attn.forward = forward
    return model


@contextmanager
def changed(name: str, value: Any) -> Iterator[None]:
    before = packing.__dict__[name]
    packing.__dict__[name] = value
    try:
        yield
    finally:
        packing.__dict__[name] = before


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (eager, "attn_implementation = 'eager' was asked for"),
        (windowed, "it looks through a window"),
        (without_positions, "positions cannot be given to it"),
        (deaf, "a small example fails (ModelError: LlamaAttention was not told where"),
    ],
)
def test_other_models_are_padded_and_say_why(
    make_engine: Make, make: Callable[[], Any], why: str
) -> None:
    engine = make_engine(make())
    assert engine.passes.padding_reason is not None and engine.passes.padding_reason.startswith(why)
    shapes: list[tuple[int, ...]] = []
    engine.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    requests = [
        ScoreRequest(token_ids=tuple(ids), scored=(False, *(True,) * (len(ids) - 1)))
        for ids in sequences_of(12, 3)
    ]
    together = engine.score(requests)
    assert shapes == [(2, 12)]
    for request, scores in zip(requests, together, strict=True):
        torch.testing.assert_close(
            scores.logp_T, engine.score([request])[0].logp_T, rtol=1e-9, atol=1e-12
        )


def test_a_model_that_does_something_else_with_its_row_is_found_out() -> None:
    leaking = tiny_model()
    layer = leaking.model.layers[0]
    real = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return real(hidden_states + hidden_states.mean(1, keepdim=True), *args, **kwargs)

    layer.forward = forward
    assert probe_packing(leaking) == (
        "on a small example its hidden states are not those of separate passes"
    )


def test_what_the_attention_cannot_do_it_refuses() -> None:
    states = torch.zeros(1, 2, 5, 4)
    whole = make_varlen_layout([5], device=torch.device("cpu"))
    for settings, why in (
        ({}, "not told where sequences end"),
        ({"packing": whole, "sliding_window": 4}, "looks through a window"),
        ({"packing": whole, "position_bias": states}, "a mask of its own"),
    ):
        with pytest.raises(ModelError, match=why):
            varlen_attention(None, states, states, states, None, **settings)
    with pytest.raises(ModelError, match="a mask of its own"):
        varlen_attention(None, states, states, states, states, packing=whole)


# ── the kernel of a GPU, with a stand-in ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("kernel", [stand_in, newer_stand_in])
@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_is_called_as_it_should_be(
    monkeypatch: pytest.MonkeyPatch, name: str, kernel: Any
) -> None:
    monkeypatch.setattr(packing, "varlen_attn", kernel)
    monkeypatch.setattr(packing, "has_kernel", lambda *_: True)
    compare(MODELS[name]().double(), sequences_of(6, 1, 11))


@pytest.mark.parametrize("kernel", [None, stand_in, newer_stand_in])
def test_scores_are_scaled_as_the_model_says(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    if kernel is not None:
        monkeypatch.setattr(packing, "varlen_attn", kernel)
        monkeypatch.setattr(packing, "has_kernel", lambda *_: True)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, 8, 4, dtype=torch.float64) for h in (6, 2, 2))
    ends_S = torch.tensor([0, 5, 8], dtype=torch.int32)
    where = make_varlen_layout([5, 3], device=torch.device("cpu"))
    out, _ = varlen_attention(None, query, key, value, None, scaling=0.7, packing=where)
    args = [s[0].transpose(0, 1) for s in (query, key, value)]
    expected = newer_stand_in(
        *args, ends_S, ends_S, 5, 5, scale=0.7, window_size=(-1, 0), enable_gqa=True
    )
    torch.testing.assert_close(out[0], expected, rtol=1e-10, atol=1e-12)


def sharing(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
    """A kernel that shares heads and does not say so."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return stand_in(query, key, value, *args, **named)


def mixing(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
    """One that takes them, and gives heads the keys of others."""
    key, value = (x.repeat(1, query.shape[1] // x.shape[1], 1) for x in (key, value))
    return stand_in(query, key, value, *args, **named)


@pytest.mark.parametrize(("kernel", "shares"), [(stand_in, 0), (sharing, 1), (mixing, 0)])
def test_whether_heads_share_keys_is_tried(kernel: Any, shares: int) -> None:
    found = packing._shares_heads(kernel, torch.device("cpu"), torch.float32)
    assert found == bool(shares)


def test_dropout_in_attention_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has none, so sequences go one by one."""
    monkeypatch.setattr(packing, "has_kernel", lambda *_: True)
    torch.manual_seed(0)
    states = torch.randn(1, 2, 400, 8)
    where = make_varlen_layout([400], device=torch.device("cpu"))
    value = torch.ones_like(states)
    out, _ = varlen_attention(None, states, states, value, None, dropout=0.5, packing=where)
    assert 0.9 < float(out.mean()) < 1.1 and float(out.std()) > 0.05


def test_the_real_kernel_takes_what_it_is_given() -> None:
    """Shapes and signature, forward and backward, on tensors without numbers."""
    assert packing.varlen_attn is varlen.varlen_attn
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query = torch.empty(1, 7, 6, 16, **options).transpose(1, 2)
    key, value = (torch.empty(1, 7, 2, 16, **options).transpose(1, 2) for _ in range(2))
    where = make_varlen_layout([3, 4], device=torch.device("meta"))
    out = packing._in_one(query, key, value, where, 0.25)
    assert out.shape == (1, 7, 6, 16) and out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out, [query, key, value], torch.empty_like(out))
    assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]


def test_under_autocast_a_cpu_attends_in_float32() -> None:
    """Rotated queries are float32 there, values are not; a kernel wants one kind."""
    model, sequences = qwen3(), sequences_of(9, 1, 14)
    passes = passes_of(model)
    seen: list[set[torch.dtype]] = []
    real = packing._one_by_one

    def note(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        seen.append({query.dtype, key.dtype, value.dtype})
        return real(query, key, value, *args)

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), changed("_one_by_one", note):
        with passes.patch_model():
            hidden_ND, places = passes.forward(sequences)
        for place, ids in zip(places, sequences, strict=True):
            own_LD = alone(model, ids).float()
            found_LD = hidden_ND[place.of(range(len(ids)))]
            error = (found_LD.float() - own_LD).norm() / own_LD.norm()
            assert error < 0.02
    assert seen == [{torch.float32}] * 2
