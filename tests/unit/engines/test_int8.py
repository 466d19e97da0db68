"""Int8 weight-only layers: bounded error, exact integers, everything but the LM head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_model import tiny_model
from torch import nn

from courtside.engines.precision import Int8Linear, quantize_linear_layers


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), bias=st.booleans(), size=st.sampled_from([1e-4, 1.0, 30.0]))
def test_the_error_is_at_most_half_a_quantization_step_per_weight(
    seed: int, bias: bool, size: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(17, 5, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(5, 17, generator=generator) * size)
        linear.weight[2] = 0.0  # its scale is the minimum
    input_ND = torch.randn(11, 17, generator=generator)
    output_NO = Int8Linear(linear)(input_ND)
    step_O = linear.weight.abs().amax(dim=1) / 127
    bound_NO = input_ND.abs().sum(dim=1, keepdim=True) * step_O / 2
    error_NO = (output_NO - linear(input_ND)).abs()
    assert (error_NO <= bound_NO * (1 + 1e-3) + 1e-5 * size).all()
    assert torch.equal(output_NO[:, 2], linear(input_ND)[:, 2])


def test_weights_on_the_quantization_grid_are_exact() -> None:
    linear = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[127.0, -127.0, 1.0, 0.0], [254.0, 2.0, -4.0, 100.0]]))
    input_ND = torch.eye(4)
    assert torch.equal(Int8Linear(linear)(input_ND), linear(input_ND))
    assert Int8Linear(linear).weight_OI.dtype == torch.int8


def test_quantized_weights_are_exact_in_bfloat16() -> None:
    """±127 has seven bits, bfloat16 eight: only the matmul rounds."""
    linear = nn.Linear(64, 8).to(torch.bfloat16)
    layer = Int8Linear(linear)
    weight_OI = layer.weight_OI
    assert torch.equal(weight_OI.to(torch.bfloat16).float(), weight_OI.float())
    out = layer(torch.ones(3, 64, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16


def test_every_linear_layer_but_the_lm_head_is_quantized() -> None:
    model = tiny_model()
    head, before = model.get_output_embeddings(), tiny_model()
    quantize_linear_layers(model)
    assert model.get_output_embeddings() is head
    assert torch.equal(head.weight, before.get_output_embeddings().weight)
    unquantized = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert unquantized == ["lm_head"]
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == 2 * 7
    ids = torch.tensor([[5, 80, 33, 120]])
    with torch.no_grad():
        quantized, exact = model(ids).logits.log_softmax(-1), before(ids).logits.log_softmax(-1)
    assert float((quantized - exact).abs().max()) == pytest.approx(0, abs=0.3)
    assert not torch.equal(quantized, exact)


def test_quantized_weights_count_as_parameters_of_a_byte() -> None:
    model, exact = tiny_model(), tiny_model()
    quantize_linear_layers(model)
    layer, linear = model.model.layers[0].mlp.up_proj, exact.model.layers[0].mlp.up_proj
    num_bytes = sum(p.nbytes for p in layer.parameters())
    assert num_bytes == linear.weight.numel() + 4 * linear.out_features
    assert model.dtype == exact.dtype and not any(p.requires_grad for p in layer.parameters())
