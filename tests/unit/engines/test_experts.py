"""Experts of a mixture under autocast: their matmuls round as those of linear layers do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.mixtures import mixture
from support.tiny_model import tiny_tokenizer
from torch import Tensor

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.local import LocalEngine
from courtside.engines.patches.experts import (
    AUTOCAST_EXPERTS,
    DECODE_COPIES,
    GROUPED_MM,
    apply_autocast_to_experts,
    find_capture_problem,
    find_experts,
    list_copied_parameters,
)

KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
IDS = torch.arange(2, 34)[None]


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def patched_mixture(kind: str) -> Any:
    model = mixture(kind)
    model.config._experts_implementation = GROUPED_MM
    apply_autocast_to_experts(model)
    assert model.config._experts_implementation == AUTOCAST_EXPERTS
    return model


@pytest.fixture
def matmul_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    dtypes: list[torch.dtype] = []
    plain = torch.nn.functional.grouped_mm

    def watched(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        assert a.dtype == b.dtype
        dtypes.append(b.dtype)
        return plain(a, b, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    return dtypes


@pytest.mark.parametrize("kind", KINDS)
def test_experts_compute_in_autocast_s_dtype(kind: str, matmul_dtypes: list[torch.dtype]) -> None:
    """The same values and gradients as with weights that are rounded before."""
    model = patched_mixture(kind)
    rounded = copy.deepcopy(model)
    for module in find_experts(rounded):
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.bfloat16()
    gradients = []
    for each in (model, rounded):
        with autocast():
            loss = each(input_ids=IDS, use_cache=False).logits.logsumexp(-1).float().sum()
        loss.backward()
        gradients.append([p.grad.float() for m in find_experts(each) for p in m.parameters(False)])
    assert set(matmul_dtypes) == {torch.bfloat16}
    for ours, expected in zip(*gradients, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02 * float(expected.std()))


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_unchanged_without_autocast(
    kind: str, matmul_dtypes: list[torch.dtype]
) -> None:
    model = patched_mixture(kind)
    plain = copy.deepcopy(model)
    plain.config._experts_implementation = GROUPED_MM
    assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert set(matmul_dtypes) == {torch.float32}


def test_the_implementation_is_not_saved(tmp_path: Any) -> None:
    patched_mixture("qwen3_moe").save_pretrained(tmp_path)
    assert "courtside" not in (tmp_path / "config.json").read_text()


def test_other_implementations_stay() -> None:
    model = mixture("qwen3_moe")
    model.config._experts_implementation = "eager"
    apply_autocast_to_experts(model)
    assert model.config._experts_implementation == "eager"


def test_decoding_reads_copies_that_are_made_once() -> None:
    """Under autocast, with trained weights in float32; a new version of the weights is copied."""
    model = patched_mixture("qwen3_moe")
    engine = LocalEngine(model, tiny_tokenizer(), name="m", autocast=torch.bfloat16)
    weights = engine._decode_weights
    copied = list_copied_parameters(model)
    assert len(copied) == 2 * len(list(find_experts(model)))
    for _ in range(2):
        with weights.swap_in(), torch.no_grad():
            for module, name, parameter in copied:
                assert torch.equal(vars(module)[DECODE_COPIES][name], parameter.bfloat16())
                parameter.mul_(1.5)
        assert not any(DECODE_COPIES in vars(module) for module, _, _ in copied)
    # Swapped in, a changed parameter has no effect until the next refresh.
    with autocast(), torch.no_grad(), weights.swap_in():
        before = model(input_ids=IDS, use_cache=False).logits
        for _, _, parameter in copied:
            parameter.zero_()
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before)


def test_experts_with_an_adapter_are_not_copied() -> None:
    from peft import LoraConfig, get_peft_model

    model = patched_mixture("qwen3_moe")
    config = LoraConfig(target_parameters=["mlp.experts.gate_up_proj"], target_modules=["q_proj"])
    assert list_copied_parameters(get_peft_model(model, config)) == []


def test_float32_experts_are_not_captured() -> None:
    model = mixture("qwen3_moe")
    model.config._experts_implementation = GROUPED_MM
    assert "float32" in str(find_capture_problem(model, None))
    assert find_capture_problem(model.bfloat16(), None) is None
    assert find_capture_problem(patched_mixture("qwen3_moe"), torch.bfloat16) is None
    unpatched = mixture("qwen3_moe")
    unpatched.config._experts_implementation = GROUPED_MM
    assert "float32" in str(find_capture_problem(unpatched, torch.bfloat16))


def test_samples_under_autocast_have_the_log_probs_of_their_scores() -> None:
    engine = LocalEngine(
        patched_mixture("qwen3_moe"), tiny_tokenizer(), name="m", autocast=torch.bfloat16
    )
    request = SampleRequest(prompt_ids=tuple(range(3, 20)), seed=0)
    (sample,) = engine.sample([request], Sampling(max_new_tokens=8))
    assert len(sample.logp) == len(sample.token_ids)
