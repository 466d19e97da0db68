"""[student]: the model to train."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from courtside.recipe.base import Fraction, Section, Setting


class LoraConfig(Section):
    rank: PositiveInt = 32
    alpha: PositiveFloat | None = None
    """Scale is alpha / rank. Unset: alpha = 2 · rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get an adapter. `all-linear`: all but the output head, which
    may be named (`lm_head`), without dropout then. A head that is the input embedding too stays
    that: the adapter acts on the logits alone, and an export with it merged has two weights."""
    base_dtype: Literal["auto", "nf4"] = "auto"
    """Of the frozen base. auto: as `student.dtype`. nf4: linear layers but the output head in 4
    bits by bitsandbytes, as in QLoRA (`pip install -e '.[quantized]'`); the adapter is float32."""

    @property
    def in_4_bits(self) -> bool:
        return self.base_dtype == "nf4"


class AverageConfig(Section):
    """Another model whose weights are averaged with the student's before training."""

    model: str
    """As `student.model`, of the same architecture and size."""
    weight: Fraction = 0.5
    """Its share; 0: the student's alone."""


class StudentConfig(Section):
    model: str
    """`smollm2-135m` (embedded), a hub id, or a folder with safetensors."""
    adapter: Path | None = None
    """A LoRA adapter's folder, or that of a built-in recipe (`targeted-hints/warm`). It is
    merged into `model` before training."""
    average_with: AverageConfig | None = None
    """Start from (1 − weight) · `model` + weight · the other, tensor by tensor in float32: say,
    between a fine-tuned model and its base."""
    lora: LoraConfig | None = None
    """Unset: all weights are trained."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the matmuls. auto: bfloat16 on a GPU and on a CPU that has instructions for it
    (avx512_bf16, amx_bf16, ARM's bf16), float32 on others. Trained weights, the optimizer and every
    log-softmax are float32 either way, and on a CPU so is attention."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    keep_layers: tuple[NonNegativeInt, ...] | None = None
    """Prune: keep only these decoder layers of the model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time, the same
    result."""
    router_replay: bool = False
    """For a mixture of experts: the update's forward passes select the experts that the sampler
    selected for the same tokens, with weights from the current routers, which get their gradient.
    Off, rounding sends some tokens to other experts (`sampler/routing_diff`). See
    docs/supported-models.md."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of Switch Transformers over the student's routers; 0:
    it is no part of the update, whatever the model's config says. See docs/algorithm.md."""
    context_length: PositiveInt | None = None
    """Tokens of the longest sequence. Unset: as many as the model has positions; where its RoPE
    factors depend on the length (longrope, dynamic NTK), the length that it was first trained with.
    More gives all sequences the factors of that length, as vLLM's `--max-model-len` does."""
    chat_template_args: Mapping[str, Setting] = Field(default_factory=dict)
    """Switches of the model's chat template, such as `{ enable_thinking = false }` or
    `{ reasoning_effort = "low" }`, for every prompt of training and evaluation. A name that the
    template does not read is refused. See docs/chat-templates.md."""
    chat_template_date: str | None = None
    """The date, as in `2026-11-18`, that chat templates write which name today's. Unset: that of
    the day on which the process begins, so a run resumed later has other prompts."""
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _check_base(self) -> StudentConfig:
        if self.lora is None or self.lora.base_dtype == "auto":
            return self
        for name in ("adapter", "average_with"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"lora.base_dtype = 'nf4' quantizes while the model loads, before {name!r} "
                    "could be merged. Make a merged model first (`courtside export`) and name its "
                    "folder in `model`"
                )
        return self

    @field_validator("chat_template_date")
    @classmethod
    def _check_date(cls, value: str | None) -> str | None:
        if value is not None:
            date.fromisoformat(value)
        return value
