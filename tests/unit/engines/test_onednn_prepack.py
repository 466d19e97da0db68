"""Prepacked weights: the same values, inside the context only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear as LoraLinear
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.local import LocalEngine
from courtside.engines.patches import onednn_prepack as module
from courtside.engines.patches.onednn_prepack import (
    MIN_DECODE_STEPS,
    is_worth_prepacking,
    prepack_linear_layers,
)
from courtside.engines.patches.patch import apply_patches

IDS = torch.arange(2, 14).view(3, 4)


def make_engine() -> LocalEngine:
    return LocalEngine(tiny_model(), tiny_tokenizer(), name="tiny", vocab_size=200)


def outputs(engine: LocalEngine) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        hidden = engine.model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
        return hidden, engine.head(hidden[:, -1])


def test_outputs_are_the_same_and_follow_the_weights() -> None:
    engine = make_engine()
    before = outputs(engine)
    with apply_patches(prepack_linear_layers(engine.model, engine.head, torch.float32)):
        inside = outputs(engine)
    for plain, prepacked in zip(before, inside, strict=True):
        torch.testing.assert_close(plain, prepacked, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        engine.model.model.layers[0].mlp.up_proj.weight.mul_(3)
        engine.model.lm_head.weight.mul_(2)
    updated = outputs(engine)
    assert not torch.allclose(updated[1], before[1], atol=1e-3)
    with apply_patches(prepack_linear_layers(engine.model, engine.head, torch.float32)):
        torch.testing.assert_close(outputs(engine)[1], updated[1], rtol=1e-5, atol=1e-5)


def test_an_error_restores_the_layers() -> None:
    engine = make_engine()
    with (
        pytest.raises(RuntimeError),
        apply_patches(prepack_linear_layers(engine.model, engine.head, torch.float32)),
    ):
        raise RuntimeError
    assert not any("forward" in module.__dict__ for module in engine.model.modules())
    loss = engine.head(engine.model.base_model(input_ids=IDS).last_hidden_state).sum()
    loss.backward()
    assert engine.model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_samples_are_those_of_unpacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(max_new_tokens=MIN_DECODE_STEPS)
    requests = [SampleRequest(prompt_ids=tuple(IDS[i % 3].tolist()), seed=i) for i in range(6)]
    expected = make_engine().sample(requests, sampling)
    engine = make_engine()
    assert not is_worth_prepacking(engine.model, torch.float32, num_steps=100), "too small"
    monkeypatch.setattr(module, "MIN_PARAMETERS", 0)
    assert is_worth_prepacking(engine.model, torch.float32, num_steps=MIN_DECODE_STEPS)
    assert not is_worth_prepacking(engine.model, torch.float32, num_steps=MIN_DECODE_STEPS - 1)
    assert not is_worth_prepacking(tiny_model().double(), torch.float64, num_steps=100)
    for prepacked, plain in zip(engine.sample(requests, sampling), expected, strict=True):
        assert prepacked.token_ids == plain.token_ids
        assert prepacked.logp == pytest.approx(plain.logp, abs=1e-4)


def make_lora_engine(**settings: Any) -> LocalEngine:
    engine = make_engine()
    options: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | settings
    inject_adapter_in_model(LoraConfig(init_lora_weights=False, **options), engine.model)
    engine.model.eval()
    return engine


def num_patched(engine: LocalEngine) -> int:
    layers = [m for m in engine.model.modules() if type(m) is LoraLinear]
    return sum("forward" in vars(layer) for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_adapters_are_prepacked(dtype: torch.dtype) -> None:
    """Also disabled, as for a frozen self-teacher."""
    engine = make_lora_engine()
    layers = [m for m in engine.model.modules() if type(m) is LoraLinear]
    for enabled in (True, False):
        for layer in layers:
            layer.enable_adapters(enabled)
        exact = outputs(engine)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            usual = outputs(engine)[0].float()
            with apply_patches(prepack_linear_layers(engine.model, engine.head, dtype)):
                assert num_patched(engine) == len(layers)
                prepacked = outputs(engine)[0].float()
        assert num_patched(engine) == 0
        errors = [float((hidden - exact).norm() / exact.norm()) for hidden in (prepacked, usual)]
        # Rounded once where autocast rounds three times.
        assert errors[0] < 1e-5 if dtype == torch.float32 else errors[0] < 1.1 * errors[1] + 1e-3


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "up_proj"], "all-linear"])
def test_layers_with_one_input_are_one_matmul(targets: Any) -> None:
    """Their outputs are those of layers that are prepacked one by one, up to rounding, also where
    only some of them have an adapter."""
    engine = make_lora_engine(target_modules=targets)
    groups = module.group_layers(engine.model, set(engine.head.module.modules()))
    assert sorted(map(len, groups)) == sorted([1, 1, 2, 3] * len(engine.model.model.layers))
    for group in groups:
        x = torch.randn(5, getattr(group[0], "base_layer", group[0]).in_features)
        together = module.prepack_group(group, torch.bfloat16)(x)
        separate = [module.prepack_group([layer], torch.bfloat16)(x) for layer in group]
        torch.testing.assert_close(together, torch.cat(separate, -1), rtol=2**-7, atol=1e-3)


def test_a_session_prepacks_once_for_all_of_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_PARAMETERS", 0)
    engine, sampling = make_lora_engine(), Sampling(max_new_tokens=MIN_DECODE_STEPS)
    session: Any = engine.session(1)
    (first,) = session.sample([0], [SampleRequest(prompt_ids=(3, 4), seed=0)], sampling)
    patches = session.prepacked
    assert patches and num_patched(engine) == 0, "the layers are the model's between turns"
    turn = SampleRequest(prompt_ids=(first.token_ids[-1], 5), seed=1)
    session.sample([0], [turn], sampling)
    assert session.prepacked is patches
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.5)
    (after,) = engine.sample([SampleRequest(prompt_ids=(3, 4), seed=0)], sampling)
    assert after.logp != first.logp, "another session has the new weights"


@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_other_adapters_are_left_alone(settings: dict[str, Any]) -> None:
    engine = make_lora_engine(**settings)
    exact = outputs(engine)[0]
    with apply_patches(prepack_linear_layers(engine.model, engine.head, torch.float32)):
        assert num_patched(engine) == 0
        torch.testing.assert_close(outputs(engine)[0], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_merged_or_several_adapters_are_left_alone() -> None:
    engine = make_lora_engine()
    for layer in (m for m in engine.model.modules() if type(m) is LoraLinear):
        layer.merge()
    with apply_patches(prepack_linear_layers(engine.model, engine.head, torch.float32)):
        assert num_patched(engine) == 0
    engine = make_lora_engine()
    more = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    inject_adapter_in_model(more, engine.model, "second")
    exact = outputs(engine)[0]
    with apply_patches(prepack_linear_layers(engine.model, engine.head, torch.float32)):
        assert num_patched(engine) == 0
        torch.testing.assert_close(outputs(engine)[0], exact, rtol=1e-4, atol=1e-4)
