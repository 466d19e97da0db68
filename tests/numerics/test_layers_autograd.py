"""Gradients of the layer kernels against autograd in float64, interpreted or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from support.architectures import make_model, olmo2, phi3, qwen
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from courtside.engines.forward.batching import MIN_PREFIX_TOKENS
from courtside.engines.forward.forward import ForwardPasses, probe_packing
from courtside.engines.kernels import layers, layers_autograd
from courtside.engines.lm_head import find_lm_head
from courtside.engines.patches import fused_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


def random_values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact in bfloat16, because the interpreter truncates where a GPU rounds."""
    return torch.randn(*shape, device=DEVICE).bfloat16().to(dtype)


def has_kernel_dtype(x: Tensor) -> bool:
    """`can_run_kernels` where kernels also run on a CPU, in Triton's interpreter."""
    return x.dtype in fused_layers.KERNEL_DTYPES


def compare(
    kernel: Callable[..., Any], exact: Callable[..., Any], inputs: list[Tensor], *, slack: float
) -> None:
    """Values, and gradients of a weighted sum of them, of each input that requires one."""
    results = {}
    for name, function, dtype in (("kernel", kernel, None), ("exact", exact, torch.float64)):
        arguments = [
            x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad) for x in inputs
        ]  # fmt: skip
        out = function(*arguments)
        out = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(3)
        weights = [random_values(*y.shape) for y in out]
        total = sum((y.double() * w).sum() for y, w in zip(out, weights, strict=True))
        trained = [x for x in arguments if x.requires_grad]
        results[name] = [*out, *torch.autograd.grad(total, trained)]  # type: ignore[arg-type]
    for x, y in zip(results["kernel"], results["exact"], strict=True):
        assert x.shape == y.shape
        error = (x.double() - y).norm() / y.norm()
        assert float(error.detach()) < slack


