"""FLOPs of a step by phase: as a run records them, and as the device executes them.

A run counts 2 · parameters · tokens (report/costs.py), which compares with published numbers. The
device does less and more than that: prompts of a group are computed once, an embedding is no
matmul, attention and recomputation come on top. Times follow from the latter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from courtside.planning.corrections import (
    Questions,
    Rows,
    count_takeovers,
    list_questions,
    ranks_by_teacher,
)
from courtside.planning.servers import list_teacher_places
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
    student_tokens: float = 0.0
    """Tokens through the student, as budgets count them."""
    teacher_tokens: float = 0.0
    """The same of teachers, the reference and the models of draft stages."""
    calls: float = 0.0
    """To endpoints, which compute elsewhere."""
    endpoint_tokens: float = 0.0
    """In and out of these calls."""

    @property
    def num_tokens(self) -> float:
        return self.input_tokens + self.output_tokens

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
    student = replace(student, student_tokens=student.num_tokens)
    return add_flops(add_flops(student, teacher_rollout_flops(work)), mixed_sampling_flops(work))


def teacher_rollout_flops(work: Workload) -> PhaseFlops:
    """Of the trajectories that the teacher samples."""
    rows, lengths = work.num_teacher_rows, work.lengths
    total = replace(
        _count_teacher(work, rows * lengths.sequence),
        input_tokens=rows * (lengths.sequence - lengths.new),
        output_tokens=rows * lengths.new,
    )
    for place in list_teacher_places(work):
        sampled = sampling_flops(
            place.shape, 0, rows=rows, prompts=rows / work.group_size, work=work
        )
        total = add_flops(total, _only_executed(sampled), place.share)
    return total


def mixed_sampling_flops(work: Workload) -> PhaseFlops:
    """Of the teacher, which decodes what the student samples; a run counts it as input."""
    rows, models, lengths = work.num_mixed_rows, work.models, work.lengths
    prompt = lengths.prompt + lengths.context
    tokens = rows * (prompt + lengths.new)
    shape, attended = models.scorer, rows * (prompt + lengths.new) ** 2 / 2
    return PhaseFlops(
        input_tokens=tokens,
        teacher_tokens=tokens,
        counted=forward_flops(models.num_scorer, 1) * tokens,
        layers=2.0 * shape.num_linear_parameters * tokens,
        attention=attention_flops(shape, attended),
        head=2.0 * shape.num_head_parameters * rows * lengths.new,
    )


# ── draft stages and take-overs ──────────────────────────────────────────────────────────────────


def drafts_flops(work: Workload) -> PhaseFlops:
    """Of draft stages: the teacher's scores of all drafts, questions to it or an endpoint."""
    total = ranking_flops(work)
    for questions in list_questions(work):
        total = add_flops(total, question_flops(work, questions))
    return total


def ranking_flops(work: Workload) -> PhaseFlops:
    """Of `choose` by the teacher's log-probs: all drafts, once more than for the losses."""
    if not ranks_by_teacher(work):
        return PhaseFlops()
    rows, context = work.num_student_rows, work.lengths.context
    total = _count_teacher(work, rows * (work.lengths.sequence + context))
    if work.local_share:
        forward = _forward(work, work.models.scorer, rows, context)
        total = add_flops(total, forward, work.local_share)
    return add_flops(total, served_scoring_flops(work, rows))


def question_flops(work: Workload, questions: Questions) -> PhaseFlops:
    num_input = questions.number * questions.input_tokens
    num_output = questions.number * questions.output_tokens
    if questions.num_concurrent is not None:
        return _ask_flops(calls=questions.number, num_input=num_input, num_output=num_output)
    return _write_flops(work, questions.number, questions.input_tokens, questions.output_tokens)


def _ask_flops(*, calls: float, num_input: float, num_output: float) -> PhaseFlops:
    """Of an endpoint, which computes elsewhere."""
    return PhaseFlops(
        input_tokens=num_input,
        output_tokens=num_output,
        teacher_tokens=num_input + num_output,
        calls=calls,
        endpoint_tokens=num_input + num_output,
    )


