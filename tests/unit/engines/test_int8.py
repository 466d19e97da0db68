from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from torch import nn

from courtside.engines.int8 import Int8Linear, quantize_linear_layers


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), bias=st.booleans(), size=st.sampled_from([1e-4, 1.0, 30.0]))
def test_each_output_is_off_by_half_a_step_a_weight_at_most(
    seed: int, bias: bool, size: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(17, 5, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(5, 17, generator=generator) * size)
        linear.weight[2] = 0.0  # a dead row has no scale of its own
    input_ND = torch.randn(11, 17, generator=generator)
    got_NO = Int8Linear(linear)(input_ND)
    step_O = linear.weight.abs().amax(dim=1) / 127
    bound_NO = input_ND.abs().sum(dim=1, keepdim=True) * step_O / 2
    error_NO = (got_NO - linear(input_ND)).abs()
    assert (error_NO <= bound_NO * (1 + 1e-3) + 1e-5 * size).all()
    assert torch.equal(got_NO[:, 2], linear(input_ND)[:, 2])


def test_weights_that_are_whole_steps_are_kept_exactly() -> None:
    linear = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[127.0, -127.0, 1.0, 0.0], [254.0, 2.0, -4.0, 100.0]]))
    input_ND = torch.eye(4)
    assert torch.equal(Int8Linear(linear)(input_ND), linear(input_ND))
    assert Int8Linear(linear).weight_OI.dtype == torch.int8


def test_in_bfloat16_the_whole_numbers_stay_exact() -> None:
    """±127 has seven bits, bfloat16 eight: the only rounding is that of the arithmetic itself."""
    linear = nn.Linear(64, 8).to(torch.bfloat16)
    layer = Int8Linear(linear)
    numbers = layer.weight_OI
    assert isinstance(numbers, torch.Tensor)
    assert torch.equal(numbers.to(torch.bfloat16).float(), numbers.float())
    out = layer(torch.ones(3, 64, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16


def test_every_layer_but_the_head_is_quantised() -> None:
    model = tiny_model()
    head, before = model.get_output_embeddings(), tiny_model()
    quantize_linear_layers(model)
    assert model.get_output_embeddings() is head
    assert torch.equal(head.weight, before.get_output_embeddings().weight)
    left = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert left == ["lm_head"]
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == 2 * 7
    ids = torch.tensor([[5, 80, 33, 120]])
    with torch.no_grad():
        close, exact = model(ids).logits.log_softmax(-1), before(ids).logits.log_softmax(-1)
    assert float((close - exact).abs().max()) == pytest.approx(0, abs=0.3)
    assert not torch.equal(close, exact)
