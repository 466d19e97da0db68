"""Shadow weights and fused layers of decoding compute what the model computes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import (
    lora,
    lora_head,
    lora_qwen,
    make_model,
    olmo2,
    phi3,
    qwen,
    qwen2,
    windowed,
)
from support.model_kinds import ModelKind, build_model
from support.sampling_cases import REQUESTS, assert_equal_samples, make_engine
from support.tiny_model import tiny_model
from torch import Tensor, nn
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from courtside.engines.base import Sampling, ScoreRequest
from courtside.engines.generation import continuous_batching
from courtside.engines.generation.decode_weights import DecodeWeights
from courtside.engines.generation.kv_cache import STEPS_PER_SYNC
from courtside.engines.generation.sampler import sample_from_hidden, sample_tokens
from courtside.engines.kernels import layers
from courtside.engines.lm_head import LMHead, find_lm_head
from courtside.engines.patches import fused_layers
from courtside.engines.patches.fused_layers import FusedLayers, FusedLinear, linear

KINDS = [
    tiny_model, qwen, qwen2, phi3, olmo2, lora_qwen, lora_head, partial(windowed, "gemma3_text"),
]  # fmt: skip


@pytest.mark.parametrize("make", KINDS)
def test_bf16_shadow_weights_are_what_autocast_rounds_to(make: Any) -> None:
    """The log-probs of samples are those of scoring them, up to bfloat16's rounding."""
    engine = make_engine(continuous=True, model=make(), autocast=torch.bfloat16)
    first = next(p for n, p in engine.model.named_parameters() if "q_proj" in n or "qkv_proj" in n)
    sampling = Sampling(max_new_tokens=12, temperature=1.3)
    for _ in range(2):
        samples = engine.sample(REQUESTS, sampling)
        eager = make_engine(continuous=False, model=engine.model, autocast=torch.bfloat16)
        gaps = []
        for request, sample in zip(REQUESTS, samples, strict=True):
            ids = request.prompt_ids + sample.token_ids
            scored = (False,) * len(request.prompt_ids) + (True,) * len(sample.token_ids)
            (scores,) = eager.score([ScoreRequest(token_ids=ids, scored=scored, temperature=1.3)])
            gaps.append(torch.tensor(sample.logp) - scores.logp_T.float())
        # The KV cache is bfloat16; scoring on a CPU has keys and values in float32.
        gap_T = torch.cat(gaps).abs()
        assert float(gap_T.max()) < 0.25 and float(gap_T.mean()) < 0.03
        first.data.mul_(-3.0)  # a training step: the copies must follow
        if engine.head.adapter is not None:
            engine.head.adapter.up_VR.data.mul_(-1.0)


@pytest.mark.parametrize("make", KINDS)
def test_fused_layers_sample_the_same(make: Any) -> None:
    """In float64, where rounding cannot hide a mistake; the eager engine runs unpatched layers."""
    model = make().double()
    engine = make_engine(continuous=True, model=model)
    engine._decode_weights = DecodeWeights(model, engine.head, torch.float64)
    sampling = Sampling(max_new_tokens=12, temperature=1.3)
    for _ in range(2):
        eager = make_engine(continuous=False, model=model).sample(REQUESTS, sampling)
        assert_equal_samples(engine.sample(REQUESTS, sampling), eager)
        for name, parameter in model.named_parameters():
            if "k_proj" in name or "up_proj" in name:
                parameter.data.mul_(-2.0)


@pytest.mark.parametrize(
    ("make", "norms", "autocast_norms", "fused", "mlps", "rotary"),
    [
        (tiny_model, 5, 4, 4, 2, 1),
        (qwen, 9, 4, 4, 2, 1),
        (qwen2, 5, 4, 4, 2, 1),
        (phi3, 5, 4, 0, 2, 1),
        (olmo2, 9, 0, 4, 2, 1),
        (lora_qwen, 9, 4, 0, 2, 1),
        (lora_head, 9, 4, 2, 2, 1),
        # Norms that add one, a gate other than SiLU.
        (lambda: make_model(Gemma2Config, Gemma2ForCausalLM), 9, 4, 4, 0, 1),
        # Interleaved RoPE, LayerNorm.
        (lambda: make_model(CohereConfig, CohereForCausalLM), 0, 0, 4, 2, 0),
    ],
)  # fmt: skip
def test_layers_that_a_model_has(
    make: Any, norms: int, autocast_norms: int, fused: int, mlps: int, rotary: int
) -> None:
    model = make()
    weights = DecodeWeights(model, find_lm_head(model), torch.bfloat16)
    assert len(weights.layers.norms) == norms
    assert len(weights.layers.autocast_norms) == autocast_norms
    assert sum(len(group) > 1 for group in weights.groups) == fused
    assert len(weights.layers.mlps) == mlps
    assert len(weights.layers.rotary) == rotary
    grouped = [m for group in weights.groups for m in group]
    head_modules = set(weights.head.module.modules())
    linear = [m for m in model.modules() if type(m) is nn.Linear and m not in head_modules]
    assert len(grouped) == len(linear) and set(grouped) == set(linear)
    assert model.get_output_embeddings() not in grouped


