"""The recipe: one frozen tree. No torch, no files here: `recipe_file` reads TOML into it.

Defaults are the vetted setting. A state that cannot work cannot be written down: unknown keys,
wrong types and impossible combinations are refused with the field, the reason and the fix.
Checks that need tasks or models (a privileged field that no task has) happen in `assemble`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

Share = Annotated[float, Field(ge=0, le=1)]
EMA_DECAY = 0.99


class Part(BaseModel):
    """Every node of the tree: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class Refused(Part):
    """Known only so that it can be refused with the reason, not as an unknown word."""


# ── student ──────────────────────────────────────────────────────────────────────────────────────


class Lora(Part):
    rank: PositiveInt = 32
    alpha: PositiveFloat | None = None
    """Scale is alpha / rank. Unset: alpha = 2 · rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get an adapter; the output head never does."""


class Student(Part):
    model: str
    """`smollm2-135m` (embedded), a hub id, or a folder with safetensors."""
    lora: Lora | None = None
    """Unset: all weights are trained."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass. auto: bfloat16 on a GPU, float32 on a CPU. Trained weights and every
    log-softmax are float32 either way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    keep_layers: tuple[NonNegativeInt, ...] | None = None
    """Prune: keep only these decoder layers of the model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


class TasksBase(Part):
    limit: PositiveInt | None = None
    """Train on this many prompts only, over and over (down to one). Unset: all of them."""
    system: str | None = None
    """A system prompt that the student sees on every task."""
    overlong: Literal["error", "drop"] = "error"
    """A prompt that does not fit the context: stop, or leave it out and count it."""


class ArithmeticTasks(TasksBase):
    kind: Literal["arithmetic"]
    operation: Literal["add", "subtract", "multiply"] = "add"
    digits: Annotated[int, Field(ge=1, le=12)] = 3
    """Of each operand."""
    scratchpad: bool = True
    """The reference solution works digit by digit; otherwise it is the answer alone."""


CheckName = Literal[
    "lower_case", "upper_case", "word_count", "json", "bullets", "forbidden_word", "ending",
    "starts_with", "one_sentence",
]  # fmt: skip


class InstructionTasks(TasksBase):
    kind: Literal["instructions"]
    checks: Annotated[tuple[CheckName, ...], Field(min_length=1)] = ("lower_case",)
    """Which instructions are drawn from; one of them per task."""
    stated: bool = True
    """True: the prompt states the instruction. False: only the privileged field `rule` does, and
    the student must have internalised it."""


class JsonlTasks(TasksBase):
    kind: Literal["jsonl"]
    path: Path
    """One JSON object a line: prompt (or messages), and optionally answer, completion, rejected,
    privileged, tags, grader, grader_args, split. Tasks without a split get one by content hash."""


class DatasetTasks(TasksBase):
    kind: Literal["datasets"]
    path: str
    """What `datasets.load_dataset` takes, or a folder that `save_to_disk` wrote."""
    name: str | None = None
    split: str = "train"
    columns: Mapping[str, str] = Field(default_factory=lambda: {"prompt": "prompt"})
    """Field of a task → column of the data set: prompt or messages, answer, completion, rejected.
    `privileged.NAME` makes a privileged field."""
    grader: str | None = None


Tasks = Annotated[
    ArithmeticTasks | InstructionTasks | JsonlTasks | DatasetTasks, Field(discriminator="kind")
]


# ── rollout ──────────────────────────────────────────────────────────────────────────────────────


