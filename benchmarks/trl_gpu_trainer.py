"""TRL's DistillationTrainer for the GPU benchmark's job: timed, its samples of one length.

`bf16=True` is meant to be autocast over float32 weights, and sampling does run under it. The loss
does not in a process of its own: the trainer puts the model's forward method, which accelerate
wrapped in autocast, aside before it calls the layers. So the loss is put under autocast here,
so that TRL's matmuls run in bfloat16 as well; `--as-is` leaves them in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from gpu_peaks import Peaks
from opd_step_job import NO_END, Job, load_random_model, read_lines
from transformers import AutoTokenizer
from trl import DistillationConfig
from trl_side import SHARED_OPTIONS, TimedTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    liger: bool
    checkpointing: bool
    micro_batch: int
    """Sequences in one forward and backward pass."""


class GpuTrainer(TimedTrainer):
    """Notes the teacher's time by events, which wait for nothing, and the phases' memory."""

    def __init__(self, *args: Any, autocast_loss: bool, peaks: Peaks, **kwargs: Any) -> None:
        self.autocast_loss = autocast_loss
        self.peaks = peaks
        self.teacher_spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        super().__init__(*args, **kwargs)

    def fix_completion_length(self, num_tokens: int) -> None:
        """Every completion has exactly so many."""
        self.eos_token_ids = [NO_END]
        if self.use_vllm:
            self.vllm_generation.max_completion_length = num_tokens
            self.vllm_generation.generation_kwargs = {
                "ignore_eos": True, "min_tokens": num_tokens, "detokenize": False,
            }  # fmt: skip
        for options in (self.generation_kwargs, self.generation_config.__dict__):
            options["eos_token_id"] = [NO_END]
            options["max_new_tokens"] = num_tokens

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        fresh = self._step % self.args.gradient_accumulation_steps == 0
        inputs = super()._prepare_inputs(generation_batch)
        if fresh:
            self.peaks.close("rollout")
        return inputs

    def _get_last_hidden_state(self, unwrapped_model: Any, *args: Any, **kwargs: Any) -> Any:
        is_teacher = unwrapped_model is self.accelerator.unwrap_model(self.teacher_model)
        if not (is_teacher and self.peaks.on_gpu):
            return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        # Not the parent's: its clock does not wait for the GPU.
        hidden = super(TimedTrainer, self)._get_last_hidden_state(unwrapped_model, *args, **kwargs)
        last.record()
        self.teacher_spans.append((first, last))
        return hidden

    def take_teacher_seconds(self) -> float:
        """After a fence."""
        spans, self.teacher_spans = self.teacher_spans, []
        return sum(first.elapsed_time(last) for first, last in spans) / 1000


def build(
    args: argparse.Namespace,
    job: Job,
    setting: Setting,
    callbacks: Sequence[Any] = (),
    *,
    use_vllm: bool = False,
) -> GpuTrainer:
    """`use_vllm`: TRL's colocated mode with its default share of the GPU's memory."""
    on_gpu = job.device == "cuda"
    if use_vllm:
        start_vllm_without_weights()
    config = DistillationConfig(
        output_dir=str(args.out.parent / "trl-output"),
        max_completion_length=job.new_tokens,
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=job.rows // setting.micro_batch,
        max_steps=1 + args.steps,
        learning_rate=job.learning_rate,
        bf16=job.dtype == "bfloat16",
        use_liger_kernel=setting.liger,
        gradient_checkpointing=setting.checkpointing,
        use_cpu=not on_gpu,
        use_vllm=use_vllm,
        vllm_max_model_length=job.prompt_tokens + job.new_tokens,
        **SHARED_OPTIONS,
    )
    texts = [row["prompt"] for row in read_lines(args.job / "prompts.jsonl")]
    prompts = [[{"role": "user", "content": text}] for text in texts for _ in range(job.samples)]
    return GpuTrainer(
        model=make_model(args, job, "student"),
        # As small as courtside's teacher; by itself TRL would load it in float32.
        teacher_model=make_model(args, job, "teacher"),
        args=config,
        train_dataset=as_dataset(prompts),
        processing_class=AutoTokenizer.from_pretrained(args.job / "student", padding_side="left"),
        callbacks=list(callbacks),
        autocast_loss=job.dtype == "bfloat16" and not args.as_is,
        peaks=Peaks(job.device),
    )


def start_vllm_without_weights() -> None:
    """The folder has no weights: TRL copies the student's into vLLM before the first rollout."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(vllm_generation.LLM, load_format="dummy", dtype="bfloat16")


def as_dataset(prompts: Sequence[Any]) -> Dataset:
    # With a name of its own: to make one up, all of pyarrow's state would be pickled.
    table = InMemoryTable(pyarrow.table({"prompt": list(prompts)}))
    return Dataset(table, fingerprint="opd-step-prompts")


def make_model(args: argparse.Namespace, job: Job, role: str) -> Any:
    narrow = job.dtype == "bfloat16" and (role == "teacher" or args.weights == "bfloat16")
    dtype = torch.bfloat16 if narrow else torch.float32
    return load_random_model(str(args.job / role), dtype=dtype, device=job.device)
