"""The GPU benchmark's step as TRL's DistillationTrainer does it.

Before its steps the trainer is tuned: Liger's kernels or not, gradient checkpointing or not, and
how many sequences a pass takes; the fastest is measured, of nearly equal ones the smallest.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_peaks import free_memory, wait_for_go
from opd_step_job import Job, checked_tensors, read_job, read_lines
from transformers import TrainerCallback
from transformers.integrations.liger import apply_liger_kernel
from transformers.models.qwen3 import modeling_qwen3
from trl_gpu_trainer import GpuTrainer, Setting, build
from trl_side import loss_and_gradients, padded
from workload import (
    SEED,
    CheckResult,
    SideResult,
    StepResult,
    StepTimer,
    peak_rss,
    prompts_hash,
    write_json,
)

try:
    from triton.errors import TritonError
except ImportError:  # on a CPU there may be no Triton, and then no kernel of it
    TRITON_ERRORS: tuple[type[Exception], ...] = ()
else:
    TRITON_ERRORS = (TritonError,)

AS_FAST = 1.03
"""Settings within this factor of the fastest are as fast; of them the smallest is taken."""
TUNING_TOKENS = 24
"""New tokens of the samples that compare settings."""
BROKEN = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError,
          ValueError, *TRITON_ERRORS)  # fmt: skip
"""Errors of a setting that does not work on this machine. Out of memory is one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    setting: Setting
    update_seconds: float
    """A whole step's, without its rollout and without the optimizer."""
    sample_seconds: float
    """Of a few tokens of every row."""
    step_seconds: float
    """What a step would take by these."""
    gpu_peak: int


class GpuRecorder(TrainerCallback):
    """One record a step; the first step is short, after it samples have full length."""

    def __init__(self, job: Job, trainer: Callable[[], GpuTrainer]):
        self.job, self.trainer = job, trainer
        self.steps: list[StepResult] = []
        self.timer = StepTimer()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer().peaks.begin()
        self.timer.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer()
        trainer.peaks.close("update")
        times = self.timer.lap()
        phases = trainer.clock.take()
        phases["teacher"] = phases.get("teacher", 0.0) + trainer.take_teacher_seconds()
        phases["update"] = times["seconds"] - phases["rollout"] - phases["teacher"]
        self.steps.append(
            StepResult(
                **times,
                phases=phases,
                loss=trainer.step_loss,
                num_trained_tokens=trainer.step_tokens,
                peak_rss=peak_rss(),
                gpu_peaks=trainer.peaks.take(),
                num_device_allocs=trainer.peaks.take_allocs(),
            )
        )
        trainer.step_loss, trainer.step_tokens = 0.0, 0
        trainer.fix_completion_length(self.job.new_tokens)
        # Measuring memory is no part of the next step.
        self.timer.start()


# ── which settings ───────────────────────────────────────────────────────────────────────────────


def tune(
    args: argparse.Namespace, job: Job
) -> tuple[list[Trial], list[dict[str, Any]], CheckResult]:
    """The trials, settings that failed and why, and loss and gradients of the fixed batch."""
    trials: list[Trial] = []
    broken: list[dict[str, Any]] = []
    check: CheckResult | None = None
    for liger in {"off": [False], "on": [True], "both": [False, True]}[args.liger]:
        first = Setting(liger=liger, checkpointing=False, micro_batch=min(args.micro_batches))
        with _untouched_modules():
            try:
                result = _tune_one(args, job, first, trials, broken)
                check = check or result
            except BROKEN as error:
                broken.append({"setting": asdict(first), "why": _first_line(error)})
        free_memory(job.device)
    if not trials or check is None:
        raise SystemExit(f"TRL: no setting works here: {broken}")
    return trials, broken, check


def _tune_one(
    args: argparse.Namespace,
    job: Job,
    first: Setting,
    trials: list[Trial],
    broken: list[dict[str, Any]],
) -> CheckResult:
    """With Liger's kernels or without them, by `first`; adds to `trials` and `broken`."""
    trainer = build(args, job, first)
    if first.liger:
        apply_liger_kernel(trainer.model, None)
    # What `train` does first; `generate` runs under autocast from here on.
    model = trainer.accelerator.prepare_model(trainer.model)
    trainer.model_wrapped = model
    check = _check(trainer, model, args)
    sampling = _sample_seconds(trainer, job)
    for setting in _settings(args, first.liger):
        try:
            trials.append(_try(trainer, model, job, setting, sampling))
        except BROKEN as error:
            broken.append({"setting": asdict(setting), "why": _first_line(error)})
        model.zero_grad(set_to_none=True)
        free_memory(job.device)
    trainer.accelerator.free_memory()
    return check


