"""No adapter goes where a layer multiplies the bare weight."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hybrids import make_hybrid
from support.model_kinds import ModelKind, build_model
from support.tiny_model import tiny_model

from courtside.errors import ModelError
from courtside.recipe.student import LoraConfig, StudentConfig
from courtside.training.adapter_targets import find_bare_layers
from courtside.training.weights import StudentWeights


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mamba", {"x_proj", "dt_proj", "out_proj"}),
        ("jamba", {"dt_proj"}),
        ("nemotron_h", {"out_proj"}),
        ("granitemoehybrid", {"out_proj"}),
        ("qwen3_5_text", set()),
        ("lfm2", set()),
    ],
)
def test_layers_whose_weight_is_read_by_others(kind: str, expected: set[str]) -> None:
    names = find_bare_layers(make_hybrid(kind))
    assert {name.rsplit(".")[-1] for name in names} == expected
    assert all(".mixer." in name or ".mamba." in name for name in names)
    assert find_bare_layers(tiny_model()) == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("phimoe", {"router"}), ("gemma3n_text", {"correction_coefs"}), ("mixtral", set())],
)
def test_layers_that_are_linear_by_their_class_alone(kind: str, expected: set[str]) -> None:
    names = find_bare_layers(build_model(ModelKind(model_type=kind)))
    assert {name.rsplit(".")[-1] for name in names} == expected


def test_all_linear_leaves_them_out_and_a_list_may_not_name_them(tmp_path: Path) -> None:
    make_hybrid("mamba").save_pretrained(tmp_path)
    config = StudentConfig(model=str(tmp_path), device="cpu", lora=LoraConfig(rank=2))
    names = {name.split(".lora_")[0] for name in StudentWeights(config, seed=0).trained}
    assert {name.rsplit(".")[-1] for name in names} == {"in_proj"} and len(names) == 4
    lora = LoraConfig(rank=2, target_modules=("in_proj", "dt_proj"))
    with pytest.raises(ModelError, match=r"target_modules = .*dt_proj cannot have an adapter"):
        StudentWeights(StudentConfig(model=str(tmp_path), device="cpu", lora=lora), seed=0)


def test_an_rwkv_is_no_student(tmp_path: Path) -> None:
    make_hybrid("rwkv").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"student.model = .* overwrite what their backward"):
        StudentWeights(StudentConfig(model=str(tmp_path), device="cpu"), seed=0)
