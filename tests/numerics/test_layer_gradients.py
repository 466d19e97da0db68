"""Gradients through the kernels between the products, against autograd in float64; in Triton's
interpreter, or on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_kinds import made_of, olmo2, phi3, qwen
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from courtside.engines.forward.forward import ForwardPasses, probe_packing
from courtside.engines.forward.prefix_sharing import MIN_PREFIX_TOKENS
from courtside.engines.kernels import layers, layers_autograd
from courtside.engines.lm_head import find_lm_head
from courtside.engines.patches import fused_layers as few
from courtside.engines.patches import layer_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMBERS = [torch.float32, torch.bfloat16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Such as bfloat16 has: the interpreter cuts off where a GPU rounds."""
    return torch.randn(*shape, device=DEVICE).bfloat16().to(dtype)


def compare(
    ours: Callable[..., Any], exact: Callable[..., Any], inputs: list[Tensor], *, slack: float
) -> None:
    """Values, and gradients of a weighted sum of them, of each input that wants one."""
    found = {}
    for name, function, dtype in (("ours", ours, None), ("exact", exact, torch.float64)):
        own = [
            x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad) for x in inputs
        ]  # fmt: skip
        out = function(*own)
        out = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(3)
        weights = [numbers(*y.shape) for y in out]
        total = sum((y.double() * w).sum() for y, w in zip(out, weights, strict=True))
        wanted = [x for x in own if x.requires_grad]
        found[name] = [*out, *torch.autograd.grad(total, wanted)]  # type: ignore[arg-type]
    for x, y in zip(found["ours"], found["exact"], strict=True):
        assert x.shape == y.shape
        error = (x.double() - y).norm() / y.norm()
        assert float(error.detach()) < slack