class Ramp(Part):
    """A number that moves linearly from `start` to `end` over `steps` and then stays."""

    start: Share
    end: Share
    steps: PositiveInt

    def at(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


class Rollout(Part):
    samples: PositiveInt = 4
    """Per prompt."""
    max_new_tokens: PositiveInt = 128
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    """0: off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer, beside the model's own end token."""
    student_share: Share | Ramp = 1.0
    """λ: the share of each batch that the student writes itself. 1: on-policy; 0: off-policy."""
    rest: Literal["dataset", "teacher"] = "dataset"
    """Who wrote the others: the tasks' `completion`, or the teacher, sampled now."""
    max_batch_tokens: PositiveInt = 65536
    """Memory budget: key/value positions held at once while sampling or scoring."""

    def share(self, step: int) -> float:
        share = self.student_share
        return share.at(step) if isinstance(share, Ramp) else share


# ── teacher ──────────────────────────────────────────────────────────────────────────────────────


class SystemContext(Part):
    kind: Literal["system"]
    text: str
    """A system prompt that only the teacher sees."""


class FieldContext(Part):
    kind: Literal["field"]
    field: str
    """Name of the tasks' privileged field, e.g. `rule` or `solution`."""
    place: Literal["system", "user"] = "system"
    """Where it goes: the system prompt, or the end of the last user message."""
    template: str = "{text}"

    @field_validator("template")
    @classmethod
    def _has_slot(cls, value: str) -> str:
        if "{text}" not in value:
            raise ValueError("needs the slot {text}, where the privileged text goes")
        return value


class FeedbackContext(Part):
    kind: Literal["feedback"]
    place: Literal["system", "user"] = "user"
    template: str = "A first attempt was checked. The checker said: {text}"
    """Trajectories whose grader has nothing to say get no teacher, and are counted."""


class SiblingContext(Part):
    kind: Literal["sibling"]
    place: Literal["system", "user"] = "user"
    template: str = "A correct answer to this, for reference:\n{text}"
    """A passing sample of the same prompt; groups without one get no teacher, and are counted."""


Context = Annotated[
    SystemContext | FieldContext | FeedbackContext | SiblingContext, Field(discriminator="kind")
]


class SelfTeacher(Part):
    kind: Literal["self"]
    weights: Literal["live", "frozen", "ema"] = "frozen"
    """live: the student as it is now; frozen: as it was before training; ema: a moving average."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = EMA_DECAY
    context: Context | None = None


class ModelTeacher(Part):
    kind: Literal["model"]
    model: str
    adapter: Path | None = None
    """A LoRA adapter's folder, put on top of `model`."""
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """int8: weights of the linear layers in 8 bits with a scale per row."""
    context: Context | None = None
    trust_remote_code: bool = False


class RoutedTeacher(Part):
    kind: Literal["routes"]
    routes: Annotated[
        Mapping[str, Annotated[SelfTeacher | ModelTeacher, Field(discriminator="kind")]],
        Field(min_length=1),
    ]
    """Tag of a task → its teacher. A task goes to the first of its tags that has a route."""
    default: str | None = None
    """Tag whose teacher takes the tasks that no route fits. Unset: such a task is an error."""

    @model_validator(mode="after")
    def _default_is_a_route(self) -> RoutedTeacher:
        if self.default is not None and self.default not in self.routes:
            raise ValueError(f"default = {self.default!r} is not one of routes {list(self.routes)}")
        return self


Teacher = Annotated[SelfTeacher | ModelTeacher | RoutedTeacher, Field(discriminator="kind")]


# ── losses ───────────────────────────────────────────────────────────────────────────────────────


class FullSupport(Part):
    kind: Literal["full"]


class TopKSupport(Part):
    kind: Literal["top_k"]
    k: PositiveInt = 64
    of: Literal["teacher", "student", "joint"] = "teacher"
    """Whose k likeliest words. `student` is right only near the teacher; its overlap is logged."""
    form: Literal["tail", "stop_gradient", "renormalised", "naive"] = "tail"
    """tail: all other words of both as one class. naive has a wrong fixed point (mass · 1/e)."""


class SampledSupport(Refused):
    kind: Literal["sampled"]

    @model_validator(mode="after")
    def _refuse(self) -> SampledSupport:
        raise ValueError(
            "differentiating log π(y) − log q(y) at the sampled token directly gives a gradient "
            "whose expectation is zero, whatever the teacher says. Use a loss of kind = "
            "'policy_gradient' with advantage = 'teacher_gap' for sampled tokens, or "
            "support = { kind = 'full' } or { kind = 'top_k' } here"
        )


class EntropyAware(Part):
    threshold: NonNegativeFloat
    """In nats: positions where the teacher's entropy is higher also get a forward KL."""
    weight: PositiveFloat = 1.0


class LossBase(Part):
    weight: PositiveFloat = 1.0
    on: Literal["student", "dataset", "teacher", "all"] = "all"
    """Trajectories of which author this loss is taken on."""
    name: str | None = None
    """Under which it is logged. Unset: its kind."""


class DivergenceLoss(LossBase):
    kind: Literal["divergence"]
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "skew_forward_kl", "skew_reverse_kl"] = (
        "reverse_kl"
    )
    beta: Share | None = None
    """Of jsd: M = β·teacher + (1−β)·student. 0 and 1 are the forward and reverse KL."""
    alpha: Share | None = None
    """Of the skewed forms: forward KL(q ‖ α·q + (1−α)·π), reverse KL(π ‖ α·π + (1−α)·q)."""
    support: Annotated[FullSupport | TopKSupport | SampledSupport, Field(discriminator="kind")] = (
        FullSupport(kind="full")
    )
    clip: PositiveFloat | None = None
    """Cap on the contribution of one word at one position, so that style words do not dominate."""
    entropy_aware: EntropyAware | None = None
    extrapolate: PositiveFloat = 1.0
    """λ: the target is q^λ · ref^(1−λ), normalised; above 1 it goes beyond the teacher."""

    @model_validator(mode="after")
    def _parameters_belong(self) -> DivergenceLoss:
        skewed = self.divergence.startswith("skew")
        if (self.beta is not None) != (self.divergence == "jsd"):
            raise ValueError(
                "beta belongs to divergence = 'jsd' and to no other; set beta there (0.5 is the "
                "symmetric one), or remove it"
            )
        if (self.alpha is not None) != skewed:
            raise ValueError(
                "alpha belongs to the skewed divergences and to no other; set alpha there (0.1 is "
                "common), or remove it"
            )
        if self.support.kind == "top_k":
            mixes = skewed or self.divergence == "jsd"
            if mixes and self.support.form in ("stop_gradient", "naive"):
                raise ValueError(
                    f"support.form = {self.support.form!r} is defined for reverse_kl and "
                    f"forward_kl; use form = 'tail' with {self.divergence}"
                )
            if self.entropy_aware or self.extrapolate != 1.0:
                raise ValueError(
                    "entropy_aware and extrapolate need the whole distribution; use "
                    "support = { kind = 'full' }"
                )
        return self


