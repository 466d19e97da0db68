"""A student that starts between two models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_model import save_tiny

from courtside.errors import ModelError, UserError
from courtside.recipe.student import AverageConfig, LoraConfig, StudentConfig
from courtside.training.weights import StudentWeights


def weights_of(config: StudentConfig) -> dict[str, torch.Tensor]:
    return dict(StudentWeights(config, seed=0).model.named_parameters())


def test_weights_are_the_mean_of_both(tiny_folder: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=5)
    first, second = (weights_of(StudentConfig(model=str(m))) for m in (tiny_folder, other))
    average = AverageConfig(model=str(other), weight=0.25)
    mixed = weights_of(StudentConfig(model=str(tiny_folder), average_with=average))
    for name, tensor in mixed.items():
        expected = 0.75 * first[name].double() + 0.25 * second[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-7)
        assert tensor.requires_grad
    assert any(not torch.equal(first[name], mixed[name]) for name in mixed)


def test_a_frozen_base_in_bfloat16_is_averaged_before_it_is_rounded(
    tiny_folder: Path, tmp_path: Path
) -> None:
    other = save_tiny(tmp_path / "other", seed=5)
    plain = StudentConfig(
        model=str(tiny_folder), average_with=AverageConfig(model=str(other)), dtype="float32"
    )
    exact = {name.split(".")[-2]: t for name, t in weights_of(plain).items() if "norm" not in name}
    adapted = plain.model_copy(update={"lora": LoraConfig(rank=2), "dtype": "bfloat16"})
    for name, tensor in weights_of(adapted).items():
        if "layers.1" in name and name.endswith("down_proj.base_layer.weight"):
            assert torch.equal(tensor, exact["down_proj"].to(torch.bfloat16))
            return
    raise AssertionError("the base layer is not there")


def test_models_of_another_size_are_refused(tiny_folder: Path, tiny_teacher_folder: Path) -> None:
    config = StudentConfig(
        model=str(tiny_folder), average_with=AverageConfig(model=str(tiny_teacher_folder))
    )
    with pytest.raises(ModelError, match=r"student.average_with.model = .* differ in \d+ weights"):
        StudentWeights(config, seed=0)


def test_its_adapter_fits_no_model(tiny_folder: Path) -> None:
    from courtside.artifacts.export import refuse_adapter

    config = StudentConfig(
        model=str(tiny_folder),
        lora=LoraConfig(rank=2),
        average_with=AverageConfig(model=str(tiny_folder)),
    )
    with pytest.raises(UserError, match="belongs to averaged weights"):
        refuse_adapter(config, dtype="float32")
