"""[train]: steps, batch size and the optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from courtside.recipe.base import Fraction, Section


class TrainConfig(Section):
    steps: PositiveInt = 50
    """Fewer where a budget (`max_…`) is spent before."""
    max_student_tokens: PositiveInt | None = None
    """The run ends with the step that reaches this many tokens through the student: what it
    sampled, with prompts, and what it trained on. Evaluations are not part of a budget."""
    max_teacher_tokens: PositiveInt | None = None
    """The same of tokens through teachers and the reference: what they wrote and scored."""
    max_flops: PositiveFloat | None = None
    """The same of estimated FLOPs of rollout, reader, teacher and update."""
    max_seconds: PositiveFloat | None = None
    """The same of seconds of rollout, reader, teacher and update."""
    prompts_per_step: PositiveInt = 16
    """Per step."""
    learning_rate: PositiveFloat | None = None
    """Unset: 1e-4 with LoRA, 1e-5 without."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine decay to zero at the last step."""
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
    or up to three times a prompt that samples share; 16384 on a GPU."""
    logits_chunk_tokens: PositiveInt | None = None
    """Positions whose logits are computed at once. Unset: chosen for the vocabulary and device."""

    @property
    def budget(self) -> dict[str, float]:
        """The limits that are set, by unit."""
        limits = {
            "student_tokens": self.max_student_tokens,
            "teacher_tokens": self.max_teacher_tokens,
            "flops": self.max_flops,
            "seconds": self.max_seconds,
        }
        return {unit: float(limit) for unit, limit in limits.items() if limit is not None}
