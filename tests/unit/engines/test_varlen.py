"""Packed batches against separate forward passes: hidden states, scores and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import copy
from dataclasses import is_dataclass
from functools import wraps
from inspect import signature
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.gradients import take_gradients
from support.tiny_model import tiny_model
from support.varlen import (
    KERNEL_BACKENDS,
    MODELS,
    SHAPE,
    kernel_backend,
    qwen3,
    reference_gqa_kernel,
    reference_kernel,
)
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
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
from courtside.engines.forward.forward import ForwardPasses, probe_packing
from courtside.engines.forward.varlen import (
    VARLEN_ATTENTION,
    VarlenBackend,
    VarlenLayout,
    attend_with_kernel,
    make_varlen_layout,
    supports_gqa,
    varlen_attention,
)
from courtside.engines.local import LocalEngine
from courtside.engines.patches.attention_variants import AttentionVariant
from courtside.errors import ModelError

Make = Callable[..., LocalEngine]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
"""Relative to the largest element: matmuls are tiled differently, nothing else differs."""


def random_sequences(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(258) for _ in range(length)] for length in lengths]


def make_passes(model: Any, backend: VarlenBackend | None = None) -> ForwardPasses:
    return ForwardPasses(
        model=model, pad_id=1, padding_reason=None, backend=backend or VarlenBackend()
    )


def assert_near(ours: Tensor, reference: Tensor) -> None:
    """Relative to the largest element of the reference."""
    limit = TOLERANCE[reference.dtype] * float(reference.abs().max())
    torch.testing.assert_close(ours, reference, rtol=0, atol=limit)


def forward_alone(model: Any, ids: list[int]) -> Tensor:
    hidden_LD: Tensor = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return hidden_LD


def check_packed(
    model: Any, sequences: list[list[int]], backend: VarlenBackend | None = None
) -> None:
    """Hidden states, and gradients of all weights from a weighted sum of them."""
    passes = make_passes(model, backend)
    with passes.patch_model():
        hidden_ND, spans = passes.forward(sequences)
        assert len(hidden_ND) == sum(map(len, sequences))
        starts = [span.start for span in spans]
        torch.manual_seed(0)
        weight_ND = torch.randn_like(hidden_ND)
        hidden_ND.backward(weight_ND)
    packed = take_gradients(dict(model.named_parameters()))
    for start, ids in zip(starts, sequences, strict=True):
        alone_LD = forward_alone(model, ids)
        assert_near(hidden_ND[start : start + len(ids)].detach(), alone_LD.detach())
        alone_LD.backward(weight_ND[start : start + len(ids)])
    separate = take_gradients(dict(model.named_parameters()))
    assert packed.keys() == separate.keys() and packed
    for name, gradient in separate.items():
        assert_near(packed[name], gradient)


# ── exactness ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lengths", [(3, 1, 4), (1,), (1, 1, 2), (40, 2, 7, 7, 23)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_equal_separate_passes(
    name: str, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    model = MODELS[name]().to(dtype)
    assert probe_packing(model) is None
    check_packed(model, random_sequences(*lengths))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_and_recomputed_layers(checkpointing: bool) -> None:
    """A recomputed layer needs the layout again."""
    model = qwen3()
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.double().eval()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    check_packed(model, random_sequences(9, 1, 14))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((2, 2, 4), id="first sequence too short"),
        pytest.param((4, 4), id="two sequences merged"),
    ],
)
def test_the_comparison_detects_a_wrong_boundary(wrong: tuple[int, ...]) -> None:
    model = tiny_model().double()

    def corrupt(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        layout = copy(kwargs["varlen_layout"])
        layout.lengths = layout.key_lengths = wrong
        return args, kwargs | {"varlen_layout": layout}

    passes, sequences = make_passes(model), random_sequences(3, 1, 4)
    hook = model.base_model.register_forward_pre_hook(corrupt, with_kwargs=True)
    with passes.patch_model(), torch.no_grad():
        hidden_ND, _ = passes.forward(sequences)
    hook.remove()
    with pytest.raises(AssertionError, match="not close"):
        for ids, packed_LD in zip(sequences, hidden_ND.split([3, 1, 4]), strict=True):
            assert_near(packed_LD, forward_alone(model, ids).detach())


@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_batching(make_engine: Make, name: str) -> None:
    lengths = [2, 30, 5, 2, 17, 64, 9, 3]
    requests = [
        ScoreRequest(
            token_ids=tuple(ids),
            scored=(False, *(i % 3 > 0 for i in range(1, len(ids)))),
            temperature=(0.5, 1.0, 1.4)[len(ids) % 3],
        )
        for ids in random_sequences(*lengths)
    ]
    unbatched = make_engine(MODELS[name]())
    hidden = [unbatched.score([request], want="hidden")[0] for request in requests]
    top_k = [unbatched.score([request], want="top_k", top_k=3)[0] for request in requests]
    for budget in (1, 40, 65536):
        engine = make_engine(MODELS[name](), max_batch_tokens=budget)
        for ours, reference in zip(engine.score(requests, want="hidden"), hidden, strict=True):
            torch.testing.assert_close(ours.logp_T, reference.logp_T, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(ours.hidden_TD, reference.hidden_TD, rtol=1e-9, atol=1e-10)
        for ours, reference in zip(
            engine.score(requests, want="top_k", top_k=3), top_k, strict=True
        ):
            torch.testing.assert_close(ours.logp_T, reference.logp_T, rtol=1e-9, atol=1e-12)
            assert torch.equal(ours.top_ids_TK, reference.top_ids_TK)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [256, 16384])
def test_no_padding_is_computed(make_engine: Make, budget: int) -> None:
    """64 sequences of 4 to 256 ids: three quarters of a padded batch on a GPU were padding."""
    lengths = [round(4 * 64 ** (n / 63)) for n in range(64)]
    engine = make_engine(tiny_model(layers=1))
    engine.score_batch_tokens = budget
    assert engine.passes.padding_reason is None
    computed: list[int] = []

    def record(module: Any, args: Any, kwargs: Any) -> None:
        computed.append(kwargs["input_ids"].numel())
        assert kwargs.get("attention_mask") is None

    engine.model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    engine.score(
        [
            ScoreRequest(token_ids=tuple(ids), scored=(False, *(True,) * (len(ids) - 1)))
            for ids in random_sequences(*lengths)
        ]
    )
    assert sum(computed) == sum(lengths)
    assert len(computed) == -(-sum(lengths) // budget), "batches are full"


# ── no mask, no residue ──────────────────────────────────────────────────────────────────────────


class LargestTensor(TorchDispatchMode):
    """Size of the largest tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return out


