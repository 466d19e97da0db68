"""The LM head computes the model's logits: with bias, scale, soft cap and adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.tiny_model import tiny_model
from torch import Tensor, nn

from courtside.engines.lm_head import find_lm_head
from courtside.engines.local import LocalEngine
from courtside.errors import ModelError

SIZES = dict(
    vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    initializer_range=0.3, bos_token_id=0, eos_token_id=1, pad_token_id=1,
)  # fmt: skip


def build_model(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().double()


@torch.no_grad()
def logits_of_head_and_model(model: Any, vocab_size: int | None = None) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[3, 77, 140, 9, 250]])
    hidden_LD = model.base_model(input_ids=ids).last_hidden_state[0]
    return find_lm_head(model, vocab_size=vocab_size)(hidden_LD), model(input_ids=ids).logits[0]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 1.5}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 8.0}),
        ("Phi", {"num_key_value_heads": 4}),  # a head with a bias
    ],
)
def test_logits_are_the_models_own(family: str, options: dict[str, Any]) -> None:
    model = build_model(family, **options)
    if model.get_output_embeddings().bias is not None:
        nn.init.normal_(model.get_output_embeddings().bias)
    ours_LV, model_LV = logits_of_head_and_model(model)
    torch.testing.assert_close(ours_LV, model_LV.to(ours_LV.dtype), rtol=1e-6, atol=1e-6)
    fewer_LV, _ = logits_of_head_and_model(model, vocab_size=200)
    torch.testing.assert_close(fewer_LV, ours_LV[:, :200], rtol=1e-6, atol=1e-6)


def test_the_soft_cap_changes_the_logits() -> None:
    """Else the comparison above could pass without it."""
    model = build_model("Gemma2", head_dim=8, final_logit_softcapping=1.5)
    capped_LV, _ = logits_of_head_and_model(model)
    model.config.final_logit_softcapping = None
    free_LV, _ = logits_of_head_and_model(model)
    assert float(capped_LV.abs().max()) <= 1.5 < float(free_LV.abs().max())


def test_a_model_that_does_more_is_refused() -> None:
    model = tiny_model()
    original = model.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        out.logits = out.logits.flip(-1)
        return out

    model.forward = shifted
    with pytest.raises(ModelError, match="LlamaForCausalLM does more between hidden states"):
        find_lm_head(model)


def test_tokens_excluded_by_a_bias_hide_no_other_difference() -> None:
    """A bias of −inf equals itself, and makes no tolerance infinite."""
    model = build_model("Phi")
    model.lm_head.bias.data[-9:] = -torch.inf
    assert find_lm_head(model).vocab_size == SIZES["vocab_size"]
    forward = model.forward

    def scaled(*args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        out.logits = out.logits * 1.5
        return out

    model.forward = scaled
    with pytest.raises(ModelError, match="PhiForCausalLM does more between hidden states"):
        find_lm_head(model)


def test_a_scale_that_is_missing_in_the_config_is_refused() -> None:
    model = build_model("Granite", logits_scaling=8.0)
    hidden = type(model.config)(**{**SIZES, "logits_scaling": 1.0})
    model.config.get_text_config = lambda: hidden
    with pytest.raises(ModelError, match="GraniteForCausalLM does more"):
        find_lm_head(model)


def test_a_model_without_a_head_is_refused() -> None:
    model = tiny_model()
    model.get_output_embeddings = lambda: None
    with pytest.raises(ModelError, match="LlamaForCausalLM has no linear output head"):
        find_lm_head(model)


def test_half_precision_weights_give_float32_logits() -> None:
    model = tiny_model().to(torch.bfloat16)
    head = find_lm_head(model)
    with torch.no_grad():
        hidden_LD = model.base_model(input_ids=torch.tensor([[3, 4, 5]])).last_hidden_state[0]
        assert hidden_LD.dtype == torch.bfloat16
        assert head(hidden_LD).dtype == torch.float32


def build_lora_model(**options: Any) -> Any:
    torch.manual_seed(1)
    settings = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return get_peft_model(build_model("Llama", **options), settings)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_on_the_head_is_in_the_logits_while_it_is_on(tied: bool) -> None:
    peft = build_lora_model(tie_word_embeddings=tied).double()
    model = peft.base_model.model
    on_LV, model_LV = logits_of_head_and_model(model)
    torch.testing.assert_close(on_LV, model_LV)
    fewer_LV, _ = logits_of_head_and_model(model, vocab_size=200)
    torch.testing.assert_close(fewer_LV, on_LV[:, :200])
    with peft.disable_adapter():
        off_LV, model_LV = logits_of_head_and_model(model)
    torch.testing.assert_close(off_LV, model_LV)
    assert float((on_LV - off_LV).abs().max()) > 0.1


def test_a_fixed_head_ignores_later_adapter_changes() -> None:
    peft = build_lora_model().double()
    head = find_lm_head(peft.base_model.model)
    hidden_ND = torch.randn(3, 32, dtype=torch.float64)
    with torch.no_grad():
        on = head(hidden_ND)
        with peft.disable_adapter():
            off = head(hidden_ND)
            without = head.with_current_adapter()
        assert head.adapter is not None
        up_VR = head.adapter.up_VR.data
        head.adapter.up_VR.data = torch.zeros_like(up_VR)
        nothing = head.with_current_adapter()
        head.adapter.up_VR.data = up_VR
        assert torch.equal(head(hidden_ND), on) and not torch.equal(on, off)
        assert torch.equal(without(hidden_ND), off)
        torch.testing.assert_close(nothing(hidden_ND), off)
    assert not nothing(hidden_ND).requires_grad
    plain = find_lm_head(build_model("Llama"))
    assert plain.with_current_adapter() is plain


def test_autocast_does_not_take_the_adapters_gradient_away() -> None:
    """Weights that were first cast without a graph must not stay cached so."""
    model = build_lora_model().base_model.model.float()
    head = find_lm_head(model)
    hidden_ND = torch.randn(3, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            before = head(hidden_ND)
        after = head(hidden_ND)
        assert torch.equal(before, after)
    after.sum().backward()
    adapter = head.adapter
    assert adapter is not None
    assert adapter.down_RD.grad is not None and adapter.up_VR.grad is not None
    assert float(adapter.down_RD.grad.abs().max()) > 0


def test_tokens_beyond_vocab_size_are_never_sampled(
    make_engine: Callable[..., LocalEngine],
) -> None:
    from courtside.engines.base import SampleRequest, Sampling

    engine = make_engine(tiny_model(vocab_size=300), vocab_size=20, eos=(1,))
    requests = [SampleRequest(prompt_ids=(5, 6, 7), seed=seed) for seed in range(20)]
    sampled_ids = {
        i for s in engine.sample(requests, Sampling(max_new_tokens=8)) for i in s.token_ids
    }
    assert len(sampled_ids) > 10 and max(sampled_ids) < 20