def test_kernels_sample_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step, and how many kernels a layer has: in Triton's interpreter, or on a GPU."""
    on_gpu = torch.cuda.is_available()
    model = qwen2().to("cuda" if on_gpu else "cpu")
    sampling = Sampling(max_new_tokens=4)
    eager = make_engine(continuous=False, model=model).sample(REQUESTS[:2], sampling)
    monkeypatch.setattr(fused_layers, "can_run_kernels", lambda x: True)
    monkeypatch.setattr(continuous_batching, "MAX_GRAPH_TOKENS", 0)  # slow to interpret
    calls: Counter[str] = Counter()
    for name in ("rms_norm", "apply_rotary", "append_kv", "swiglu"):
        monkeypatch.setattr(layers, name, count_calls(calls, getattr(layers, name)))
    engine = make_engine(continuous=True, model=model)
    engine._decode_weights = DecodeWeights(model, engine.head, torch.float32)
    calls.clear()
    assert_equal_samples(engine.sample(REQUESTS[:2], sampling), eager, atol=1e-4)
    steps = 3 if on_gpu else STEPS_PER_SYNC  # two warm-up steps and the capture, or all eager
    passes = steps + 1  # prefill runs the same layers, in one pass
    assert calls == {"rms_norm": 5 * passes, "apply_rotary": 2 * passes, "append_kv": 2 * steps,
                     "swiglu": 2 * passes}  # fmt: skip


@pytest.mark.parametrize(("softcap", "scale"), [(None, 0.25), (2.0, 1.0), (1.5, 0.5)])
def test_the_sampling_kernel_scales_and_caps_logits(
    softcap: float | None, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = nn.Linear(8, 50, bias=False, device=device)
    head = LMHead(layer, vocab_size=50, softcap=softcap, scale=scale)
    hidden_BD = 6 * torch.randn(16, 8, device=device)
    uniform_B = torch.rand(16, dtype=torch.float64, device=device)
    sampling = Sampling(max_new_tokens=1, temperature=0.8)
    with torch.no_grad():
        expected_ids, expected_logps = sample_tokens(head(hidden_BD), uniform_B, sampling)
        monkeypatch.setattr(fused_layers, "can_run_kernels", lambda x: True)
        ids_B, logp_B = sample_from_hidden(head, hidden_BD, uniform_B, sampling)
    assert torch.equal(ids_B, expected_ids)
    torch.testing.assert_close(logp_B, expected_logps.float(), rtol=1e-4, atol=1e-4)


def count_calls(calls: Counter[str], function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return call


def test_a_fused_linear_layer_returns_slices_only_for_the_input_it_ran_on() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(12, 4), torch.randn(12), torch.randn(2, 4)
    fused = FusedLinear(partial(linear, weight_OI=weight, bias_O=bias), [6, 4, 2])
    separate = [lambda x, w=w, b=b: x @ w.T + b for w, b in
           zip(weight.split([6, 4, 2]), bias.split([6, 4, 2]), strict=True)]  # fmt: skip
    torch.testing.assert_close(fused.forward(0, x), separate[0](x))
    torch.testing.assert_close(fused.forward(1, 2 * x), separate[1](2 * x))
    torch.testing.assert_close(fused.forward(2, x), separate[2](x))
    torch.testing.assert_close(fused.forward(1, x), separate[1](x))
    x.mul_(3)  # all slices are taken: nothing stale is left
    for i in (2, 1, 0):
        torch.testing.assert_close(fused.forward(i, x), separate[i](x))


def test_adapters_do_not_cast_their_input() -> None:
    """Their shadow weights are bfloat16, as the norm's output is."""
    model = lora(qwen())
    weights = DecodeWeights(model, find_lm_head(model), torch.bfloat16)
    layer = model.model.layers[0].self_attn.q_proj
    dtypes: list[torch.dtype] = []
    for module in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]):
        module.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), weights.swap_in():
        model.base_model(input_ids=torch.tensor([[0, 5, 9]]))
    assert dtypes == [torch.bfloat16] * 3
    assert layer.cast_input_dtype_enabled