def _settings(args: argparse.Namespace, liger: bool) -> Iterator[Setting]:
    for size in sorted(args.micro_batches):
        yield Setting(liger=liger, checkpointing=False, micro_batch=size)
    middle = sorted(args.micro_batches)[len(args.micro_batches) // 2]
    yield Setting(liger=liger, checkpointing=True, micro_batch=middle)


def _check(trainer: GpuTrainer, model: Any, args: argparse.Namespace) -> CheckResult:
    shape, _ = read_job(args.job)
    model.train()
    prompts = [[{"role": "user", "content": r["text"]}] for r in read_lines(_batch(args))]
    ids, _, _ = trainer._tokenize_prompts(prompts)
    rows = [
        {"prompt": list(prompt), "completion": row["completion"]}
        for prompt, row in zip(ids, read_lines(_batch(args)), strict=True)
    ]
    inputs = padded(rows, pad_id=trainer.processing_class.pad_token_id)
    inputs = {name: tensor.to(trainer.accelerator.device) for name, tensor in inputs.items()}
    result = loss_and_gradients(trainer, model, inputs, checked_tensors(shape))
    model.zero_grad(set_to_none=True)
    return result


def _batch(args: argparse.Namespace) -> Path:
    return Path(args.job) / "batch.jsonl"


def _sample_seconds(trainer: GpuTrainer, job: Job) -> float:
    prompts = list(trainer.train_dataset["prompt"])
    ids, _, _ = trainer._tokenize_prompts(prompts)
    seconds = 0.0
    for num_tokens in (4, TUNING_TOKENS):  # the first is not counted
        trainer.fix_completion_length(num_tokens)
        trainer.peaks.fence()
        began = time.perf_counter()
        trainer._generate_single_turn(ids, None, {})
        trainer.peaks.fence()
        seconds = time.perf_counter() - began
    return seconds


def _try(
    trainer: GpuTrainer, model: Any, job: Job, setting: Setting, sample_seconds: float
) -> Trial:
    """One pass forward and backward that counts, after one on two sequences that does not."""
    if setting.checkpointing:
        model.gradient_checkpointing_enable()
    else:
        model.gradient_checkpointing_disable()
    model.train()
    generator = torch.Generator().manual_seed(SEED)
    seconds = 0.0
    for size in (min(2, setting.micro_batch), setting.micro_batch):
        shape = (size, job.prompt_tokens + job.new_tokens)
        ids_BL = torch.randint(8, job.vocab_size, shape, generator=generator).to(model.device)
        prompt_BN, completion_BT = ids_BL.split([job.prompt_tokens, job.new_tokens], dim=1)
        inputs = {
            "prompt_ids": prompt_BN,
            "prompt_mask": torch.ones_like(prompt_BN),
            "completion_ids": completion_BT,
            "completion_mask": torch.ones_like(completion_BT),
            "num_items_in_batch": torch.tensor(job.tokens_per_step, device=model.device),
        }
        trainer.peaks.begin()
        began = time.perf_counter()
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs)
        trainer.accelerator.backward(loss)
        trainer.peaks.close("update")
        seconds = time.perf_counter() - began
    trainer.step_loss, trainer.step_tokens = 0.0, 0
    update = seconds * job.rows / setting.micro_batch
    return Trial(
        setting=setting,
        update_seconds=update,
        sample_seconds=sample_seconds,
        step_seconds=update + sample_seconds * job.new_tokens / TUNING_TOKENS,
        gpu_peak=trainer.peaks.take().get("update", 0),
    )


def best_of(trials: Sequence[Trial]) -> Setting:
    """The fastest; among those about as fast, the one that needs the least memory."""
    fastest = min(trial.step_seconds for trial in trials)
    as_fast = [trial for trial in trials if trial.step_seconds <= AS_FAST * fastest]
    return min(as_fast, key=lambda trial: (trial.gpu_peak, trial.step_seconds)).setting


@contextmanager
def _untouched_modules() -> Iterator[None]:
    """Liger also replaces functions and classes of the model's module: put them back."""
    before = dict(vars(modeling_qwen3))
    try:
        yield
    finally:
        vars(modeling_qwen3).update(before)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


# ── the step ─────────────────────────────────────────────────────────────────────────────────────


def measure(args: argparse.Namespace) -> SideResult:
    shape, job = read_job(args.job)
    trials, broken, check = tune(args, job)
    setting = best_of(trials)
    held = torch.cuda.memory_allocated() if job.device == "cuda" else 0
    trainer: GpuTrainer
    recorder = GpuRecorder(job, lambda: trainer)
    trainer = build(args, job, setting, [recorder], use_vllm=args.use_vllm)
    trainer.fix_completion_length(min(args.warmup_tokens, job.new_tokens))
    trainer.train()
    trainable = [p for p in trainer.model.parameters() if p.requires_grad]
    return SideResult(
        side="trl_vllm" if args.use_vllm else "trl",
        config=shape,
        num_warmup=1,
        steps=tuple(recorder.steps),
        num_prompt_tokens=sum(map(len, trainer.prompt_ids)),
        prompts_hash=prompts_hash(trainer.prompt_ids),
        num_trainable=sum(p.numel() for p in trainable),
        load_peak_rss=0,
        num_threads=torch.get_num_threads(),
        versions=_versions(),
        settings={
            **asdict(setting),
            "autocast_loss": trainer.autocast_loss,
            "warmup_tokens": args.warmup_tokens,
            "samples_by": "vLLM, colocated" if args.use_vllm else "generate",
            "optim": str(trainer.args.optim.value),
            "trainable_dtypes": sorted({str(p.dtype) for p in trainable}),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
            "held_after_tuning": held,
            "trials": [asdict(trial) for trial in trials],
            "did_not_work": broken,
        },
        check=replace(check, side="trl_vllm" if args.use_vllm else "trl"),
    )


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("trl", "torch", "transformers", "accelerate", "datasets", "liger-kernel", "vllm"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not here"
    return versions


def main(*, use_vllm: bool = False) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, required=True, help="folder that describes the job")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=1, help="steps that are counted")
    parser.add_argument("--micro-batches", type=int, nargs="+", required=True)
    parser.add_argument("--liger", choices=("both", "on", "off"), default="both")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--as-is", action="store_true", help="do not put the loss under autocast")
    parser.add_argument("--warmup-tokens", type=int, default=32)
    args = parser.parse_args()
    args.use_vllm = use_vllm
    wait_for_go()
    write_json(args.out, measure(args))


if __name__ == "__main__":
    main()
