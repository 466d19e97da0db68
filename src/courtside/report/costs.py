"""Costs of each phase of a run: wall-clock seconds, tokens and estimated FLOPs; slow steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import Any

from courtside.types import Evaluation, Scored, TokenUsage, Trajectory, Update

SLOWDOWN_FACTOR = 3
"""How much slower than the run's median a step must be to count as slow."""
SLOWDOWN_STEPS = 2
"""Slow steps in a row: one may just have had long prompts."""


def forward_flops(num_parameters: int, num_tokens: int) -> float:
    """A multiply and an add per parameter and token; attention scores are left out."""
    return 2.0 * num_parameters * num_tokens


def training_flops(num_parameters: int, num_tokens: int, trainable: int) -> float:
    """Forward, backward through the activations, and gradients of the trained weights only."""
    return 2 * forward_flops(num_parameters, num_tokens) + forward_flops(trainable, num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """What one phase (rollout, teacher, update, evaluate) has cost so far."""

    seconds: float = 0.0
    input_tokens: int = 0
    """Tokens of forward passes: prompts, contexts, scored or trained sequences."""
    output_tokens: int = 0
    """Sampled tokens."""
    flops: float = 0.0
    """2 · parameters · tokens for a forward pass, three times that for a trained one."""

    @classmethod
    def parse(cls, tree: Any) -> PhaseCost:
        """From a file; a TypeError or ValueError says what is wrong."""
        if not isinstance(tree, Mapping):
            raise TypeError(f"{tree!r} is no object")
        for name, value in tree.items():
            if type(value) not in (int, float) or not 0 <= value < 1e300:
                raise ValueError(f"{name} = {value!r}")
        return cls(**tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Parameters of the models of a run."""

    student: int
    trained: int
    """Those of the student that train."""
    teachers: Mapping[str, int]
    """By name."""
    reader: int
    """0: unknown, as that of an endpoint."""
    route_of: Callable[[Sequence[str]], str | None] = lambda _tags: None
    """From the tags of a task to the route that its teacher's name begins with; None: no routes."""

    def teacher_of(self, scored: Scored) -> int:
        """Of the teacher that scored a trajectory, or would have if a loss compared with it."""
        if scored.target is not None:
            return self.teachers[scored.target.teacher]
        route = self.route_of(scored.trajectory.task.tags)
        sizes = [n for name, n in self.teachers.items() if name.startswith(f"{route}:")]
        sizes = sizes if route is not None else list(self.teachers.values())
        return sizes[0] if len(sizes) == 1 else self.student


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one training step cost, without evaluations and checkpoints."""

    student_tokens: int = 0
    """Tokens through the student: what it sampled, with prompts, and what it trained on."""
    teacher_tokens: int = 0
    """Tokens through teachers, the reference and the models of draft stages: what they wrote, with
    prompts, and scored."""
    flops: float = 0.0


class CostMeter:
    """Adds up seconds, tokens and FLOPs by phase.

    A nested phase pauses the outer one, so no second is counted twice. GPU work counts in the phase
    that synchronizes with it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._totals: dict[str, PhaseCost] = {}
        self._open: list[str] = []
        self._since = 0.0
        self._at_lap: dict[str, float] = {}

    @property
    def current_phase(self) -> str | None:
        return self._open[-1] if self._open else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def add(
        self, phase: str, *, input_tokens: int = 0, output_tokens: int = 0, flops: float = 0.0
    ) -> None:
        so_far = self._totals.get(phase, PhaseCost())
        self._totals[phase] = replace(
            so_far,
            input_tokens=so_far.input_tokens + input_tokens,
            output_tokens=so_far.output_tokens + output_tokens,
            flops=so_far.flops + flops,
        )

    def add_step(
        self,
        scored: Sequence[Scored],
        update: Update,
        reader_counts: Mapping[str, int],
        *,
        sizes: ModelSizes,
        is_recorded: bool,
        draft_usage: Mapping[str, TokenUsage] = MappingProxyType({}),
    ) -> StepCost:
        """`is_recorded`: the trajectories were not sampled in this step. `draft_usage`: of the
        draft stages, by model; an endpoint's model has an unknown size."""
        size = sizes.student
        num_student = num_teacher = 0
        # Summed by itself: the difference of two totals would depend on the steps before.
        step_flops = 0.0

        def add(phase: str, num_input: int, num_output: int, flops: float) -> None:
            nonlocal step_flops
            step_flops += flops
            self.add(phase, input_tokens=num_input, output_tokens=num_output, flops=flops)

        for s in scored:
            length = len(s.trajectory.token_ids)
            teacher_size = sizes.teacher_of(s)
            # The usage of draft stages and the outcomes of take-overs count theirs.
            is_sampled = s.trajectory.correction not in ("rewrite", "takeover")
            if is_sampled and s.trajectory.source != "dataset" and not is_recorded:
                num_sampled = s.trajectory.num_completion_tokens
                is_student = s.trajectory.source == "student"
                writer_size = size if is_student else teacher_size
                num_student += length if is_student else 0
                num_teacher += 0 if is_student else length
                flops = forward_flops(writer_size, length)
                add("rollout", length - num_sampled, num_sampled, flops)
            if s.trajectory.num_replaced is not None and not is_recorded:
                num_read = length + (s.target.num_context_tokens if s.target else 0)
                num_teacher += num_read
                add("rollout", num_read, 0, forward_flops(teacher_size, num_read))
            if s.target is not None or any(hint.shift is not None for hint in s.hints):
                # The update's own pass is the trunk of deferred hints.
                trunk = 0 if s.deferred else length
                total = trunk + (s.target.num_context_tokens if s.target else 0)
                add("teacher", total, 0, forward_flops(teacher_size, total))
                num_teacher += total
            if s.takeover is not None and s.takeover.teacher is not None:
                # Also what did not train was sampled.
                num_input = s.takeover.num_input_tokens
                num_output = s.takeover.num_sampled_tokens
                size_of_it = sizes.teachers.get(s.takeover.teacher, 0)  # an endpoint's is unknown
                flops = forward_flops(size_of_it, num_input + num_output)
                num_teacher += num_input + num_output
                add("teacher", num_input, num_output, flops)
            if s.reference is not None:
                num_teacher += length
                add("teacher", length, 0, forward_flops(size, length))
            num = _num_forward_tokens(s.trajectory, update.student_logp.get(s.trajectory.id))
            if num:
                num_student += num
                add("update", num, 0, training_flops(size, num, sizes.trained))
        num_input, num_output = (
            reader_counts.get(f"model/{name}", 0) for name in ("input_tokens", "output_tokens")
        )
        if num_input or num_output:
            flops = forward_flops(sizes.reader, num_input + num_output)
            add("reader", num_input, num_output, flops)
        for name, usage in draft_usage.items():
            num_teacher += sum(usage)
            flops = forward_flops(sizes.teachers.get(name, 0), sum(usage))
            add("drafts", usage.input_tokens, usage.output_tokens, flops)
        return StepCost(
            student_tokens=num_student,
            teacher_tokens=num_teacher,
            flops=step_flops,
        )

    def add_evaluation(self, evaluation: Evaluation, sizes: ModelSizes) -> None:
        metrics, size = evaluation.metrics, sizes.student
        num_tokens = round(metrics["length"] * len(evaluation.scores) * metrics["samples"])
        if evaluation.policy == "teacher":  # several teachers share the tasks: about equally
            size = round(sum(sizes.teachers.values()) / len(sizes.teachers))
        self.add("evaluate", output_tokens=num_tokens, flops=forward_flops(size, num_tokens))

    def totals(self) -> dict[str, PhaseCost]:
        self._charge()
        return dict(self._totals)

    def restore(self, totals: Mapping[str, PhaseCost]) -> None:
        """Continue from the totals of an earlier process of the same run."""
        assert not self._totals and not self._open, "restore comes before the first phase"
        self._totals = dict(totals)
        self._at_lap = {name: cost.seconds for name, cost in totals.items()}

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap; phases that did not run are left out."""
        self._charge()
        seconds = {name: cost.seconds for name, cost in self._totals.items()}
        lap = {name: total - self._at_lap.get(name, 0.0) for name, total in seconds.items()}
        self._at_lap = seconds
        return {name: spent for name, spent in lap.items() if spent > 0}

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1]
            so_far = self._totals.get(name, PhaseCost())
            self._totals[name] = replace(so_far, seconds=so_far.seconds + now - self._since)
        self._since = now


def _num_forward_tokens(trajectory: Trajectory, logps: tuple[float, ...] | None) -> int:
    """Length of the prefix in the update's forward pass: up to the last trained token."""
    trained = [i for i, logp in enumerate(logps or ()) if logp == logp]
    if not trained:
        return 0
    positions = [i for i, is_completion in enumerate(trajectory.completion_mask) if is_completion]
    return positions[trained[-1]]


def check_slowdown(rates: Sequence[float], num_threads: int) -> str | None:
    """The note on a run whose tokens per second collapsed in the last two steps; None: no.

    `rates` are those of all steps of this process. It is compared with the run's own median, and
    noted once: when the second slow step in a row follows one that was not slow.
    """
    if len(rates) < SLOWDOWN_STEPS + 3:
        return None
    usual = median(rates[:-SLOWDOWN_STEPS])
    slow = [rate < usual / SLOWDOWN_FACTOR for rate in rates[-SLOWDOWN_STEPS - 1 :]]
    if slow[0] or not all(slow[1:]):
        return None
    note = (
        f"{rates[-1]:.3g} tokens/s, where this run's median is {usual:.3g}: are other processes on "
        "its cores?"
    )
    if num_threads > 1:
        note += " Stop it (Ctrl-C saves) and go on with OMP_NUM_THREADS=1, which often helps then"
    return note