@pytest.mark.parametrize("rows", [2, 1])
def test_rope_of_several_tokens_per_row_is_the_models(rows: int) -> None:
    model = qwen()
    weights = DecodeWeights(model, find_lm_head(model), None)
    (module,) = weights.layers.rotary
    original = module.apply_rotary_pos_emb
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 3, 16)
    cos, sin = torch.randn(2, rows, 3, 16)
    expected = (
        *original(q, k, cos, sin),
        *original(q[:, 0], k[:, 0], cos, sin, unsqueeze_dim=0),
    )
    with weights.swap_in():
        assert module.apply_rotary_pos_emb is not original
        patched = (
            *module.apply_rotary_pos_emb(q, k, cos, sin),
            *module.apply_rotary_pos_emb(q[:, 0], k[:, 0], cos, sin, unsqueeze_dim=0),
        )
    assert all(torch.equal(x, y) for x, y in zip(patched, expected, strict=True))


@pytest.mark.parametrize("kind", ["olmo3", "qwen3"])
def test_layers_in_bfloat16_with_angles_in_float32(kind: str) -> None:
    """OLMo rotates in float32 and rounds the result; the layers after it take bfloat16."""
    model = build_model(ModelKind(model_type=kind)).to(torch.bfloat16)
    weights = DecodeWeights(model, find_lm_head(model), None)
    assert list(weights.layers.rotary.values()) == [kind == "olmo3"]
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        expected = model.base_model(input_ids=ids).last_hidden_state
        with weights.swap_in():
            hidden = model.base_model(input_ids=ids).last_hidden_state
    assert hidden.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(hidden, expected, rtol=0.02, atol=0.05)


def test_the_trace_runs_where_only_linear_layers_are_in_the_dtype_of_autocast() -> None:
    """As the sampler of a sharded student is."""
    model = qwen()
    head = find_lm_head(model)
    expected = FusedLayers(model, head, torch.bfloat16)
    for module in expected.linear:
        module.to(torch.bfloat16)
    layers = FusedLayers(model, head, torch.bfloat16)
    assert layers.autocast_norms == expected.autocast_norms != set()


def test_a_disabled_head_adapter_is_disabled_in_the_shadow_weights() -> None:
    """Its copies keep their addresses: graphs with and without it stay valid."""
    model = lora_head()
    head = find_lm_head(model)
    weights = DecodeWeights(model, head, torch.bfloat16)
    hidden_ND, keys, logits = torch.randn(3, 32), [], []
    for is_on in (True, False, True):
        model.lm_head.enable_adapters(is_on)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            expected = head(hidden_ND)
            with weights.swap_in():
                keys.append(weights.key)
                logits.append(head(hidden_ND))
        assert torch.equal(logits[-1], expected) and "low_rank" not in vars(head)
    assert len(set(keys)) == 1 and torch.equal(logits[0], logits[2])
    assert not torch.allclose(logits[0], logits[1])


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_weights_in_the_dtype_of_the_matmuls_are_fused_in_place(
    autocast: torch.dtype | None, tmp_path: Path
) -> None:
    model = qwen().to(torch.bfloat16 if autocast else torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = DecodeWeights(model, find_lm_head(model), autocast)
    ids = torch.tensor([[5, 9, 33, 80]])
    context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None)
    attention = model.model.layers[0].self_attn
    with torch.no_grad(), context:
        expected = model(input_ids=ids).logits
        with weights.swap_in():
            key = weights.key
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0.02, atol=0.02)
    assert not any(tensor.is_copy for pair in weights._weights for tensor in pair)
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], before[name]) for name in saved)
    # An update of the parameters is an update of the fused weights, and so are other parameters.
    with torch.no_grad(), context:
        attention.v_proj.weight.mul_(30)
        with weights.swap_in():
            assert weights.key == key
            scaled = model(input_ids=ids).logits
        attention.v_proj.weight.data = before["model.layers.0.self_attn.v_proj.weight"].clone()
        with weights.swap_in():
            restored = model(input_ids=ids).logits
    assert not torch.allclose(scaled, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(restored, expected, rtol=0.02, atol=0.02)


def test_patches_are_undone_also_after_an_error() -> None:
    model = qwen()
    weights = DecodeWeights(model, find_lm_head(model), torch.bfloat16)
    rotary, linear = modeling_qwen3.apply_rotary_pos_emb, weights.head.linear
    model.model.layers[1].mlp.forward = hooked = partial(type(model.model.layers[1].mlp).forward)
    with pytest.raises(KeyError), weights.swap_in():
        assert "forward" in model.model.norm.__dict__
        assert "forward" in model.model.layers[0].mlp.__dict__
        assert modeling_qwen3.apply_rotary_pos_emb is not rotary
        raise KeyError
    assert model.model.layers[1].mlp.__dict__.pop("forward") is hooked
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert modeling_qwen3.apply_rotary_pos_emb is rotary and weights.head.linear is linear


def test_a_norm_of_another_kind_is_not_patched() -> None:
    class OffsetRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(32)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (2 + self.weight)

    model = qwen()
    model.model.norm = OffsetRMSNorm()
    weights = DecodeWeights(model, find_lm_head(qwen()), None)
    assert model.model.norm not in weights.layers.norms
    assert model.model.layers[0].input_layernorm in weights.layers.norms