@pytest.fixture(params=[False, True], ids=["single rows", "tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Several rows per program in several tiles, the last of which is not full."""
    if request.param:
        monkeypatch.setattr(layers, "MIN_TILED_ROWS", 2)
        monkeypatch.setattr(layers_autograd, "MAX_PROGRAMS", 3)
        rows_per_program = layers.rows_per_program
        for module in (layers, layers_autograd):
            monkeypatch.setattr(module, "rows_per_program", lambda *n: min(rows_per_program(*n), 4))
    return bool(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trains_weight", [True, False])
@pytest.mark.parametrize(("N", "D", "shift"), [(11, 24, 0.0), (1, 96, 1.0)])
def test_rms_norm(
    tiles: bool, dtype: torch.dtype, trains_weight: bool, N: int, D: int, shift: float
) -> None:
    torch.manual_seed(1)
    product = random_values(1, N, 6 * D + 10, dtype=dtype).requires_grad_()
    weight = (torch.rand(D, device=DEVICE) + 0.5).requires_grad_(trains_weight)

    def heads(x: Tensor) -> Tensor:
        """A slice of a fused matmul, as the norm of queries has it."""
        return x[..., : 6 * D].view(1, N, 6, D)

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return layers_autograd.rms_norm(
            heads(x), w, eps=0.1, dtype=torch.float32, rounds=False, shift=shift
        )

    def exact(x: Tensor, w: Tensor) -> Tensor:
        y = heads(x)
        return y * (y.square().mean(-1, keepdim=True) + 0.1).rsqrt() * (w + shift)

    compare(kernel, exact, [product, weight], slack=1e-6 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "N"), [(1, 7), (3, 1), (2, 5)])
@pytest.mark.parametrize("shared", [True, False])
def test_rotary(tiles: bool, dtype: torch.dtype, B: int, N: int, shared: bool) -> None:
    torch.manual_seed(2)
    query, key = (random_values(B, N, heads * 24, dtype=dtype).requires_grad_() for heads in (4, 2))
    cos, sin = torch.randn(2, 1 if shared else B, N, 24, device=DEVICE)

    def on_heads(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def rotated(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Any:
            heads = (x.view(B, N, -1, 24).transpose(1, 2) for x in (q, k))
            return rotate(*heads, c, s)

        return rotated

    def kernel(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return layers_autograd.apply_rotary(q, k, c, s, torch.float32)

    slack = 1e-6 if dtype == torch.float32 else 0.02
    compare(
        on_heads(kernel), on_heads(fused_layers.apply_rotary), [query, key, cos, sin], slack=slack
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("P", "D"), [(1, 24), (7, 96), (512, 33)])
def test_partial_sums(dtype: torch.dtype, P: int, D: int) -> None:
    partials_PD = torch.randn(P, D, device=DEVICE)
    total_D = layers_autograd.sum_partials(partials_PD, dtype)
    assert total_D.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(total_D.double(), partials_PD.double().sum(0), rtol=rtol, atol=1e-5)


def test_rotary_rounds_once_to_the_dtype_of_attention() -> None:
    """Autocast computes RoPE in float32 and casts the inputs of attention."""
    q, k = random_values(1, 4, 5, 16), random_values(1, 2, 5, 16)
    cos, sin = torch.randn(2, 1, 5, 16, device=DEVICE)
    exact = layers.apply_rotary(q, k, cos, sin, dtypes=(torch.float32, torch.float32))
    rounded = layers.apply_rotary(q, k, cos, sin, dtypes=(torch.bfloat16, torch.bfloat16))
    for x, y in zip(rounded, exact, strict=True):
        error = (x.float() - y).abs() / y.abs()
        assert float(error.max()) <= 2**-7, "the products were rounded before they were added"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 1500])
def test_swiglu(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(4)
    product = (3 * random_values(2, 3, 2 * size, dtype=dtype)).requires_grad_()

    def kernel(x: Tensor) -> Tensor:
        return layers_autograd.swiglu(*x.split(size, -1))

    def exact(x: Tensor) -> Tensor:
        gate, up = x.split(size, -1)
        return torch.nn.functional.silu(gate) * up

    compare(kernel, exact, [product], slack=1e-6 if dtype == torch.float32 else 0.02)


# ── whole models ─────────────────────────────────────────────────────────────────────────────────


def llama() -> Any:
    return make_model(LlamaConfig, LlamaForCausalLM)


def llama_with_lora() -> Any:
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
    layers_in_use: fused_layers.FusedLayers | None,
    cast: bool,
    sequences: list[list[int]] = SEQUENCES,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of a packed pass, and every weight's gradient."""
    passes = ForwardPasses(
        model=model, pad_id=1, padding_reason=probe_packing(model), fused_layers=layers_in_use
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
    ("make", "cast", "checkpointing"),
    [
        (qwen, False, False), (qwen, True, False), (qwen, True, True), (phi3, True, False),
        (olmo2, True, False), (llama_with_lora, False, False), (llama_with_lora, True, True),
    ],
)  # fmt: skip
def test_a_pass_trains_like_the_unpatched_model(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], cast: bool, checkpointing: bool
) -> None:
    model = make().to(DEVICE)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    plain_ND, plain = step(model, None, cast)
    monkeypatch.setattr(
        fused_layers, "can_run_kernels", lambda x: x.dtype in fused_layers.KERNEL_DTYPES
    )
    parts = fused_layers.find_fused_layers(
        model, find_lm_head(model), torch.bfloat16 if cast else None
    )
    assert parts is not None and parts.norms and parts.mlps and parts.rotary
    fused_ND, fused = step(model, parts, cast)
    assert fused.keys() == plain.keys() and fused_ND.dtype == plain_ND.dtype
    slack = 0.05 if cast else 1e-5
    assert float((fused_ND - plain_ND).norm() / plain_ND.norm()) < slack
    for name, gradient in plain.items():
        error = (fused[name].double() - gradient.double()).norm() / gradient.double().norm()
        assert float(error) < slack, name


def test_gradient_checkpointing_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen().to(DEVICE)
    model.model.layers = model.model.layers[1:]
    monkeypatch.setattr(
        fused_layers, "can_run_kernels", lambda x: x.dtype in fused_layers.KERNEL_DTYPES
    )
    parts = fused_layers.find_fused_layers(model, find_lm_head(model), torch.bfloat16)
    common = list(range(2, 2 + MIN_PREFIX_TOKENS))
    sharing = [[*common, 7], [*common, 5, 3]]
    saved_ND, saved = step(model, parts, cast=True, sequences=sharing)
    assert len(saved_ND) == MIN_PREFIX_TOKENS + 3, "their shared prefix is computed once"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recomputed_ND, recomputed = step(model, parts, cast=True, sequences=sharing)
    assert torch.equal(saved_ND, recomputed_ND) and saved.keys() == recomputed.keys()
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in saved.items())


def test_fused_layers_save_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that one more token saves for the backward pass."""
    model = qwen().to(DEVICE)

    def saved_bytes(parts: fused_layers.FusedLayers | None, length: int) -> int:
        storages: dict[int, int] = {}

        def record(x: Tensor) -> Tensor:
            store = x.untyped_storage()
            storages[store.data_ptr()] = store.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            step(model, parts, cast=True, sequences=[[5] * length])
        return sum(storages.values())

    plain = saved_bytes(None, 3) - saved_bytes(None, 2)
    monkeypatch.setattr(
        fused_layers, "can_run_kernels", lambda x: x.dtype in fused_layers.KERNEL_DTYPES
    )
    parts = fused_layers.find_fused_layers(model, find_lm_head(model), torch.bfloat16)
    assert saved_bytes(parts, 3) - saved_bytes(parts, 2) < 0.75 * plain


def test_a_model_without_kernels_is_left_alone() -> None:
    model = llama().double()
    assert fused_layers.find_fused_layers(model, find_lm_head(model), None) is None
