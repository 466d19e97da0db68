"""One optimiser step from scored trajectories, whatever the losses are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from courtside.engines.forward.batching import default_pass_tokens
from courtside.engines.forward.forward import ForwardPasses, probe_forward_passes
from courtside.engines.forward.logprobs import default_chunk_size
from courtside.engines.forward.tree_scoring import make_trunk_cache
from courtside.engines.lm_head import find_lm_head
from courtside.engines.patches.fused_layers import find_fused_layers, find_lean_layers
from courtside.engines.patches.patch import Patch, apply_patches
from courtside.engines.transfer import tensor_on
from courtside.errors import NotFiniteError, RunError
from courtside.losses.preference import dpo, dpo_token_weights
from courtside.recipe import Recipe
from courtside.seeds import seed_for
from courtside.training.cpu.bf16_linear import use_bf16_linear
from courtside.training.cpu.gradient_buffers import GradientBuffers, use_gradient_buffers
from courtside.training.head.fused import Heads, backward_through_head
from courtside.training.hint_branches import (
    branch_logprobs,
    fill_targets,
    has_open_branches,
    uses_dropout,
)
from courtside.training.loss_terms import (
    LossTerm,
    find_trained_tokens,
    make_loss_terms,
    preference_pairs,
)
from courtside.training.metrics import MetricAccumulator
from courtside.training.optimizer import learning_rate_at, make_optimizer
from courtside.training.token_batch import make_token_batch
from courtside.training.weights import StudentWeights
from courtside.types import Scored, Trajectory, Update


class Student:
    def __init__(self, weights: StudentWeights, recipe: Recipe, *, vocab_size: int, pad_id: int):
        self.weights = weights
        self.head = find_lm_head(weights.model, vocab_size=vocab_size)
        self.recipe = recipe
        self.pad_id = pad_id
        self.optimizer = make_optimizer(weights.trained(), recipe)
        self.micro_batch_tokens = recipe.train.micro_batch_tokens
        self.chunk = recipe.train.logits_chunk_tokens or default_chunk_size(
            vocab_size, weights.device
        )
        self._heads: Heads | None = None
        """Rounded once a step, where rounding takes long: on a CPU."""

    def step(self, step: int, scored: Sequence[Scored]) -> Update:
        """Forward, backward and update over all of `scored`, in micro-batches of any size."""
        parts = make_loss_terms(self.recipe.losses, self.recipe.loss_names(), scored)
        rate = learning_rate_at(step, self.recipe)
        if not any(part.denominator for part in parts):
            if self._is_without_mistake(step, scored):
                return _nothing_to_correct(step, parts, rate)
            raise RunError(
                f"step {step}: no trajectory has anything to train on (of {len(scored)}, "
                f"{sum(s.target is None for s in scored)} have no teacher). An empty batch is "
                "not a zero loss. Look at the tasks, the teacher's context and each loss's `on`"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        metrics = MetricAccumulator()
        found_logp = self.accumulate(step, scored, parts, metrics)
        self._clip(step, metrics)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        found = metrics.losses
        values = {p.name: found.get(p.name, float("nan")) for p in parts}
        weights = {p.name: p.loss.weight for p in parts}
        return Update(
            step=step,
            loss=sum(weights[name] * value for name, value in values.items() if value == value),
            components=values,
            metrics={**metrics.means(), "learning_rate": rate},
            num_tokens={p.name: p.num_tokens for p in parts},
            student_logp=found_logp.student,
            teacher_logp=found_logp.teacher,
        )

    def _is_without_mistake(self, step: int, scored: Sequence[Scored]) -> bool:
        """Whether there is nothing to train on because nothing had to be corrected: a reader gave
        no hint, or none that still does enough to be kept, or all losses are on corrected turns and
        no turn went wrong."""
        if self.recipe.reader is not None:
            hints = [hint for s in scored for hint in s.hints]
            # A threshold that lets nothing pass from the start is a mistake in the recipe; later on
            # a batch may have only hints that the student no longer needs.
            return not hints or (step > 0 and all(hint.dropped is not None for hint in hints))
        imitates = all(loss.on == "dataset" for loss in self.recipe.losses)
        if not (scored and imitates and self.recipe.rollout.corrections):
            return False
        num_wrong = sum(bool(turn.events) for s in scored for turn in s.trajectory.turns)
        if num_wrong:
            raise RunError(
                f"step {step}: {num_wrong} turns went wrong, and the environment says of none what "
                "would have been right, so rollout.corrections has nothing to imitate. Put it into "
                "the events' details as `correct`, or remove rollout.corrections"
            )
        return True

    def accumulate(
        self,
        step: int,
        scored: Sequence[Scored],
        parts: Sequence[LossTerm],
        metrics: MetricAccumulator,
    ) -> Logps:
        """Add this step's gradients to the weights; returns log-probs by id.

        Trajectories that no loss looks at are left out; so is what follows the last token that
        one does. Log-probs of tokens in between that none looks at are NaN.
        """
        student: dict[str, Tensor] = {}
        teacher: dict[str, Tensor] = {}
        trained = find_trained_tokens(parts)
        with self.training(step):
            looked_at = [s for s in scored if s.trajectory.id in trained]
            for micro in self._micro_batches(looked_at, trained):
                found, told = self._micro_batch(micro, parts, trained, metrics)
                student.update(found)
                teacher.update(told)
        return _on_host(student, teacher, trained)

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Around the passes of a step: as they train, in mode, numbers and attention."""
        # Tried out, the first time, before dropout acts and anything rounded would be kept.
        passes, _ = self.passes, self._lean_layers
        self.weights.model.train()
        try:
            with (
                torch.random.fork_rng(devices=_devices(self.weights.device)),
                passes.patch_model(),
                self._casting(),  # around all passes: each weight is rounded once a step
                self._in_place(),
            ):
                # Dropout, the only random thing here, follows from the step as everything does.
                torch.manual_seed(seed_for(self.recipe.seed, "dropout", step))
                yield
        finally:
            # What was rounded must not outlive the step, which changes the weights: also where
            # somebody's own autocast is around this one, which would keep it.
            torch.clear_autocast_cache()
            self.weights.model.eval()

    @cached_property
    def passes(self) -> ForwardPasses:
        """How trajectories become passes of the model; its `problem` says why they are padded."""
        with self._casting():
            model = self.weights.model
            parts = find_fused_layers(model, self.head, self.weights.autocast)
            return probe_forward_passes(
                model, pad_id=self.pad_id, fused_layers=parts, uses_dropout=uses_dropout(model)
            )

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """On a CPU: gradients and rounded weights where they leave no holes, and layers that keep
        little. A GPU has an allocator that sees to the one, and kernels for the other."""
        if self.weights.device.type != "cpu":
            yield
            return
        model, trained = self.weights.model, self.weights.trained().values()
        self._heads = {}
        try:
            with (
                apply_patches(self._lean_layers),
                use_gradient_buffers(model, self._rooms, trained),
                use_bf16_linear(model, self.head.module, self._rooms),
            ):
                yield
        finally:
            self._heads = None

    @cached_property
    def _rooms(self) -> GradientBuffers:
        return GradientBuffers(self.weights.trained().values())

    @cached_property
    def _lean_layers(self) -> list[Patch]:
        model = self.weights.model
        return find_lean_layers(model) if model.device.type == "cpu" else []

    def _casting(self, *, anew: bool = False) -> Any:
        """`anew`: without using or keeping rounded weights."""
        autocast = self.weights.autocast
        return torch.autocast(
            self.weights.device.type,
            dtype=autocast or torch.bfloat16,
            enabled=autocast is not None,
            cache_enabled=not anew,
        )

    def _micro_batches(self, scored: Sequence[Scored], trained: Trained) -> list[list[Scored]]:
        """The two members of a preference pair stay together."""
        units: list[tuple[Scored, ...]] = [*preference_pairs(scored)]
        units += [(s,) for s in scored if s.trajectory.preference is None]
        batches = self.passes.plan_batches(
            [[_read(s, trained) for s in unit] for unit in units],
            self.micro_batch_tokens or default_pass_tokens(self.weights.device),
            max_shared_tokens=self.micro_batch_tokens,  # what was asked for is kept to
            for_backward=True,
        )
        # One teacher after the other, so that each teacher's rows lie together; in the order of
        # their first appearance, because an order by address would differ between processes.
        heads = list(dict.fromkeys(_head_id(s) for s in scored))
        return [
            sorted((s for i in batch for s in units[i]), key=lambda s: heads.index(_head_id(s)))
            for batch in batches
        ]

    def _micro_batch(
        self,
        micro: Sequence[Scored],
        parts: Sequence[LossTerm],
        trained: Trained,
        metrics: MetricAccumulator,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """One forward and backward pass; log-probs of the trained tokens by trajectory, and what
        the teacher said in it."""
        hidden_ND, micro = self._hidden(micro, trained)
        counts = {s.trajectory.id: sum(trained[s.trajectory.id]) for s in micro}
        hidden = dict(zip(counts, hidden_ND.split(list(counts.values())), strict=True))
        parts = [self._with_coefficients(part, micro, hidden, metrics) for part in parts]
        gradients, logps, start = [], [], 0
        for group in _by_head(micro):
            end = start + sum(counts[s.trajectory.id] for s in group)
            rows = make_token_batch(group, parts, hidden_ND[start:end], trained)
            gradient_ND, logp_N = backward_through_head(
                rows, self.head, parts, chunk=self.recipe.train.logits_chunk_tokens,
                metrics=metrics, heads=self._heads,
            )  # fmt: skip
            gradients.append(gradient_ND)
            logps.append(logp_N)
            start = end
        hidden_ND.backward(torch.cat(gradients))
        by_trajectory = torch.cat(logps).split(list(counts.values()))
        return dict(zip(counts, by_trajectory, strict=True)), branch_logprobs(micro)

    def _hidden(self, micro: Sequence[Scored], trained: Trained) -> tuple[Tensor, Sequence[Scored]]:
        """Hidden states that predict the trained tokens, in order, with their graph. Hints that
        are read over the same pass fill their targets."""
        kept = make_trunk_cache() if has_open_branches(micro) else None
        hidden_ND, lying = self.passes.forward([_read(s, trained) for s in micro], cache=kept)
        if kept is not None:
            # Some versions of torch keep a weight without a graph that was first rounded so.
            with self._casting(anew=True):
                micro = fill_targets(
                    self.weights.model, self.head, micro, lying, kept,
                    max_tokens=default_pass_tokens(self.weights.device),
                )  # fmt: skip
        places = [_places(s, trained) for s in micro]
        assert all(its[0] > 0 for its in places), "nothing predicts the first token"
        before = (place.of(i - 1 for i in its) for place, its in zip(lying, places, strict=True))
        before_N = tensor_on([*chain(*before)], dtype=torch.long, device=hidden_ND.device)
        return hidden_ND.index_select(0, before_N), micro

    @torch.no_grad()
    def _with_coefficients(
        self,
        part: LossTerm,
        micro: Sequence[Scored],
        hidden: Mapping[str, Tensor],
        metrics: MetricAccumulator,
    ) -> LossTerm:
        """DPO as a stream of per-token coefficients: its gradient, with no graph across chunks."""
        if part.loss.kind != "preference":
            return part
        coefficient: dict[str, tuple[float, ...]] = {}
        for (better, worse), sums in self._pair_sums(micro, hidden):
            weight = float(dpo_token_weights(*sums, beta=part.loss.beta))
            # The sign: better tokens rise, worse ones fall.
            for one, signed in ((better, -weight), (worse, weight)):
                coefficient[one.trajectory.id] = (signed,) * one.trajectory.num_chosen
            metrics.add_loss(part.name, dpo(*sums, beta=part.loss.beta) / part.denominator)
            won = sums[0] - sums[2] > sums[1] - sums[3]
            metrics.mean(f"{part.name}/accuracy", won)
        return replace(part, advantage=coefficient)

    def _pair_sums(
        self, micro: Sequence[Scored], hidden: Mapping[str, Tensor]
    ) -> Iterator[tuple[tuple[Scored, Scored], Tensor]]:
        """Of each pair Σ log π of the better and the worse, and both again under the reference."""
        found = preference_pairs(micro)
        sums = []
        for pair in found:
            sums += [self._log_likelihood(s.trajectory, hidden[s.trajectory.id]) for s in pair]
            for s in pair:
                assert s.reference is not None
                sums.append(s.reference.logp_T.double().sum().to(sums[0].device))
        if sums:  # read back in one piece
            yield from zip(found, torch.stack(sums).cpu().view(-1, 4), strict=True)

    def _log_likelihood(self, trajectory: Trajectory, hidden_TD: Tensor) -> Tensor:
        """Σ log π of its chosen tokens."""
        ids_T = tensor_on(trajectory.chosen_ids, dtype=torch.long, device=hidden_TD.device)
        total = hidden_TD.new_zeros((), dtype=torch.float64)
        for part_ND, ids_N in zip(
            hidden_TD.split(self.chunk), ids_T.split(self.chunk), strict=True
        ):
            logp_NV = (self.head(part_ND) / trajectory.temperature).log_softmax(-1)
            total += logp_NV.gather(-1, ids_N[:, None]).double().sum()
        return total

    def _clip(self, step: int, metrics: MetricAccumulator) -> None:
        norm = torch.nn.utils.clip_grad_norm_(
            self.weights.trained().values(), self.recipe.train.max_grad_norm
        )
        metrics.mean("grad_norm", norm)  # so that it is read with the rest
        bad = [name for name, value in metrics.losses.items() if not math.isfinite(value)]
        if bad or not math.isfinite(metrics.means()["grad_norm"]):
            self.optimizer.zero_grad(set_to_none=True)
            what = f"loss {bad[0]!r}" if bad else "gradient"
            raise NotFiniteError(f"step {step}: the {what} is not finite; no weight was changed")


Trained = Mapping[str, tuple[bool, ...]]
"""By trajectory id: which of its chosen tokens a loss looks at."""


def _places(s: Scored, trained: Trained) -> list[int]:
    """Where in the trajectory its trained tokens stand."""
    chosen = (i for i, chosen in enumerate(s.trajectory.chosen) if chosen)
    return [i for i, wanted in zip(chosen, trained[s.trajectory.id], strict=True) if wanted]


def _read(s: Scored, trained: Trained) -> tuple[int, ...]:
    """The trajectory up to the last id that predicts a trained one."""
    return s.trajectory.token_ids[: _places(s, trained)[-1]]


class Logps(NamedTuple):
    """By trajectory id."""

    student: dict[str, tuple[float, ...]]
    """Of the chosen tokens."""
    teacher: dict[str, tuple[float, ...]]
    """Of those that a target speaks of, where the update itself read its branches."""


def _on_host(
    student: Mapping[str, Tensor], teacher: Mapping[str, Tensor], trained: Trained
) -> Logps:
    """In one piece, at the end of a step: a GPU is waited for once and not in every pass."""
    parts = [*student.values(), *teacher.values()]
    if not parts:
        return Logps(student={}, teacher={})
    values = iter(torch.cat(parts).cpu().split([len(logp_N) for logp_N in parts]))
    return Logps(
        student={id: tuple(_in_place(next(values).tolist(), trained[id])) for id in student},
        teacher={id: tuple(next(values).tolist()) for id in teacher},
    )


def _in_place(values: Sequence[float], mask: Sequence[bool]) -> Iterator[float]:
    """`values` where the mask is True, NaN elsewhere."""
    found = iter(values)
    return (next(found) if wanted else math.nan for wanted in mask)


def _nothing_to_correct(step: int, parts: Sequence[LossTerm], rate: float) -> Update:
    """There was no mistake in the whole batch: that is no error, and no step."""
    return Update(
        step=step,
        loss=0.0,
        components={part.name: float("nan") for part in parts},
        metrics={"grad_norm": 0.0, "learning_rate": rate},
        num_tokens={part.name: 0 for part in parts},
        student_logp={},
    )


def _head_id(s: Scored) -> int:
    return 0 if s.target is None or s.target.head is None else id(s.target.head)


def _by_head(micro: Sequence[Scored]) -> list[list[Scored]]:
    groups: list[list[Scored]] = []
    for s in micro:
        if groups and _head_id(groups[-1][-1]) == _head_id(s):
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
