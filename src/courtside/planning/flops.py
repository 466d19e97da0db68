"""FLOPs of a step by phase: as a run records them, and as the device executes them.

A run counts 2 · parameters · tokens (report/costs.py), which compares with published numbers. The
device does less and more than that: prompts of a group are computed once, an embedding is no
matmul, attention and recomputation come on top. Times follow from the latter.
"""

from __future__ import annotations

from dataclasses import dataclass

from courtside.planning.shapes import ModelShape
from courtside.planning.workload import Workload
from courtside.report.costs import forward_flops, training_flops

READER_PROMPT_TOKENS = 300
"""Instructions of a model that reads trajectories, above those."""
ATTENTION_BACKWARD = 2.5
"""Flash attention's backward pass over its forward pass: it computes the scores again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFlops:
    """Of one phase of a step, on all GPUs together."""

    input_tokens: float = 0.0
    output_tokens: float = 0.0
    """Both as a run counts them (`costs.json`)."""
    counted: float = 0.0
    """2 · parameters · tokens a forward pass: what a run records."""
    layers: float = 0.0
    """Matmuls of the decoder layers that are executed."""
    attention: float = 0.0
    head: float = 0.0
    recomputed: float = 0.0
    """The second forward pass of gradient checkpointing; its attention is in `attention`."""

    @property
    def executed(self) -> float:
        return self.layers + self.attention + self.head + self.recomputed


def attention_flops(shape: ModelShape, num_attended: float) -> float:
    """Scores and weighted values: a multiply and an add each, in every layer."""
    return 4.0 * shape.num_layers * shape.query_size * num_attended


def sampling_flops(
    shape: ModelShape, num_parameters: int, *, rows: float, prompts: float, work: Workload
) -> PhaseFlops:
    """`rows` answers to `prompts` different prompts; the prompt of a group is prefilled once."""
    lengths = work.lengths
    length, suffix = lengths.sequence, work.suffix_tokens
    attended = prompts * lengths.prompt**2 / 2 + rows * suffix * (lengths.prompt + suffix / 2)
    return PhaseFlops(
        input_tokens=rows * (length - lengths.new),
        output_tokens=rows * lengths.new,
        counted=forward_flops(num_parameters, 1) * rows * length,
        layers=2.0 * shape.num_linear_parameters * (prompts * lengths.prompt + rows * suffix),
        attention=attention_flops(shape, attended),
        head=2.0 * shape.num_head_parameters * rows * lengths.new,
    )


def rollout_flops(work: Workload) -> PhaseFlops:
    models = work.models
    student = sampling_flops(
        models.student, models.num_student, rows=work.num_student_rows,
        prompts=work.num_student_rows / work.group_size, work=work,
    )  # fmt: skip
    teacher = sampling_flops(
        models.scorer, models.num_scorer, rows=work.num_teacher_rows,
        prompts=work.num_teacher_rows / work.group_size, work=work,
    )  # fmt: skip
    return add_flops(student, teacher)


def reader_flops(work: Workload) -> PhaseFlops:
    """Of a student that reviews its own trajectories; an endpoint computes elsewhere."""
    config = work.student_reader
    if config is None:
        return PhaseFlops()
    shape, rows = work.models.student, work.num_rows
    num_input = rows * (work.lengths.sequence + READER_PROMPT_TOKENS)
    num_output = rows * config.max_new_tokens
    tokens = num_input + num_output
    return PhaseFlops(
        input_tokens=num_input,
        output_tokens=num_output,
        counted=forward_flops(work.models.num_student, 1) * tokens,
        layers=2.0 * shape.num_linear_parameters * tokens,
        attention=attention_flops(shape, tokens * (num_input / rows) / 2),
        head=2.0 * shape.num_head_parameters * num_output,
    )


def served_teacher_flops(work: Workload) -> PhaseFlops:
    """vLLM computes log-probs of a prompt without its prefix cache: of each sequence all tokens,
    through the LM head too."""
    assert work.teacher_servers is not None
    shape, rows = work.teacher_servers.shape, work.num_rows
    length = work.lengths.sequence + work.lengths.context
    return PhaseFlops(
        input_tokens=rows * length,
        counted=forward_flops(shape.num_parameters, 1) * rows * length,
        layers=2.0 * shape.num_linear_parameters * rows * length,
        attention=attention_flops(shape, rows * length**2 / 2),
        head=2.0 * shape.num_head_parameters * rows * length,
    )


def teacher_flops(work: Workload) -> PhaseFlops:
    """Scoring of all trajectories, and of the reference where a loss compares with it."""
    models, rows, lengths = work.models, work.num_rows, work.lengths
    total = PhaseFlops()
    if work.is_scored:
        tokens = rows * ((0.0 if work.defers_hints else lengths.sequence) + lengths.context)
        scored = _forward(work, models.scorer, extra=0.0 if work.recipe.reader else lengths.context)
        if work.recipe.reader is not None:
            scored = _branches(work, with_trunk=not work.defers_hints)
        counted = forward_flops(models.num_scorer, 1) * tokens
        total = add_flops(scored, PhaseFlops(input_tokens=tokens, counted=counted))
    if work.recipe.needs_reference:
        tokens = rows * lengths.sequence
        counted = forward_flops(models.num_student, 1) * tokens
        reference = PhaseFlops(input_tokens=tokens, counted=counted)
        total = add_flops(total, add_flops(_forward(work, models.student), reference))
    return total


def _forward(work: Workload, shape: ModelShape, extra: float = 0.0) -> PhaseFlops:
    """A forward pass with the logits of every sampled token."""
    return PhaseFlops(
        layers=2.0 * shape.num_linear_parameters * work.num_computed(extra),
        attention=attention_flops(shape, work.num_attended(extra)),
        head=2.0 * shape.num_head_parameters * work.num_rows * work.lengths.new,
    )


def _branches(work: Workload, *, with_trunk: bool) -> PhaseFlops:
    """Hints and their turns, over the KV cache of their trajectory."""
    shape, tokens = work.models.scorer, work.num_rows * work.lengths.context
    branches = PhaseFlops(
        layers=2.0 * shape.num_linear_parameters * tokens,
        attention=attention_flops(shape, tokens * work.lengths.sequence / 2),
        head=2.0 * shape.num_head_parameters * tokens,
    )
    return add_flops(branches, _forward(work, shape)) if with_trunk else branches


def update_flops(work: Workload) -> PhaseFlops:
    """Forward and backward pass, LM head with its divergence, recomputation."""
    models, shape = work.models, work.models.student
    # The last token predicts nothing.
    tokens = work.num_rows * (work.lengths.sequence - 1)
    positions = work.num_rows * work.lengths.num_trained
    forward = 2.0 * shape.num_linear_parameters * work.num_computed()
    attention = attention_flops(shape, work.num_attended())
    adapter = 2.0 * (models.num_adapter or 0) * work.num_computed()
    weight_gradients = forward if models.num_adapter is None else adapter
    # Logits, gradients of the hidden states and, unless it is frozen, of the head.
    head = (6.0 if models.trains_head else 4.0) * shape.num_head_parameters * positions
    if work.needs_hidden and work.is_scored:
        head += 2.0 * models.scorer.num_head_parameters * positions
    recomputes = work.recipe.student.gradient_checkpointing
    return PhaseFlops(
        input_tokens=tokens,
        counted=training_flops(models.num_student, 1, models.num_trained) * tokens,
        layers=2 * (forward + adapter) + weight_gradients,
        attention=(1 + ATTENTION_BACKWARD + recomputes) * attention,
        head=head,
        recomputed=forward + adapter if recomputes else 0.0,
    )


def evaluation_flops(work: Workload, *, by_teacher: bool) -> PhaseFlops:
    """One evaluation of `evaluate.num_tasks` tasks. A run counts the sampled tokens alone."""
    config, models, lengths = work.recipe.evaluate, work.models, work.lengths
    rows = config.num_tasks * config.samples_per_task
    new = lengths.new if lengths.evaluated is None else lengths.evaluated
    shape = models.scorer if by_teacher else models.student
    number = models.num_scorer if by_teacher else models.num_student
    attended = rows * (lengths.prompt**2 / 2 + new * (lengths.prompt + new / 2))
    return PhaseFlops(
        output_tokens=rows * new,
        counted=forward_flops(number, 1) * rows * new,
        layers=2.0 * shape.num_linear_parameters * rows * (lengths.prompt + new),
        attention=attention_flops(shape, attended),
        head=2.0 * shape.num_head_parameters * rows * new,
    )


def add_flops(first: PhaseFlops, second: PhaseFlops, times: float = 1.0) -> PhaseFlops:
    """`first` + `times` · `second`."""
    return PhaseFlops(
        **{
            name: getattr(first, name) + times * getattr(second, name)
            for name in PhaseFlops.__dataclass_fields__
        }
    )
