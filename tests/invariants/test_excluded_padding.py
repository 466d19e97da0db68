"""A vocabulary padded with tokens whose bias is −inf trains as the one without them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.small_runs import small_recipe
from support.tiny_model import tiny_tokenizer
from transformers import PhiConfig, PhiForCausalLM

from courtside.api import train

SIZE, PADDING = 258, 6


def phi(vocab_size: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = PhiConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
        pad_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    return PhiForCausalLM(config).eval()


def save(folder: Path, *, padding: int, seed: int = 0) -> Path:
    """The same model with any number of excluded tokens."""
    model = phi(SIZE, seed)
    if padding:
        padded = phi(SIZE + padding, seed)
        state = copy.deepcopy(model.state_dict())
        for name, tensor in padded.state_dict().items():
            if tensor.shape != state[name].shape:
                state[name] = torch.cat([state[name], tensor[SIZE:]])
        state["lm_head.bias"][SIZE:] = -torch.inf
        padded.load_state_dict(state)
        model = padded
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("on", ["vocabulary", "top_k"])
def test_padding_changes_no_step(on: str, tmp_path: Path) -> None:
    """With a teacher padded alike, whose weights are a moving average: −inf − (−inf) is NaN."""
    loss: dict[str, Any] = {"kind": "divergence"}
    if on == "top_k":
        loss["support"] = {"kind": "top_k", "k": 5}
    for padding in (0, PADDING):
        student = save(tmp_path / f"student-{padding}", padding=padding)
        recipe = small_recipe(
            student,
            teacher={"kind": "self", "weights": "ema", "context": {"kind": "system", "text": "!"}},
            losses=[loss],
            train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-2},
            run={"checkpoint_every": 2},
        )
        train(recipe, tmp_path / f"run-{padding}")
    weights, padded = (
        {
            file.stem: load_file(file)
            for file in sorted((tmp_path / f"run-{padding}" / "checkpoints").rglob("*.safetensors"))
            if file.stem != "optimizer"
        }
        for padding in (0, PADDING)
    )
    assert weights.keys() == padded.keys() and len(weights) == 2
    start = phi(SIZE).state_dict()
    for name, tensors in weights.items():
        change = 0.0
        for key, tensor in tensors.items():
            if key.endswith("k_proj.bias"):
                continue  # attention does not depend on it: AdamW follows rounding noise
            torch.testing.assert_close(padded[name][key][: len(tensor)], tensor, rtol=0, atol=1e-4)
            change += float((tensor - start[key]).abs().max())
        assert change > 1e-3, "else nothing would be compared"
        assert bool((padded[name]["lm_head.bias"][SIZE:] == -torch.inf).all())
