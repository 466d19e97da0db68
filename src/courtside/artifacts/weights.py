"""The exported model of a checkpoint: merged weights, or a LoRA adapter for the base model.

Both start from the base model's files in float32, whatever dtype the run multiplied in: the merged
weights are then those of the adapter on the base, up to float32 rounding. A base that the run held
in 4 bits is quantized and dequantized again: its weights are those that the adapter was trained on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from courtside.engines.loading import load_adapter, load_model, merge_adapter
from courtside.engines.precision import resolve_dtype
from courtside.errors import UserError
from courtside.recipe.student import StudentConfig
from courtside.training.weights import StudentWeights


def load_student(config: StudentConfig, trained: Mapping[str, Tensor]) -> StudentWeights:
    """The student on the CPU in float32, with the trained weights of a checkpoint."""
    changes = {"dtype": find_base_dtype(config), "device": "cpu"}
    weights = StudentWeights(config.model_copy(update=changes), seed=0, dequantizes=True)
    weights.model.float()
    parameters = weights.trained
    assert parameters.keys() == trained.keys(), "the run's recipe decides the names"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(trained[name])
    return weights


def load_quantized_base(config: StudentConfig) -> Any:
    """The frozen base of a run that held it in 4 bits, dequantized, in float32."""
    changes = {"dtype": find_base_dtype(config), "device": "cpu"}
    weights = StudentWeights(config.model_copy(update=changes), seed=0, dequantizes=True)
    return weights.adapter.unload().float()


def find_base_dtype(config: StudentConfig) -> str:
    """Of the base while it is loaded. In 4 bits it depends on it: weights are rounded to the dtype
    of the matmuls before they are quantized, and after they are dequantized."""
    if config.lora is None or not config.lora.in_4_bits:
        return "float32"
    has_gpu = config.device == "auto" and torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu or config.device == "cuda" else "cpu")
    return str(resolve_dtype(config.dtype, device)).removeprefix("torch.")


def merge_student(weights: StudentWeights, dtype: torch.dtype) -> Any:
    """The whole model. The adapter is added in float32: in bfloat16 it would be rounded away."""
    model = weights.model if weights.adapter is None else merge_adapter(weights.adapter)
    return model.to(dtype)


def make_adapter(config: StudentConfig, weights: StudentWeights) -> Any:
    """A PEFT model whose only adapter is all that sets the student apart from `student.model`.

    A run that started from `student.adapter` trained a second adapter on top of it. The two become
    one, whose rank is the sum of theirs: exact, and it needs no third model as its base.
    """
    if config.adapter is None:
        return weights.adapter
    with tempfile.TemporaryDirectory() as folder:
        weights.adapter.save_pretrained(folder, save_embedding_layers=False)
        base = load_model(config.model, dtype=torch.float32, device=torch.device("cpu"),
                          trust_remote_code=config.trust_remote_code)  # fmt: skip
        adapted = load_adapter(base, config.adapter, config.model, adapter_name="start")
        adapted.load_adapter(folder, adapter_name="trained")
    try:
        adapted.add_weighted_adapter(
            ["start", "trained"], [1.0, 1.0], adapter_name="default", combination_type="cat"
        )
    except ValueError as error:
        raise UserError(
            f"--adapter: student.adapter = {str(config.adapter)!r} and the trained adapter cannot "
            f"be joined into one ({error}). Leave --adapter out: merged weights have both"
        ) from None
    adapted.set_adapter("default")
    for name in ("start", "trained"):
        adapted.delete_adapter(name)
    return adapted
