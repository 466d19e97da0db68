"""[train], [evaluate], [run]: the optimizer, the measuring, the folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from courtside.recipe.base import Fraction, Section, Setting


class TrainConfig(Section):
    steps: PositiveInt = 50
    prompts_per_step: PositiveInt = 16
    """Per step."""
    learning_rate: PositiveFloat | None = None
    """Unset: 1e-4 with LoRA, 1e-5 without."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine go down to zero at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    max_grad_norm: PositiveFloat = 1.0
    optimizer_offload: bool = False
    """Hold AdamW's two moments in pinned host memory and stream them through the GPU in each step:
    less GPU memory (twice the size of the trained weights), the same values."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens in one forward and backward pass; they do not change the update. Unset: 512 on a CPU,
    or up to three times a prompt where samples share it; 16384 on a GPU, which waits for its host
    with fewer."""
    logits_chunk_tokens: PositiveInt | None = None
    """Positions whose logits exist at once. Unset: chosen for the vocabulary and device."""


class EvaluateConfig(Section):
    num_tasks: PositiveInt = 64
    """Held-out prompts of each evaluation."""
    every: NonNegativeInt = 0
    """Steps between evaluations on validation tasks; 0: only before and after."""
    samples_per_task: PositiveInt = 1
    temperature: NonNegativeFloat = 1.0
    """0: greedy."""
    max_new_tokens: PositiveInt | None = None
    """Unset: as in rollout."""
    teacher: bool = True
    """Before training, also measure the teacher with its context: the gate."""
    suites: Mapping[str, Mapping[str, Setting]] = Field(default_factory=dict)
    """Further test tasks, measured before and after: a name and what is different in [tasks], e.g.
    `held_out = { names = "held_out" }`."""
    forward_kl: bool = False
    """Also let the teacher answer each time, and measure KL(teacher ‖ student) on its text."""


class RunConfig(Section):
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    trajectories_every: PositiveInt = 1
    """Steps between stored batches of trajectories."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "courtside"
    """Name of the project in W&B and trackio."""