@pytest.mark.parametrize("name", MODELS)
def test_no_mask_is_created(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask was created")

    for name_of_mask in list(ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name_of_mask, refuse)
    model, sequences = MODELS[name](), random_sequences(*[20] * 30)
    passes = make_passes(model)
    with passes.patch_model(), LargestTensor() as largest:
        hidden_ND, _ = passes.forward(sequences)
        hidden_ND.backward(torch.ones_like(hidden_ND))
    assert 0 < largest.num_elements < 600 * 600


def test_a_pass_that_fails_restores_the_model(make_engine: Make) -> None:
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


def test_a_packed_pass_needs_patch_model() -> None:
    with pytest.raises(AssertionError, match=r"needs `ForwardPasses\.patch_model`"):
        make_passes(tiny_model()).forward([[3, 4]])


# ── unsupported models ───────────────────────────────────────────────────────────────────────────


def eager_model() -> Any:
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


def model_with_a_fixed_window() -> Any:
    """Its layers do not take the window of the config."""
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=9)).eval()
    original = model.model.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        window, model.config.sliding_window = model.config.sliding_window, 9
        try:
            return original(*args, **kwargs)
        finally:
            model.config.sliding_window = window

    model.model.forward = forward
    return model


def model_without_position_ids() -> Any:
    return BloomForCausalLM(BloomConfig(vocab_size=258, hidden_size=32, n_layer=1, n_head=4)).eval()


def model_that_drops_arguments() -> Any:
    """A model that does not pass keyword arguments on to its attention."""
    model = tiny_model()
    for layer in model.model.layers:
        original = layer.self_attn.forward

        def forward(
            *args: Any, original: Any = original, varlen_layout: Any = None, **kwargs: Any
        ) -> Any:
            return original(*args, **kwargs)

        layer.self_attn.forward = forward
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (eager_model, "attn_implementation = 'eager' was asked for"),
        (model_with_a_fixed_window, "its sliding window cannot be made smaller"),
        (model_without_position_ids, "it takes no position ids"),
        (model_that_drops_arguments,
         "a small example fails (ModelError: LlamaAttention did not get varlen_layout"),
    ],
)  # fmt: skip
def test_other_models_are_padded_and_say_why(
    make_engine: Make, make: Callable[[], Any], reason: str
) -> None:
    engine = make_engine(make())
    assert str(engine.passes.padding_reason).startswith(reason)
    shapes: list[tuple[int, ...]] = []
    engine.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    requests = [
        ScoreRequest(token_ids=tuple(ids), scored=(False, *(True,) * (len(ids) - 1)))
        for ids in random_sequences(12, 3)
    ]
    together = engine.score(requests)
    assert shapes == [(2, 12)]
    for request, scores in zip(requests, together, strict=True):
        torch.testing.assert_close(
            scores.logp_T, engine.score([request])[0].logp_T, rtol=1e-9, atol=1e-12
        )


