"""What to change where a plan does not fit, each with the memory and time that it would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from courtside.planning.estimate import Estimate, estimate
from courtside.planning.memory import num_cache_rows, row_tokens, target_bytes
from courtside.planning.workload import Workload, plan_models
from courtside.recipe import Recipe
from courtside.recipe.student import LoraConfig
from courtside.recipe.teacher import ModelTeacherConfig, RoutedTeacherConfig

MIN_MICRO_BATCH = 1024
LORA_RANK = 32
MAX_SHARDS = 64
MIN_TARGET_BYTES = 4 * 2**30
"""Of targets: from here on fewer prompts a step are proposed."""

Estimator = Callable[[Workload], Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting, or several together."""

    setting: str
    """As on the command line: `student.gradient_checkpointing=true`, or `--gpus 4`."""
    peak_bytes: float
    """Of one GPU, after it."""
    peak_phase: str
    step_seconds: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    setting: str
    work: Workload


def propose_changes(work: Workload, run: Estimator = estimate) -> tuple[Change, ...]:
    """Nothing where the plan fits. Each change alone; then, where no setting is enough by itself,
    the first few together that are."""
    if run(work).fits(work.device):
        return ()
    settings = [_measure(variant, run) for step in SETTINGS for variant in step(work)]
    more_gpus = [_measure(variant, run) for variant in _add_gpus(work)]
    together = None if any(c.fits for c in settings) else _combine(work, run)
    return (*settings, *filter(None, [together]), *more_gpus)


def _measure(variant: _Variant, run: Estimator) -> Change:
    result = run(variant.work)
    return Change(
        setting=variant.setting,
        peak_bytes=result.peak.total,
        peak_phase=result.peak.phase,
        step_seconds=result.step_seconds,
        fits=result.fits(variant.work.device),
    )


def _combine(work: Workload, run: Estimator) -> Change | None:
    """Adds changes in order, those that lower the peak."""
    settings: list[str] = []
    for step in SETTINGS:
        variants = list(step(work))
        if not variants:
            continue
        variant = min(variants, key=lambda v: run(v.work).peak.total)
        if run(variant.work).peak.total >= run(work).peak.total:
            continue
        settings.append(variant.setting)
        work = variant.work
        if run(work).fits(work.device):
            return _measure(_Variant(setting=" ".join(settings), work=work), run)
    return None


def _with(work: Workload, section: str, **changes: Any) -> Workload:
    """The workload with fields of a section of its recipe replaced."""
    config = getattr(work.recipe, section).model_copy(update=changes)
    return _with_recipe(work, work.recipe.model_copy(update={section: config}))


def _with_recipe(work: Workload, recipe: Recipe) -> Workload:
    shapes = {teacher.model: teacher.shape for teacher in work.models.teachers}
    models = plan_models(recipe, work.models.student, shapes, work.device)
    return replace(work, recipe=recipe, models=models)


def _shrink_micro_batch(work: Workload) -> Iterator[_Variant]:
    """The largest micro-batch that fits, or the smallest that makes sense."""
    tokens = work.micro_batch_tokens
    variant = None
    while tokens // 2 >= max(MIN_MICRO_BATCH, work.lengths.sequence):
        tokens //= 2
        smaller = _with(work, "train", micro_batch_tokens=tokens)
        variant = _Variant(setting=f"train.micro_batch_tokens={tokens}", work=smaller)
        if estimate(smaller).fits(work.device):
            break
    if variant is not None:
        yield variant


def _checkpoint(work: Workload) -> Iterator[_Variant]:
    if not work.recipe.student.gradient_checkpointing:
        changed = _with(work, "student", gradient_checkpointing=True)
        yield _Variant(setting="student.gradient_checkpointing=true", work=changed)


def _offload(work: Workload) -> Iterator[_Variant]:
    if not work.recipe.train.optimizer_offload and work.device.is_gpu:
        changed = _with(work, "train", optimizer_offload=True)
        yield _Variant(setting="train.optimizer_offload=true", work=changed)


def _shrink_kv_cache(work: Workload) -> Iterator[_Variant]:
    rows = num_cache_rows(work, work.num_student_rows)
    if rows > 8 and work.num_student_rows:
        tokens = int(rows // 2 * row_tokens(work))
        changed = _with(work, "rollout", kv_cache_tokens=tokens)
        yield _Variant(setting=f"rollout.kv_cache_tokens={tokens}", work=changed)


def _quantize_teacher(work: Workload) -> Iterator[_Variant]:
    for dtype in ("int8", "nf4"):
        teacher = work.recipe.teacher
        if isinstance(teacher, ModelTeacherConfig) and teacher.dtype not in ("int8", "nf4"):
            if dtype == "nf4" and teacher.adapter is not None:
                continue
            yield _Variant(
                setting=f"teacher.dtype={dtype}", work=_with(work, "teacher", dtype=dtype)
            )
        elif isinstance(teacher, RoutedTeacherConfig):
            return


def _add_lora(work: Workload) -> Iterator[_Variant]:
    if work.recipe.student.lora is None:
        changed = _with(work, "student", lora=LoraConfig(rank=LORA_RANK))
        yield _Variant(setting=f"student.lora.rank={LORA_RANK}", work=changed)


def _quantize_base(work: Workload) -> Iterator[_Variant]:
    student = work.recipe.student
    is_merged = student.adapter is not None or student.average_with is not None
    if student.lora is not None and student.lora.base_dtype == "auto" and not is_merged:
        lora = student.lora.model_copy(update={"base_dtype": "nf4"})
        yield _Variant(
            setting="student.lora.base_dtype=nf4", work=_with(work, "student", lora=lora)
        )


def _add_gpus(work: Workload) -> Iterator[_Variant]:
    """The fewest that fit, in powers of two; on paper, as none of it was measured."""
    if not work.device.is_gpu:
        return
    number = work.num_gpus
    while number * 2 <= MAX_SHARDS:
        number *= 2
        changed = replace(work, num_gpus=number)
        if estimate(changed).fits(work.device):
            yield _Variant(setting=f"--gpus {number}", work=changed)
            return


def _shrink_step(work: Workload) -> Iterator[_Variant]:
    """Fewer prompts a step, where the teacher's hidden states of all of them are what is large."""
    prompts = work.recipe.train.prompts_per_step
    variant = None
    while prompts > 1 and target_bytes(work) > MIN_TARGET_BYTES:
        prompts //= 2
        smaller = _with(work, "train", prompts_per_step=prompts)
        variant = _Variant(setting=f"train.prompts_per_step={prompts}", work=smaller)
        if estimate(smaller).fits(work.device) or target_bytes(smaller) <= MIN_TARGET_BYTES:
            break
    if variant is not None:
        yield variant


SETTINGS = (
    _checkpoint, _offload, _shrink_micro_batch, _shrink_kv_cache, _quantize_teacher, _add_lora,
    _quantize_base,
    _shrink_step,
)  # fmt: skip
"""In the order in which they are combined: those that change least about the method first."""
