"""Parameters of shapes: those of real models, and the published totals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from courtside.errors import ModelError
from courtside.planning.presets import PRESETS, find_preset, match_preset
from courtside.planning.shapes import shape_from_config

SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "gemma-3-1b": 999_885_952,
}
"""Elements of the published safetensors."""


def count(config: Any) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=False),
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        MistralConfig(**SIZES, head_dim=32),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES, head_dim=32),
        GemmaConfig(**SIZES, head_dim=32),
        Gemma2Config(**SIZES, head_dim=32),
        Gemma3TextConfig(**SIZES, head_dim=32),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_are_those_of_the_model(config: Any) -> None:
    assert shape_from_config("a model", config).num_parameters == count(config)


@pytest.mark.parametrize(("name", "number"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name: str, number: int) -> None:
    assert PRESETS[name].num_parameters == number


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "lm_head")])
def test_adapters_have_as_many_weights_as_peft_makes(targets: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        names = targets if targets == "all-linear" else list(targets)
        adapted = get_peft_model(
            model, LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM")
        )
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert shape_from_config("a model", config).num_lora_parameters(8, targets) == trained


def test_what_cannot_be_estimated_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'mixtral'.*dense decoders.*--shape"):
        shape_from_config("experts", MixtralConfig(**SIZES))
    with pytest.raises(ModelError, match=r"target_modules names 'gate'.*Known: q_proj"):
        PRESETS["qwen3-8b"].num_lora_parameters(8, ("gate",))


def test_hub_ids_name_presets_and_wrong_names_list_them() -> None:
    assert match_preset("Qwen/Qwen3-8B-Base") is PRESETS["qwen3-8b"]
    assert match_preset("meta-llama/Llama-3.1-70B-Instruct") is PRESETS["llama-3.1-70b"]
    assert match_preset("google/gemma-3-4b-it") is PRESETS["gemma-3-4b"]
    assert match_preset("Qwen/Qwen3-30B-A3B") is None
    assert find_preset("Qwen3-8B", "--shape") is PRESETS["qwen3-8b"]
    with pytest.raises(ModelError, match=r"--shape .qwen9. is not known\. Known: smollm2-135m, "):
        find_preset("qwen9", "--shape")