def takeover_flops(work: Workload) -> PhaseFlops:
    """Of the teacher's sampling; what it made is scored and trained with the other rows."""
    if (takeovers := count_takeovers(work)) is None:
        return PhaseFlops()
    if takeovers.num_concurrent is not None:
        # Each turn's request has the whole conversation so far.
        before = takeovers.turns * (work.lengths.prompt + takeovers.prefix)
        between = (takeovers.new + takeovers.observed) * (takeovers.turns - 1) / 2
        return _ask_flops(
            calls=takeovers.number * takeovers.turns,
            num_input=takeovers.number * (before + between),
            num_output=takeovers.number * takeovers.new,
        )
    num_input = work.lengths.prompt + work.lengths.context + takeovers.prefix + takeovers.observed
    return _write_flops(work, takeovers.number, num_input, takeovers.new)


def _write_flops(work: Workload, number: float, num_input: float, num_output: float) -> PhaseFlops:
    """Of the teacher, which writes `number` texts after prompts of their own."""
    tokens = number * (num_input + num_output)
    total = _count_teacher(work, tokens)
    for place in list_teacher_places(work):
        shape = place.shape
        executed = PhaseFlops(
            layers=2.0 * shape.num_linear_parameters * tokens,
            attention=attention_flops(shape, tokens * (num_input + num_output) / 2),
            head=2.0 * shape.num_head_parameters * number * num_output,
        )
        total = add_flops(total, executed, place.share)
    return replace(total, input_tokens=number * num_input, output_tokens=number * num_output)


def _count_teacher(work: Workload, num_tokens: float) -> PhaseFlops:
    """Of tokens through the teacher. A run counts the FLOPs of one behind a server by
    `teacher.num_parameters`; a plan of its servers knows its shape."""
    flops = forward_flops(work.num_teacher, 1) * num_tokens
    return PhaseFlops(input_tokens=num_tokens, teacher_tokens=num_tokens, counted=flops)


# ── reader, teacher, update ──────────────────────────────────────────────────────────────────────


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


def served_scoring_flops(work: Workload, num_rows: float) -> PhaseFlops:
    """vLLM computes log-probs of a prompt without its prefix cache: of each sequence all tokens,
    through the LM head too. 0 where the plan has no GPUs of its servers."""
    if work.teacher_servers is None:
        return PhaseFlops()
    shape, rows = work.teacher_servers.shape, num_rows * work.served_share
    length = work.lengths.sequence + work.lengths.context
    return PhaseFlops(
        layers=2.0 * shape.num_linear_parameters * rows * length,
        attention=attention_flops(shape, rows * length**2 / 2),
        head=2.0 * shape.num_head_parameters * rows * length,
    )


def teacher_flops(work: Workload) -> PhaseFlops:
    """Scoring of all trajectories, and of the reference where a loss compares with it."""
    total = add_flops(local_scoring_flops(work), served_scoring_flops(work, work.num_scored_rows))
    if work.recipe.model_teachers:
        tokens = sum(
            rows.number * rows.scored * _num_scored_tokens(work, rows) for rows in work.rows
        )
        total = add_flops(total, _count_teacher(work, tokens))
    if work.recipe.needs_reference:
        tokens = sum(rows.number * rows.length for rows in work.rows)
        counted = forward_flops(work.models.num_student, 1) * tokens
        reference = PhaseFlops(input_tokens=tokens, counted=counted, teacher_tokens=tokens)
        total = add_flops(total, reference)
    return total


def local_scoring_flops(work: Workload) -> PhaseFlops:
    """What this process executes: the passes of its teachers and of the reference."""
    total = PhaseFlops()
    if work.is_scored:
        context = 0.0 if work.recipe.reader else work.lengths.context
        scored = _forward(work, work.models.scorer, work.num_scored_rows, context)
        if work.recipe.reader is not None:
            scored = _branches(work, with_trunk=not work.defers_hints)
        total = add_flops(total, scored, work.local_share)
    if work.recipe.needs_reference:
        total = add_flops(total, _forward(work, work.models.student, work.num_all_rows))
    return total


def _num_scored_tokens(work: Workload, rows: Rows) -> float:
    """Of one row, with context or hints. The update's own pass is the trunk of deferred hints."""
    if work.recipe.reader is not None and not rows.is_sampled:
        return rows.length
    return work.lengths.context + (0.0 if work.defers_hints else rows.length)