class PolicyGradientLoss(LossBase):
    kind: Literal["policy_gradient"]
    advantage: str = "teacher_gap"
    """teacher_gap: log q − log μ of each token. reward: the grade against the group's mean."""
    ratio: Literal["importance", "none"] = "importance"
    """importance: π/μ, so that samples of a slightly other policy still give the right gradient."""
    truncate: PositiveFloat | None = None
    """Largest importance ratio. Unset: no limit."""
    clip: tuple[PositiveFloat, PositiveFloat] | None = None
    """(low, high): the clipped surrogate, which stops at ratios 1 − low and 1 + high."""
    baseline: bool = False
    """Subtract −KL(π‖q) at each position (detached): the same expected gradient, with smaller
    advantages; less variance where the student is unsure."""
    extrapolate: PositiveFloat = 1.0
    """λ of log q^λ·ref^(1−λ) in place of log q."""
    scale_by_std: bool = False
    """Divide group-relative rewards by their standard deviation."""

    @field_validator("advantage")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in ("teacher_gap", "reward"):
            return value
        if "top_k" in value or "divergence" in value or "kl" in value:
            raise ValueError(
                f"{value!r}: a divergence summed over words does not depend on which token was "
                "sampled, so as an advantage its expected gradient is zero. Use a loss of kind = "
                "'divergence' to push on whole distributions, or advantage = 'teacher_gap'"
            )
        raise ValueError(f"{value!r} is not known; use 'teacher_gap' or 'reward'")

    @model_validator(mode="after")
    def _combinations(self) -> PolicyGradientLoss:
        if self.advantage == "reward":
            if self.baseline or self.extrapolate != 1.0:
                raise ValueError("baseline and extrapolate belong to advantage = 'teacher_gap'")
        elif self.scale_by_std:
            raise ValueError("scale_by_std belongs to advantage = 'reward'")
        if self.ratio == "none" and (self.truncate is not None or self.clip is not None):
            raise ValueError("truncate and clip act on the ratio; use ratio = 'importance'")
        if self.truncate is not None and self.clip is not None:
            raise ValueError("truncate and clip exclude each other: choose one")
        return self


