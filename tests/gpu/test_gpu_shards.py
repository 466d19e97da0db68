"""One rank of a launcher on the device (FSDP2, NCCL): the run is that of a plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.float64 import relative_error
from support.gpu_models import save_qwen3
from support.rank_runs import rows, run_ranks
from support.small_runs import small_tree

from courtside.api import train
from courtside.recipe.load import parse_recipe
from courtside.training.checkpoints import latest, load

HEAD: dict[str, Any] = {"rank": 8, "target_modules": ["v_proj", "lm_head"]}
STUDENTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"lora": {"rank": 8}},
    "LoRA, head": {"lora": HEAD},
    "checkpointing": {"gradient_checkpointing": True},
    "autocast": {"dtype": "bfloat16"},
}
LOSSES: dict[str, list[dict[str, Any]]] = {
    "reverse": [{"kind": "divergence"}],
    "top k": [{"kind": "divergence", "support": {"kind": "top_k", "k": 20, "form": "tail"}}],
}


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("student", STUDENTS)
def test_a_single_rank_trains_as_a_plain_process(
    student: str, losses: str, device: torch.device, tmp_path: Path
) -> None:
    """The head's kernels get the gathered weight of a shard, and their gradient goes back to it."""
    model, teacher = (save_qwen3(tmp_path / name, seed=i) for i, name in enumerate("ab"))
    tree = small_tree(
        model, teacher,
        student={
            "model": str(model), "device": device.type, "dtype": "float32", **STUDENTS[student],
        },
        losses=LOSSES[losses],
        rollout={"samples_per_prompt": 4, "max_new_tokens": 24},
        train={"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-4, "micro_batch_tokens": 512},
        evaluate={"num_tasks": 1},
        run={"checkpoint_every": 1},
    )  # fmt: skip
    plain = train(parse_recipe(tree), tmp_path / "plain").path
    sharded = tmp_path / "sharded"
    assert run_ranks(tmp_path, [{"folder": str(sharded), "recipe": tree}], 1) == 0
    rounding = 0.1 if student == "autocast" else 2e-3
    for ours, expected in zip(rows(sharded), rows(plain), strict=True):
        for name in ("loss", "kl", "grad_norm"):
            assert ours[name] == pytest.approx(expected[name], rel=rounding), name
    if student == "autocast":  # the second step's samples are of weights that rounding changes
        return
    checkpoints = [latest(folder / "checkpoints") for folder in (sharded, plain)]
    ours, expected = (load(path).tensors["optimizer"] for path in checkpoints if path is not None)
    moments = [name for name in expected if name.endswith("exp_avg")]
    assert moments and ours.keys() == expected.keys()
    for name in moments:
        assert relative_error(ours[name], expected[name]) < 2e-2, name