def _forward(work: Workload, shape: ModelShape, num_rows: float, extra: float = 0.0) -> PhaseFlops:
    """A forward pass with the logits of every sampled token."""
    return PhaseFlops(
        layers=2.0 * shape.num_linear_parameters * work.num_computed(num_rows, extra),
        attention=attention_flops(shape, work.num_attended(num_rows, extra)),
        head=2.0 * shape.num_head_parameters * num_rows * work.lengths.new,
    )


def _branches(work: Workload, *, with_trunk: bool) -> PhaseFlops:
    """Hints and their turns, over the KV cache of their trajectory."""
    shape, tokens = work.models.scorer, work.num_rows * work.lengths.context
    branches = PhaseFlops(
        layers=2.0 * shape.num_linear_parameters * tokens,
        attention=attention_flops(shape, tokens * work.lengths.sequence / 2),
        head=2.0 * shape.num_head_parameters * tokens,
    )
    num_trunks = work.num_scored_rows if with_trunk else work.num_scored_rows - work.num_rows
    return add_flops(branches, _forward(work, shape, max(0.0, num_trunks)))


def update_flops(work: Workload) -> PhaseFlops:
    """Forward and backward pass, LM head with its divergence, recomputation."""
    models, shape = work.models, work.models.student
    # The last token predicts nothing.
    tokens = sum(rows.number * rows.trained * (rows.length - 1) for rows in work.rows)
    positions = sum(rows.number * rows.trained * rows.num_trained for rows in work.rows)
    num_computed = work.num_computed(work.num_trained_rows)
    forward = 2.0 * shape.num_linear_parameters * num_computed
    attention = attention_flops(shape, work.num_attended(work.num_trained_rows))
    adapter = 2.0 * (models.num_adapter or 0) * num_computed
    weight_gradients = forward if models.num_adapter is None else adapter
    # Logits, gradients of the hidden states and, unless it is frozen, of the head.
    head = (6.0 if models.trains_head else 4.0) * shape.num_head_parameters * positions
    if work.needs_hidden and work.is_scored:
        head += 2.0 * models.scorer.num_head_parameters * positions
    recomputes = work.recipe.student.gradient_checkpointing
    return PhaseFlops(
        input_tokens=tokens,
        student_tokens=tokens,
        counted=training_flops(models.num_student, 1, models.num_trained) * tokens,
        layers=2 * (forward + adapter) + weight_gradients,
        attention=(1 + ATTENTION_BACKWARD + recomputes) * attention,
        head=head,
        recomputed=forward + adapter if recomputes else 0.0,
    )


def evaluation_flops(work: Workload, *, by_teacher: bool) -> PhaseFlops:
    """One evaluation of `evaluate.num_tasks` tasks. A run counts the sampled tokens alone."""
    if not by_teacher:
        return answer_flops(work, work.models.student, work.models.num_student)
    total = PhaseFlops()
    for place in list_teacher_places(work):
        flops = answer_flops(work, place.shape, work.num_teacher)
        total = add_flops(total, flops, place.share)
    return total


def answer_flops(work: Workload, shape: ModelShape, number: int) -> PhaseFlops:
    """Of a model with `number` parameters, which answers the tasks of an evaluation."""
    config, lengths = work.recipe.evaluate, work.lengths
    rows = config.num_tasks * config.samples_per_task
    new = lengths.new if lengths.evaluated is None else lengths.evaluated
    attended = rows * (lengths.prompt**2 / 2 + new * (lengths.prompt + new / 2))
    return PhaseFlops(
        output_tokens=rows * new,
        counted=forward_flops(number, 1) * rows * new,
        layers=2.0 * shape.num_linear_parameters * rows * (lengths.prompt + new),
        attention=attention_flops(shape, attended),
        head=2.0 * shape.num_head_parameters * rows * new,
    )


def _only_executed(flops: PhaseFlops) -> PhaseFlops:
    return PhaseFlops(
        layers=flops.layers,
        attention=flops.attention,
        head=flops.head,
        recomputed=flops.recomputed,
    )


def add_flops(first: PhaseFlops, second: PhaseFlops, times: float = 1.0) -> PhaseFlops:
    """`first` + `times` · `second`."""
    return PhaseFlops(
        **{
            name: getattr(first, name) + times * getattr(second, name)
            for name in PhaseFlops.__dataclass_fields__
        }
    )
