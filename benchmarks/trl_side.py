"""The benchmark's step as TRL's DistillationTrainer does it (see `workload` for the contract).

Settings differ from TRL's defaults only where the job says so: matmuls in float32, or in bfloat16
under autocast, over float32 weights in both; and no gradient checkpointing, which makes TRL faster.
Timing wraps methods of the trainer and changes none of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer
from workload import (
    BETAS,
    CHECKED_TENSORS,
    CLIP_NORM,
    LEARNING_RATE,
    LORA_ALPHA_PER_RANK,
    LORA_RANK,
    NEW_TOKENS,
    PROMPTS,
    SEED,
    TEMPERATURE,
    CheckResult,
    PhaseClock,
    SideResult,
    StepResult,
    StepTimer,
    peak_rss,
    prompts_hash,
    side_parser,
    write_json,
)

SHARED_OPTIONS: dict[str, Any] = {
    "beta": 1.0,  # reverse KL
    "temperature": TEMPERATURE,
    "shuffle_dataset": False,
    "lr_scheduler_type": "constant",
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "weight_decay": 0.0,
    "max_grad_norm": CLIP_NORM,
    "seed": SEED,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Of TRL's configuration, on a CPU and on a GPU."""


class TimedTrainer(DistillationTrainer):
    """Records the phases of a step and what was trained in it."""

    autocast_loss = False
    """Whether the loss is put under autocast; `trl_gpu_trainer` says why."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock = PhaseClock()
        self.step_loss = 0.0
        self.step_tokens = 0
        self.prompt_ids: list[list[int]] = []
        self.completion_ids: list[list[int]] = []
        super().__init__(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self.clock("rollout"):
            return super()._prepare_inputs(generation_batch)

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        self.prompt_ids, self.completion_ids = generated[:2]
        return generated

    def _get_last_hidden_state(self, unwrapped_model: Any, *args: Any, **kwargs: Any) -> Any:
        is_teacher = unwrapped_model is self.accelerator.unwrap_model(self.teacher_model)
        with self.clock("teacher" if is_teacher else "update"):
            return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)

    def compute_loss_context_manager(self) -> ExitStack:
        stack = super().compute_loss_context_manager()
        if self.autocast_loss:
            stack.enter_context(self.accelerator.autocast())
        return stack

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.step_loss += float(loss.detach())
        self.step_tokens += int(inputs["completion_mask"].sum())
        return loss


class StepRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.trainer: TimedTrainer | None = None
        self.load_peak_rss = 0
        self.timer = StepTimer()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.load_peak_rss = peak_rss()
        self.timer.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        times = self.timer.lap()
        phases = self.trainer.clock.take()
        phases["update"] = times["seconds"] - phases["rollout"] - phases["teacher"]
        self.steps.append(
            StepResult(
                **times,
                phases=phases,
                loss=self.trainer.step_loss,
                num_trained_tokens=self.trainer.step_tokens,
                peak_rss=peak_rss(),
            )
        )
        self.trainer.step_loss, self.trainer.step_tokens = 0.0, 0


def build(args: Any, recorder: StepRecorder) -> TimedTrainer:
    rank = LORA_RANK[args.config]
    config = DistillationConfig(
        output_dir=str(args.out.parent / "trl-output"),
        max_completion_length=NEW_TOKENS,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=len(PROMPTS) // args.micro_batch,
        max_steps=args.warmup + args.repeats,
        learning_rate=LEARNING_RATE[args.config],
        bf16=args.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=True,
        **SHARED_OPTIONS,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.student, padding_side="left")
    prompts = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.student, dtype=torch.float32),
        # As small as courtside's; by itself TRL would load it in float32.
        teacher_model=AutoModelForCausalLM.from_pretrained(
            args.teacher, dtype=getattr(torch, args.dtype)
        ),
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[recorder],
        peft_config=LoraConfig(
            r=rank,
            lora_alpha=LORA_ALPHA_PER_RANK * rank,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        if rank is not None
        else None,
    )
    trainer.autocast_loss = args.dtype == "bfloat16"
    recorder.trainer = trainer
    return trainer


def measure(args: Any) -> None:
    recorder = StepRecorder()
    trainer = build(args, recorder)
    trainer.train()
    trainable = [p for p in trainer.model.parameters() if p.requires_grad]
    write_json(
        args.out,
        SideResult(
            side="trl",
            config=args.config,
            dtype=args.dtype,
            num_warmup=args.warmup,
            steps=tuple(recorder.steps),
            num_prompt_tokens=sum(map(len, trainer.prompt_ids)),
            prompts_hash=prompts_hash(trainer.prompt_ids),
            num_trainable=sum(p.numel() for p in trainable),
            load_peak_rss=recorder.load_peak_rss,
            num_threads=torch.get_num_threads(),
            versions={name: version(name) for name in ("trl", "torch", "transformers", "peft")},
            settings={
                "optimizer": type(trainer.optimizer.optimizer).__name__,
                "optim": str(trainer.args.optim.value),
                "micro_batch": args.micro_batch,
                "trainable_dtypes": sorted({str(p.dtype) for p in trainable}),
            },
        ),
    )


def check(args: Any) -> None:
    """Loss and gradient of one batch; samples the batch first where the file is missing."""
    trainer = build(args, StepRecorder())
    model = trainer.model.train()
    if not args.check.is_file():
        trainer._generate(list(trainer.train_dataset["prompt"]))
        pairs = zip(trainer.prompt_ids, trainer.completion_ids, strict=True)
        sampled = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
        args.check.write_text(json.dumps(sampled))
    batch = json.loads(args.check.read_text())
    inputs = padded(batch, pad_id=trainer.processing_class.pad_token_id)
    result = loss_and_gradients(trainer, model, inputs, CHECKED_TENSORS)
    reference = reference_loss(model, trainer.teacher_model, batch)
    write_json(args.out, replace(result, reference_loss=reference))


def loss_and_gradients(
    trainer: DistillationTrainer, model: Any, inputs: dict[str, torch.Tensor], names: Sequence[str]
) -> CheckResult:
    """By the trainer's own loss; the gradients stay in place."""
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(model, inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return CheckResult(
        side="trl",
        loss=float(loss.detach()),
        num_tokens=int(inputs["num_items_in_batch"]),
        gradient_norm=float(torch.stack([g.norm() for g in gradients.values()]).norm()),
        gradient_norms={name: float(gradients[name].norm()) for name in names},
    )


def padded(batch: list[dict[str, list[int]]], *, pad_id: int) -> dict[str, torch.Tensor]:
    """The tensors that the trainer itself makes of a generated batch."""
    longest = max(len(row["prompt"]) for row in batch)
    gaps = [longest - len(row["prompt"]) for row in batch]
    rows = list(zip(gaps, batch, strict=True))
    completion_BT = torch.tensor([row["completion"] for row in batch])
    return {
        "prompt_ids": torch.tensor([[pad_id] * gap + row["prompt"] for gap, row in rows]),
        "prompt_mask": torch.tensor([[0] * gap + [1] * (longest - gap) for gap, _ in rows]),
        "completion_ids": completion_BT,
        "completion_mask": torch.ones_like(completion_BT),
        "num_items_in_batch": torch.tensor(completion_BT.numel()),
    }


@torch.no_grad()
def reference_loss(student: Any, teacher: Any, batch: list[dict[str, list[int]]]) -> float:
    """Mean KL(student || teacher) over the completion tokens: whole logits, one row at a time."""
    total, num_tokens = 0.0, 0
    for row in batch:
        ids_1L = torch.tensor([row["prompt"] + row["completion"]])
        positions = slice(len(row["prompt"]) - 1, ids_1L.shape[1] - 1)
        student_TV, teacher_TV = (
            model(input_ids=ids_1L).logits[0, positions].double().log_softmax(-1)
            for model in (student, teacher)
        )
        total += float((student_TV.exp() * (student_TV - teacher_TV)).sum())
        num_tokens += student_TV.shape[0]
    return total / num_tokens


def main() -> None:
    parser = side_parser("One distillation step, by TRL.")
    parser.add_argument(
        "--micro-batch", type=int, default=len(PROMPTS), help="sequences in one forward pass"
    )
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    if args.check is not None:
        check(args)
    else:
        measure(args)


if __name__ == "__main__":
    main()