def test_a_model_that_mixes_sequences_is_detected() -> None:
    leaking = tiny_model()
    layer = leaking.model.layers[0]
    original = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(hidden_states + hidden_states.mean(1, keepdim=True), *args, **kwargs)

    layer.forward = forward
    assert probe_packing(leaking) == (
        "on a small example its hidden states are not those of separate passes"
    )


def test_unsupported_arguments_of_the_attention_are_refused() -> None:
    states = torch.zeros(1, 2, 5, 4)
    layout = make_varlen_layout([5], device=torch.device("cpu"))
    for settings, reason in (
        ({}, "did not get varlen_layout"),
        ({"varlen_layout": layout, "softcap": 4.0, "dropout": 0.1}, "dropout in an attention"),
        ({"varlen_layout": layout, "position_bias": states}, "mask or bias"),
    ):
        with pytest.raises(ModelError, match=reason):
            varlen_attention(None, states, states, states, None, **settings)
    with pytest.raises(ModelError, match="mask or bias"):
        varlen_attention(None, states, states, states, states, varlen_layout=layout)


# ── the varlen kernel, by a reference on the CPU ─────────────────────────────────────────────────


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_with_a_varlen_kernel(name: str, backend: VarlenBackend) -> None:
    check_packed(MODELS[name]().double(), random_sequences(6, 1, 11), backend)


@pytest.mark.parametrize("backend", [VarlenBackend(), *KERNEL_BACKENDS])
def test_the_scale_of_the_model_is_used(backend: VarlenBackend) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, 8, 4, dtype=torch.float64) for h in (6, 2, 2))
    layout = make_varlen_layout([5, 3], device=torch.device("cpu"), backend=backend)
    assert not is_dataclass(layout), "FSDP would look through it in every layer"
    out, _ = varlen_attention(None, query, key, value, None, scaling=0.7, varlen_layout=layout)
    states = [s[0].transpose(0, 1) for s in (query, key, value)]
    cu_seqlens_S = torch.tensor([0, 5, 8], dtype=torch.int32)
    expected = reference_gqa_kernel(
        *states, cu_seqlens_S, cu_seqlens_S, 5, 5, scale=0.7, window_size=(-1, 0), enable_gqa=True
    )
    torch.testing.assert_close(out[0], expected, rtol=1e-10, atol=1e-12)


def attend_naively(
    query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout, scale: float, v: Any
) -> Tensor:
    """All segments by one score matrix, [1, heads, N, D] to [N, heads, D]."""
    repeats = query.shape[1] // key.shape[1]
    k, x = (s[0].repeat_interleave(repeats, 0) for s in (key, value))
    score_HNM = scale * query[0] @ k.mT
    if v.softcap is not None:
        score_HNM = v.softcap * torch.tanh(score_HNM / v.softcap)
    query_end = key_end = 0
    hidden = torch.ones(score_HNM.shape[1:], dtype=torch.bool)
    for length, key_length in zip(layout.lengths, layout.key_lengths, strict=True):
        for n in range(length):
            position = key_length - length + n
            first = 0 if v.window is None else max(0, position - v.window + 1)
            hidden[query_end + n, key_end + first : key_end + position + 1] = False
        query_end, key_end = query_end + length, key_end + key_length
    score_HNM = score_HNM.masked_fill(hidden, -torch.inf)
    if v.sinks_H is not None:
        sink_HN1 = v.sinks_H[:, None, None].expand(-1, score_HNM.shape[1], 1)
        score_HNM = torch.cat([score_HNM, sink_HN1], -1)
    weight_HNM = score_HNM.softmax(-1)[..., : k.shape[1]]
    return (weight_HNM @ x).transpose(0, 1)


@pytest.mark.parametrize("segments", [((5, 1, 13, 4), None), ((5, 1, 13, 4), (5, 9, 20, 4))])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (0.8, False), (None, True),
                                                    (0.8, True)])  # fmt: skip