class CrossEntropyLoss(LossBase):
    kind: Literal["cross_entropy"]


class PreferenceLoss(LossBase):
    kind: Literal["preference"]
    beta: PositiveFloat = 0.1
    """Strength of DPO's pull towards the reference."""


Loss = Annotated[
    DivergenceLoss | PolicyGradientLoss | CrossEntropyLoss | PreferenceLoss,
    Field(discriminator="kind"),
]


# ── training, evaluation, run ────────────────────────────────────────────────────────────────────


class Train(Part):
    steps: PositiveInt = 50
    prompts: PositiveInt = 16
    """Per step."""
    learning_rate: PositiveFloat | None = None
    """Unset: 1e-4 with LoRA, 1e-5 without."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine go down to zero at the last step."""
    warmup: NonNegativeInt = 0
    """Steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: PositiveFloat = 1.0
    micro_batch_tokens: PositiveInt | None = None
    """Padded tokens in one forward and backward pass; they do not change the update. Unset: 1024 on
    a CPU, where small batches of equal lengths waste least, 16384 on a GPU."""
    chunk_tokens: PositiveInt | None = None
    """Positions whose logits exist at once. Unset: chosen for the vocabulary and device."""


class Evaluate(Part):
    tasks: PositiveInt = 64
    """Held-out prompts of each evaluation."""
    every: NonNegativeInt = 0
    """Steps between evaluations on validation tasks; 0: only before and after."""
    samples: PositiveInt = 1
    temperature: NonNegativeFloat = 1.0
    """0: greedy."""
    max_new_tokens: PositiveInt | None = None
    """Unset: as in rollout."""
    teacher: bool = True
    """Before training, also measure the teacher with its context: the gate."""
    forward_kl: bool = False
    """Also let the teacher answer each time, and measure KL(teacher ‖ student) on its text."""


class Run(Part):
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    trajectories_every: PositiveInt = 1
    """Steps between stored batches of trajectories."""
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "courtside"
    """Name of the project in W&B and trackio."""


class Recipe(Part):
    """Everything that decides a run."""

    student: Student
    tasks: Tasks
    rollout: Rollout = Rollout()
    teacher: Teacher | None = None
    losses: Annotated[tuple[Loss, ...], Field(min_length=1)]
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    run: Run = Run()
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        problems = list(_problems(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def learning_rate(self) -> float:
        return self.train.learning_rate or (1e-4 if self.student.lora else 1e-5)

    @property
    def needs_reference(self) -> bool:
        """Whether a loss compares with the student before training."""
        return any(
            loss.kind == "preference" or getattr(loss, "extrapolate", 1.0) != 1.0
            for loss in self.losses
        )

    @property
    def trains_on_data(self) -> bool:
        """Whether some of the text is the tasks' own `completion`."""
        share = self.rollout.student_share
        least = min(share.start, share.end) if isinstance(share, Ramp) else share
        return least < 1 and self.rollout.rest == "dataset"

    def loss_names(self) -> tuple[str, ...]:
        return tuple(loss.name or loss.kind for loss in self.losses)


def teachers_of(recipe: Recipe) -> tuple[SelfTeacher | ModelTeacher, ...]:
    """The single teachers of a recipe, routed or not."""
    if recipe.teacher is None:
        return ()
    if isinstance(recipe.teacher, RoutedTeacher):
        return tuple(recipe.teacher.routes.values())
    return (recipe.teacher,)


