"""FLOPs against published ones: Thinking Machines, "On-Policy Distillation", October 2025.

A student of Qwen3-8B and a teacher of Qwen3-32B. On-policy: about 150 steps, 77 thousand prompts, 4
samples each: 512 prompts a step. The cookbook samples up to 4,096 tokens. Off-policy: 400 thousand
prompts; the cookbook cuts examples at 16,384 tokens. The authors' own lengths are not known here.
"""

from __future__ import annotations

from typing import Any

import pytest

from courtside.planning.estimate import Estimate, estimate
from courtside.planning.gpus import GPUS
from courtside.planning.presets import PRESETS
from courtside.planning.workload import Lengths, Workload, plan_models
from courtside.recipe.load import parse_recipe

STUDENT, TEACHER = PRESETS["qwen3-8b"], PRESETS["qwen3-32b"]
PROMPT_TOKENS = 100
"""Of a problem of DeepMath: an assumption, of little weight."""
NUM_EXAMPLES = 400_000


def run(tree: dict[str, Any], lengths: Lengths) -> Estimate:
    base = {"student": {"model": "student"}, "tasks": {"kind": "arithmetic"}}
    recipe = parse_recipe(base | tree)
    models = plan_models(recipe, STUDENT, {"teacher": TEACHER}, GPUS["h200"])
    return estimate(Workload(recipe=recipe, models=models, lengths=lengths, device=GPUS["h200"]))


def counted(result: Estimate) -> dict[str, float]:
    return {phase.name: result.steps * phase.flops.counted for phase in result.phases}


def on_policy() -> dict[str, float]:
    tree = {
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 4096},
        "teacher": {"kind": "model", "model": "teacher"},
        "losses": [{"kind": "policy_gradient", "advantage": "teacher_gap"}],
        "train": {"steps": 150, "prompts_per_step": 512},
    }
    return counted(run(tree, Lengths(prompt=PROMPT_TOKENS, new=4096)))


def test_on_policy_distillation() -> None:
    flops = on_policy()
    assert flops["teacher"] == pytest.approx(8.4e19, rel=0.02)
    # Sampling and training together; a LoRA's saved weight gradients would make it 6.2e19.
    assert flops["rollout"] + flops["update"] == pytest.approx(8.2e19, rel=0.03)


def fine_tuning(num_tokens: float) -> Estimate:
    tree = {
        "rollout": {"samples_per_prompt": 1, "student_fraction": 0.0},
        "losses": [{"kind": "cross_entropy"}],
        "train": {"steps": 1, "prompts_per_step": NUM_EXAMPLES},
    }
    return run(tree, Lengths(prompt=PROMPT_TOKENS, new=num_tokens - PROMPT_TOKENS))


def test_supervised_fine_tuning_of_the_student() -> None:
    """3.8e20 is between what weights alone and weights with attention give at 16,384 tokens."""
    result = fine_tuning(16_384)
    update = next(phase.flops for phase in result.phases if phase.name == "update")
    assert update.counted == pytest.approx(3.8e20, rel=0.16)  # 15% below
    assert update.executed == pytest.approx(3.8e20, rel=0.08)  # 7% above
    assert update.counted < 3.8e20 < update.executed
    # Weights alone would need examples of 19,300 tokens.
    assert counted(fine_tuning(19_300))["update"] == pytest.approx(3.8e20, rel=0.01)


def teacher_sampling(num_tokens: float) -> float:
    """2 · parameters · tokens, as a run counts it."""
    tree = {
        "rollout": {
            "samples_per_prompt": 1, "max_new_tokens": 128, "student_fraction": 0.0,
            "off_policy_source": "teacher",
        },
        "teacher": {"kind": "model", "model": "teacher"},
        "losses": [{"kind": "cross_entropy", "on": "teacher"}],
        "train": {"steps": 1, "prompts_per_step": NUM_EXAMPLES},
    }  # fmt: skip
    result = run(tree, Lengths(prompt=PROMPT_TOKENS, new=num_tokens - PROMPT_TOKENS))
    return counted(result)["rollout"]


def test_sampling_of_the_teachers_examples() -> None:
    """8.5e20 is what 32,768 tokens an example give; at the student's 16,384 it is half."""
    assert teacher_sampling(32_768) == pytest.approx(8.5e20, rel=0.015)
    assert teacher_sampling(16_384) == pytest.approx(8.5e20 / 2, rel=0.015)