def test_windows_soft_caps_and_sinks_of_any_segments(
    segments: Any, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    """Values and gradients in float64: blocks of four queries, and kernels."""
    torch.manual_seed(0)
    lengths, key_lengths = segments
    states = [
        torch.randn(1, heads, n, 8, dtype=torch.float64, requires_grad=True)
        for heads, n in ((6, sum(lengths)), *[(2, sum(key_lengths or lengths))] * 2)
    ]
    sinks_H = torch.randn(6, dtype=torch.float64, requires_grad=True) if has_sinks else None
    inputs = states if sinks_H is None else [*states, sinks_H]
    variant = AttentionVariant(window=window, softcap=softcap, sinks_H=sinks_H)
    settings = {"sliding_window": window, "softcap": softcap, "s_aux": sinks_H}
    weight_NHD = torch.randn(sum(lengths), 6, 8, dtype=torch.float64)
    expected_grads = None
    for backend in (VarlenBackend(query_block=4), *KERNEL_BACKENDS):
        layout = make_varlen_layout(
            lengths, key_lengths, device=torch.device("cpu"), backend=backend
        )
        if expected_grads is None:
            expected = attend_naively(*states, layout, 0.4, variant)
            expected_grads = torch.autograd.grad(expected, inputs, weight_NHD)
        out, _ = varlen_attention(
            None, *states, None, scaling=0.4, varlen_layout=layout, **settings
        )
        torch.testing.assert_close(out[0], expected, rtol=1e-9, atol=1e-11)
        gradients = torch.autograd.grad(out[0], inputs, weight_NHD)
        for gradient, reference in zip(gradients, expected_grads, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-10)


def undeclared_gqa_kernel(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Supports grouped queries without an `enable_gqa` parameter."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return reference_kernel(query, key, value, *args, **options)


def wrong_gqa_kernel(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Takes grouped queries, and gives heads the keys of other groups."""
    key, value = (x.repeat(1, query.shape[1] // x.shape[1], 1) for x in (key, value))
    return reference_kernel(query, key, value, *args, **options)


@pytest.mark.parametrize(
    ("kernel", "supported"),
    [(reference_kernel, False), (undeclared_gqa_kernel, True), (wrong_gqa_kernel, False)],
)
def test_gqa_support_is_probed(kernel: Any, supported: bool) -> None:
    assert supports_gqa(kernel, torch.device("cpu"), torch.float32) == supported


def test_attention_dropout_is_applied() -> None:
    """The kernel has none, so SDPA runs on each segment."""
    torch.manual_seed(0)
    states = torch.randn(1, 2, 400, 8)
    layout = make_varlen_layout(
        [400], device=torch.device("cpu"), backend=kernel_backend(reference_kernel)
    )
    value = torch.ones_like(states)
    out, _ = varlen_attention(None, states, states, value, None, dropout=0.5, varlen_layout=layout)
    assert 0.9 < float(out.mean()) < 1.1 and float(out.std()) > 0.05


def test_the_kernel_of_torch_takes_the_arguments() -> None:
    """Shapes and signature, forward and backward, on the meta device."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query = torch.empty(1, 7, 6, 16, **options).transpose(1, 2)
    # Without the argument (torch 2.11) values of an example decide, and this device has none.
    num_kv_heads = 2 if "enable_gqa" in signature(varlen_attn).parameters else 6
    key, value = (torch.empty(1, 7, num_kv_heads, 16, **options).transpose(1, 2) for _ in range(2))
    layout = make_varlen_layout([3, 4], device=torch.device("meta"))
    assert layout.backend.kernel is varlen_attn
    sinks_H = torch.empty(6, device="meta", requires_grad=True)
    for variant in (
        AttentionVariant(),
        AttentionVariant(window=2),
        AttentionVariant(window=2, sinks_H=sinks_H),
    ):
        out = attend_with_kernel(query, key, value, layout, 0.25, variant)
        assert out.shape == (1, 7, 6, 16) and out.dtype == torch.bfloat16
        inputs = [query, key, value] + ([sinks_H] if variant.sinks_H is not None else [])
        gradients = torch.autograd.grad(out, inputs, torch.empty_like(out))
        assert [g.shape for g in gradients] == [x.shape for x in inputs]


def test_under_autocast_a_cpu_attends_in_float32() -> None:
    """Rotated queries are float32 there, values bfloat16; attention needs one dtype."""
    dtypes: list[set[torch.dtype]] = []

    def record_dtypes(*states: Tensor) -> bool:
        dtypes.append({state.dtype for state in states})
        return False

    model, sequences = qwen3(), random_sequences(9, 1, 14)
    passes = make_passes(model, VarlenBackend(supports_kernel=record_dtypes))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        with passes.patch_model():
            hidden_ND, spans = passes.forward(sequences)
        for span, ids in zip(spans, sequences, strict=True):
            alone_LD = forward_alone(model, ids).float()
            packed_LD = hidden_ND[span.indices(range(len(ids)))].float()
            assert (packed_LD - alone_LD).norm() / alone_LD.norm() < 0.02
    assert dtypes == [{torch.float32}] * 2