def _asks_teacher(loss: Loss) -> bool:
    return loss.kind == "divergence" or (
        loss.kind == "policy_gradient" and loss.advantage == "teacher_gap"
    )


def _problems(recipe: Recipe) -> Iterator[str]:
    names = recipe.loss_names()
    if len(set(names)) != len(names):
        yield f"losses: two are logged as the same name in {list(names)}; give each its own `name`"
    shares = recipe.rollout.student_share
    least = min(shares.start, shares.end) if isinstance(shares, Ramp) else shares
    most = max(shares.start, shares.end) if isinstance(shares, Ramp) else shares
    if least == 1 and recipe.rollout.rest == "teacher":
        yield "rollout.rest = 'teacher' needs a rest; set rollout.student_share below 1"
    if least < 1 and recipe.rollout.rest == "teacher" and recipe.teacher is None:
        yield "rollout.rest = 'teacher' needs a [teacher] to write; add it, or use rest = 'dataset'"
    if least < 1 and recipe.rollout.rest == "dataset" and recipe.tasks.kind == "instructions":
        yield (
            "rollout.student_share < 1 with rest = 'dataset' needs tasks with a `completion`; "
            "tasks.kind = 'instructions' has none. Use rest = 'teacher'"
        )
    rest = recipe.rollout.rest if least < 1 else None
    written_by = {"student": most > 0, "dataset": rest == "dataset", "teacher": rest == "teacher"}
    for index, loss in enumerate(recipe.losses):
        where = f"losses[{index}] ({loss.kind})"
        if loss.kind == "preference":
            if not (least == most == 0 and recipe.rollout.rest == "dataset"):
                yield (
                    f"{where}: preference pairs come from the tasks (`completion` and `rejected`); "
                    "set rollout.student_share = 0"
                )
            if loss.on not in ("all", "dataset"):
                yield f"{where}: on = {loss.on!r}, but preference pairs are written by the dataset"
            continue
        if loss.on != "all" and not written_by[loss.on]:
            yield (
                f"{where}: on = {loss.on!r}, but rollout.student_share and rollout.rest give no "
                f"trajectories written by the {loss.on}"
            )
        if _asks_teacher(loss) and recipe.teacher is None:
            yield f"{where}: compares with a teacher; add a [teacher] section"
        if loss.kind == "policy_gradient":
            if least < 1 and loss.on != "student":
                yield (
                    f"{where}: a policy gradient is defined on the student's own samples; "
                    "set on = 'student', or rollout.student_share = 1"
                )
            if loss.advantage == "reward" and recipe.rollout.samples < 2:
                yield (
                    f"{where}: advantage = 'reward' compares samples of one prompt; "
                    "set rollout.samples to 2 or more"
                )
        if loss.kind == "cross_entropy" and loss.on in ("student", "all") and most > 0:
            yield (
                f"{where}: imitating the student's own samples degrades it. Use on = 'dataset' or "
                "'teacher' (with rollout.student_share below 1)"
            )
    for teacher in teachers_of(recipe):
        if not isinstance(teacher, SelfTeacher):
            continue
        if teacher.weights != "ema" and teacher.ema_decay != EMA_DECAY:
            yield "teacher: ema_decay belongs to weights = 'ema'; set that, or remove it"
        if teacher.weights == "live" and not teacher.context and not recipe.needs_reference:
            yield (
                "teacher: kind = 'self' with weights = 'live' and no context is the student "
                "itself; every gap is zero. Give it a context, or weights = 'frozen'"
            )
    asked = any(_asks_teacher(loss) for loss in recipe.losses) or recipe.rollout.rest == "teacher"
    if recipe.teacher is not None and not asked:
        yield "teacher: no loss asks it anything; remove the section, or add a divergence"
    if recipe.train.warmup >= recipe.train.steps:
        yield "train.warmup must be smaller than train.steps"