@pytest.fixture(params=[False, True], ids=["row by row", "in tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Several rows a program, and several tiles, the last of them not full."""
    if request.param:
        monkeypatch.setattr(layers, "MIN_TILED_ROWS", 2)
        monkeypatch.setattr(layers_autograd, "MAX_PROGRAMS", 3)
        tile = layers.rows_per_program
        for module in (layers, layers_autograd):
            monkeypatch.setattr(module, "rows_per_program", lambda *n: min(tile(*n), 4))
    return bool(request.param)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize(("N", "D"), [(11, 24), (1, 96)])
def test_norm(tiles: bool, dtype: torch.dtype, weighed: bool, N: int, D: int) -> None:
    torch.manual_seed(1)
    product = numbers(1, N, 6 * D + 10, dtype=dtype).requires_grad_()
    weight = (torch.rand(D, device=DEVICE) + 0.5).requires_grad_(weighed)

    def heads(x: Tensor) -> Tensor:
        """A part of a product, as a norm of queries reads it."""
        return x[..., : 6 * D].view(1, N, 6, D)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return layers_autograd.rms_norm(heads(x), w, eps=0.1, dtype=torch.float32, rounds=False)

    def exact(x: Tensor, w: Tensor) -> Tensor:
        y = heads(x)
        return y * (y.square().mean(-1, keepdim=True) + 0.1).rsqrt() * w

    compare(ours, exact, [product, weight], slack=1e-6 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize(("B", "N"), [(1, 7), (3, 1), (2, 5)])
@pytest.mark.parametrize("shared", [True, False])
def test_rotation(tiles: bool, dtype: torch.dtype, B: int, N: int, shared: bool) -> None:
    torch.manual_seed(2)
    query, key = (numbers(B, N, heads * 24, dtype=dtype).requires_grad_() for heads in (4, 2))
    cos, sin = torch.randn(2, 1 if shared else B, N, 24, device=DEVICE)

    def by(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def rotated(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Any:
            heads = (x.view(B, N, -1, 24).transpose(1, 2) for x in (q, k))
            return rotate(*heads, c, s)

        return rotated

    def ours(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return layers_autograd.apply_rotary(q, k, c, s, torch.float32)

    slack = 1e-6 if dtype == torch.float32 else 0.02
    compare(by(ours), by(layer_ops.apply_rotary), [query, key, cos, sin], slack=slack)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize(("P", "D"), [(1, 24), (7, 96), (512, 33)])
def test_sums_are_added(dtype: torch.dtype, P: int, D: int) -> None:
    sums_PD = torch.randn(P, D, device=DEVICE)
    found = layers_autograd.sum_partials(sums_PD, dtype)
    assert found.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.double(), sums_PD.double().sum(0), rtol=rtol, atol=1e-5)


def test_rotation_rounds_once_where_attention_would() -> None:
    """Autocast computes in float32 and rounds what attention reads."""
    q, k = numbers(1, 4, 5, 16), numbers(1, 2, 5, 16)
    cos, sin = torch.randn(2, 1, 5, 16, device=DEVICE)
    exact = layers.apply_rotary(q, k, cos, sin, dtypes=(torch.float32, torch.float32))
    found = layers.apply_rotary(q, k, cos, sin, dtypes=(torch.bfloat16, torch.bfloat16))
    for x, y in zip(found, exact, strict=True):
        gap = (x.float() - y).abs() / y.abs()
        assert float(gap.max()) <= 2**-7, "the products were rounded before they were added"


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("size", [40, 1500])
def test_gate(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(4)
    product = (3 * numbers(2, 3, 2 * size, dtype=dtype)).requires_grad_()

    def ours(x: Tensor) -> Tensor:
        return layers_autograd.swiglu(*x.split(size, -1))

    def exact(x: Tensor) -> Tensor:
        gate, up = x.split(size, -1)
        return torch.nn.functional.silu(gate) * up

    compare(ours, exact, [product], slack=1e-6 if dtype == torch.float32 else 0.02)


# ── whole models ─────────────────────────────────────────────────────────────────────────────────


def llama() -> Any:
    return made_of(LlamaConfig, LlamaForCausalLM)


def adapted() -> Any:
    model = llama()
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "up_proj"]), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora" in name
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


SEQUENCES = [[3, 5, 7, 11], [13, 2]]


def step(
    model: Any,
    parts: few.FusedLayers | None,
    cast: bool,
    sequences: list[list[int]] = SEQUENCES,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of a packed pass, and every weight's gradient."""
    passes = ForwardPasses(
        model=model, pad_id=1, padding_reason=probe_packing(model), fused_layers=parts
    )
    model.zero_grad(set_to_none=True)
    model.train()
    with (
        passes.patch_model(),
        torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=cast),
    ):
        hidden_ND, _ = passes.forward(sequences)
        torch.manual_seed(5)
        hidden_ND.backward(torch.randn(hidden_ND.shape, device=DEVICE).to(hidden_ND.dtype))
    model.eval()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return hidden_ND.detach(), gradients


@pytest.mark.parametrize(
    ("make", "cast", "again"),
    [
        (qwen, False, False), (qwen, True, False), (qwen, True, True), (phi3, True, False),
        (olmo2, True, False), (adapted, False, False), (adapted, True, True),
    ],
)  # fmt: skip
def test_a_pass_trains_as_the_models_own(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], cast: bool, again: bool
) -> None:
    model = make().to(DEVICE)
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    own_ND, own = step(model, None, cast)
    monkeypatch.setattr(layer_ops, "can_run_kernels", lambda x: x.dtype in layer_ops.KERNEL_DTYPES)
    parts = few.find_fused_layers(model, find_lm_head(model), torch.bfloat16 if cast else None)
    assert parts is not None and parts.norms and parts.mlps and parts.rotary
    found_ND, found = step(model, parts, cast)
    assert found.keys() == own.keys() and found_ND.dtype == own_ND.dtype
    slack = 0.05 if cast else 1e-5
    assert float((found_ND - own_ND).norm() / own_ND.norm()) < slack
    for name, gradient in own.items():
        error = (found[name].double() - gradient.double()).norm() / gradient.double().norm()
        assert float(error) < slack, name


def test_computed_again_a_pass_is_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen().to(DEVICE)
    model.model.layers = model.model.layers[1:]
    monkeypatch.setattr(layer_ops, "can_run_kernels", lambda x: x.dtype in layer_ops.KERNEL_DTYPES)
    parts = few.find_fused_layers(model, find_lm_head(model), torch.bfloat16)
    common = list(range(2, 2 + MIN_PREFIX_TOKENS))
    sharing = [[*common, 7], [*common, 5, 3]]
    kept_ND, kept = step(model, parts, cast=True, sequences=sharing)
    assert len(kept_ND) == MIN_PREFIX_TOKENS + 3, "what they have in common is there once"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again_ND, again = step(model, parts, cast=True, sequences=sharing)
    assert torch.equal(kept_ND, again_ND) and kept.keys() == again.keys()
    assert all(torch.equal(gradient, again[name]) for name, gradient in kept.items())


def test_what_a_pass_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that one more token keeps for the way back, against the model's own code."""
    model = qwen().to(DEVICE)

    def kept(parts: few.FusedLayers | None, length: int) -> int:
        saved: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            store = x.untyped_storage()
            saved[store.data_ptr()] = store.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            step(model, parts, cast=True, sequences=[[5] * length])
        return sum(saved.values())

    own = kept(None, 3) - kept(None, 2)
    monkeypatch.setattr(layer_ops, "can_run_kernels", lambda x: x.dtype in layer_ops.KERNEL_DTYPES)
    parts = few.find_fused_layers(model, find_lm_head(model), torch.bfloat16)
    assert kept(parts, 3) - kept(parts, 2) < 0.75 * own


def test_without_kernels_a_model_is_left_alone() -> None:
    model = llama().double()
    assert few.find_fused_layers(model, find_lm_head(model), None) is None
