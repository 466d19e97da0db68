"""What a step computes: how many sequences, of which lengths, by which models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean

from courtside.errors import PlanError
from courtside.planning.corrections import Rates, Rows, list_rows
from courtside.planning.gpus import Device
from courtside.planning.shapes import ModelShape
from courtside.recipe import Recipe
from courtside.recipe.reader import CombinedReaderConfig, ModelReaderConfig
from courtside.recipe.teacher import ModelTeacherConfig, SelfTeacherConfig

MIN_PREFIX_TOKENS, MIN_PREFIX_FRACTION = 16, 1 / 16
"""From which length a prompt of several samples is computed once (engines/forward/batching.py)."""
PASS_TOKENS = {True: 16384, False: 512}
"""Of a forward pass by default: on a GPU, and on a CPU."""
HINT_TOKENS = 48
"""Of a hint, where nothing is known."""
GPUS_PER_MACHINE = 8
"""More than that are several machines, with a slower network between them."""
MAX_TOKENS = 10**8
"""Of one sequence: more is a slip of the keyboard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Mean tokens of one trajectory."""

    prompt: float
    new: float
    """Sampled ones, of all turns together."""
    observed: float = 0.0
    """An environment's messages between turns."""
    context: float = 0.0
    """What a teacher scores in addition: its privileged context, or hints with their turns."""
    trained: float | None = None
    """Sampled tokens that losses apply to. None: all."""
    turns: float = 1.0
    evaluated: float | None = None
    """Sampled tokens of an evaluated answer or episode. None: as in training."""

    def __post_init__(self) -> None:
        lowest = {"turns": 1, "prompt": 1, "new": 1, "observed": 0, "context": 0}
        for name, least in lowest.items():
            value = getattr(self, name)
            if not least <= value <= MAX_TOKENS:
                raise PlanError(
                    f"{name} tokens = {value:g}: give a number from {least} to {MAX_TOKENS:,}"
                )

    @property
    def num_trained(self) -> float:
        return self.new if self.trained is None else self.trained

    @property
    def sequence(self) -> float:
        return self.prompt + self.new + self.observed


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherModel:
    model: str
    """Its name in the recipe."""
    shape: ModelShape
    dtype: str
    """bfloat16, float32, int8 or nf4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModels:
    student: ModelShape
    dtype: str
    """Of the student's matmuls: bfloat16 or float32."""
    base_dtype: str
    """Of the student's stored weights: float32 where all of them train, else of the frozen base."""
    num_adapter: int | None
    """Weights of the LoRA adapter. None: all weights train."""
    teachers: tuple[TeacherModel, ...]
    """Other models than the student, each once."""

    @property
    def num_student(self) -> int:
        """As a run counts them: with the adapter."""
        return self.student.num_parameters + (self.num_adapter or 0)

    @property
    def num_trained(self) -> int:
        return self.student.num_parameters if self.num_adapter is None else self.num_adapter

    @property
    def trains_head(self) -> bool:
        return self.num_adapter is None

    @property
    def scorer(self) -> ModelShape:
        """The shape that scores; the mean of several teachers is that of the largest."""
        shapes = [teacher.shape for teacher in self.teachers] or [self.student]
        return max(shapes, key=lambda shape: shape.num_parameters)

    @property
    def num_scorer(self) -> int:
        """Parameters of a teacher: several share the tasks, about equally."""
        if not self.teachers:
            return self.num_student
        return round(mean(teacher.shape.num_parameters for teacher in self.teachers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGpus:
    """Of the servers with one role: they sample for the student, or score for a teacher."""

    shape: ModelShape
    num_gpus: int
    num_replicas: int
    """Addresses in the recipe."""

    @property
    def tensor_parallel(self) -> int:
        """GPUs of one replica."""
        return self.num_gpus // self.num_replicas


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached property
class Workload:
    """The sizes of one step, from a recipe and its lengths."""

    recipe: Recipe
    models: PlannedModels
    lengths: Lengths
    device: Device
    num_gpus: int = 1
    """Ranks that share the rows of a step and, by FSDP2, the states of the student."""
    tensor_parallel: int = 1
    """GPUs that decode one row together, as those of a vLLM server."""
    rollout_servers: ServerGpus | None = None
    """None: the ranks sample."""
    teacher_servers: ServerGpus | None = None
    """None: the ranks score, or the servers' costs are left out."""
    server_cache_tokens: float | None = None
    """Of a replica's KV cache, where servers sample. None: that of a rank."""
    rates: Rates = field(default_factory=Rates)
    """Of corrections."""
    num_steps: int | None = None
    """Over which a changing mix is averaged, where a budget ends the run. None: train.steps."""

    @property
    def num_replicas(self) -> float:
        """Samplers, which share the rows."""
        return self.num_gpus / self.tensor_parallel

    @property
    def num_all_gpus(self) -> int:
        servers = (self.rollout_servers, self.teacher_servers)
        return self.num_gpus + sum(s.num_gpus for s in servers if s is not None)

    @property
    def num_rows(self) -> float:
        """Trajectories of a step without corrections; the mean over steps where the mix changes."""
        return self.num_student_rows + self.num_teacher_rows + self.num_dataset_rows

    @property
    def num_student_rows(self) -> float:
        """Trajectories that the student samples."""
        return self.num_sampled_prompts * self.recipe.rollout.samples_per_prompt

    @property
    def num_teacher_rows(self) -> float:
        """Trajectories that the teacher samples."""
        if self.recipe.tasks.is_recorded or self.recipe.rollout.off_policy != "teacher":
            return 0.0
        prompts = self.recipe.train.prompts_per_step - self.num_sampled_prompts
        return prompts * self.recipe.rollout.samples_per_prompt

    @property
    def num_dataset_rows(self) -> float:
        """Recorded trajectories, and the tasks' own completions: once each, or as a pair."""
        if self.recipe.tasks.is_recorded:
            return float(self.recipe.train.prompts_per_step)
        if self.recipe.rollout.off_policy != "dataset":
            return 0.0
        prompts = self.recipe.train.prompts_per_step - self.num_sampled_prompts
        return prompts * self._num_completions

    @property
    def _num_completions(self) -> int:
        """Of a task of a data set."""
        return 2 if any(loss.kind == "preference" for loss in self.recipe.losses) else 1

    @property
    def num_sampled_prompts(self) -> float:
        """Prompts of a step that the student answers; the mean over the steps."""
        if self.recipe.tasks.is_recorded:
            return 0.0
        return mean(map(self._count_sampled_prompts, self._steps))

    def _count_sampled_prompts(self, step: int) -> int:
        fraction = self.recipe.rollout.student_fraction_at(step)
        return round(self.recipe.train.prompts_per_step * fraction)

    @property
    def _steps(self) -> range:
        return range(self.num_steps or self.recipe.train.steps)

    @property
    def num_mixed_rows(self) -> float:
        """Of the student's trajectories: those that the teacher samples with it."""
        config, rollout = self.recipe.rollout.mixed_sampling, self.recipe.rollout
        if config is None or self.recipe.tasks.is_recorded:
            return 0.0
        prompts = mean(
            round(config.fraction_at(step) * self._count_sampled_prompts(step))
            for step in self._steps
        )
        return prompts * rollout.samples_per_prompt

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """What a step scores and trains, corrections included."""
        return list_rows(self)

    @property
    def num_all_rows(self) -> float:
        """All of it, in trajectories of mean length."""
        return self._count_whole((1.0, rows) for rows in self.rows)

    @property
    def num_scored_rows(self) -> float:
        """The same of what the teacher scores."""
        return self._count_whole((rows.scored, rows) for rows in self.rows)

    @property
    def num_trained_rows(self) -> float:
        """The same of what is in the update."""
        return self._count_whole((rows.trained, rows) for rows in self.rows)

    def _count_whole(self, groups: Iterable[tuple[float, Rows]]) -> float:
        tokens = sum(fraction * rows.number * rows.length for fraction, rows in groups)
        return tokens / self.lengths.sequence

    @property
    def is_scored(self) -> bool:
        """Whether a teacher in this process scores the trajectories."""
        return len(self.recipe.model_teachers) > len(self.recipe.server_teachers)

    @property
    def num_served(self) -> int:
        """Parameters of a teacher behind servers: those of its shape where its GPUs are planned,
        else as the recipe states them. 0: it does not."""
        if self.teacher_servers is not None:
            return self.teacher_servers.shape.num_parameters
        sizes = [teacher.num_parameters or 0 for teacher in self.recipe.server_teachers]
        return round(mean(sizes)) if sizes else 0

    @property
    def local_share(self) -> float:
        """Of the tasks: those whose teacher is in this process. Routes share them about equally;
        servers without GPUs in the plan have none."""
        if not self.is_scored:
            return 0.0
        return 1.0 - self.served_share

    @property
    def served_share(self) -> float:
        """Of the tasks: those whose teacher is behind servers with GPUs in the plan."""
        if self.teacher_servers is None:
            return 0.0
        return len(self.recipe.server_teachers) / len(self.recipe.model_teachers)

    @property
    def num_teacher(self) -> int:
        """Parameters of a teacher, as a run counts them."""
        if not self.is_scored:
            return self.num_served
        local, served = self.local_share, self.served_share
        return round(local * self.models.num_scorer + served * self.num_served)

    @property
    def defers_hints(self) -> bool:
        """Whether hints are scored inside the update, over its own forward pass."""
        teachers = self.recipe.model_teachers
        return (
            self.recipe.reader is not None
            and self.recipe.hints.min_shift is None
            and not self.recipe.student.gradient_checkpointing
            and bool(teachers)
            and all(isinstance(t, SelfTeacherConfig) and t.weights == "live" for t in teachers)
        )

    @property
    def student_reader(self) -> ModelReaderConfig | None:
        """The reader that is the student itself."""
        reader = self.recipe.reader
        readers = reader.readers if isinstance(reader, CombinedReaderConfig) else (reader,)
        for config in readers:
            if isinstance(config, ModelReaderConfig) and config.endpoint is None:
                return config
        return None

    @property
    def needs_hidden(self) -> bool:
        """Whether targets hold the teacher's hidden states: a loss needs whole distributions."""
        return any(
            (loss.kind == "divergence") or (loss.kind == "policy_gradient" and loss.baseline)
            for loss in self.recipe.losses
        )

    @property
    def group_size(self) -> int:
        """Trajectories that share the computation of a prompt."""
        lengths = self.lengths
        is_long = lengths.prompt >= MIN_PREFIX_TOKENS
        if not is_long or lengths.prompt < MIN_PREFIX_FRACTION * lengths.sequence:
            return 1
        if self.recipe.tasks.is_recorded:
            return 1
        if self.num_dataset_rows > self.num_rows / 2:
            return self._num_completions
        return self.recipe.rollout.samples_per_prompt

    @property
    def suffix_tokens(self) -> float:
        """Of a trajectory, after its prompt."""
        return self.lengths.new + self.lengths.observed

    def num_computed(self, rows: float, extra: float = 0.0) -> float:
        """Tokens of the forward passes over `rows` trajectories, shared prompts counted once.
        `extra`: more tokens of each sequence."""
        groups = rows / self.group_size
        return groups * (self.lengths.prompt + extra + self.group_size * self.suffix_tokens)

    def num_attended(self, rows: float, extra: float = 0.0) -> float:
        """Pairs of a token and one that it attends to, in all of these passes."""
        prefix, suffix = self.lengths.prompt + extra, self.suffix_tokens
        suffix_pairs = self.group_size * suffix * (prefix + suffix / 2)
        return rows / self.group_size * (prefix**2 / 2 + suffix_pairs)

    @property
    def micro_batch_tokens(self) -> int:
        return self.recipe.train.micro_batch_tokens or PASS_TOKENS[self.device.is_gpu]

    def pack(self, limit: int, num_rows: float, extra: float = 0.0) -> tuple[int, float]:
        """`num_rows` trajectories as passes of at most `limit` tokens on each GPU, and the tokens
        of a full one."""
        prompt = self.lengths.prompt + extra
        rows = max(1, round(num_rows / self.num_gpus))
        per_group = prompt + self.group_size * self.suffix_tokens
        if per_group <= limit:
            groups = max(1, rows // self.group_size)
            in_pass = min(groups, int(limit // per_group))
            return -(-groups // in_pass), in_pass * per_group
        members = max(1, int((limit - prompt) // self.suffix_tokens)) if limit > prompt else 1
        members = min(members, self.group_size)
        return -(-rows // members), prompt + members * self.suffix_tokens


def resolve_dtype(choice: str, device: Device) -> str:
    """As engines/precision.py does for a device that is there."""
    if choice != "auto":
        return choice
    if device.is_gpu:
        return "bfloat16"
    from courtside.engines.precision import has_native_bf16

    return "bfloat16" if has_native_bf16() else "float32"


def plan_models(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape], device: Device
) -> PlannedModels:
    """`teachers`: by `teacher.model`."""
    lora = recipe.student.lora
    if lora is not None and lora.rank > student.hidden_size:
        raise PlanError(
            f"student.lora.rank = {lora.rank:,}: the layers of {student.name} are "
            f"{student.hidden_size:,} wide. Use a smaller rank"
        )
    keys = {
        (teacher.model, teacher.dtype)
        for teacher in recipe.model_teachers
        if isinstance(teacher, ModelTeacherConfig)
    }
    dtype = resolve_dtype(recipe.student.dtype, device)
    base_dtype = "float32"
    if lora is not None:
        base_dtype = dtype if lora.base_dtype == "auto" else lora.base_dtype
    return PlannedModels(
        student=student,
        dtype=dtype,
        base_dtype=base_dtype,
        num_adapter=student.num_lora_parameters(lora.rank, lora.target_modules) if lora else None,
        teachers=tuple(
            TeacherModel(model=model, shape=teachers[model], dtype=resolve_dtype(dtype, device))
            for model, dtype in sorted(keys)
        ),
    )
