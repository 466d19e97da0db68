"""One optimizer step from scored trajectories, whatever the losses are.

The student knows no reader, teacher or rollout: what trains follows from the records. This is the
step of one process; `sharded_student.py` has what several do together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import compress, groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from courtside.engines.forward.batching import SequenceSpan, default_pass_tokens
from courtside.engines.forward.forward import (
    ForwardPasses,
    default_chunk_size,
    probe_forward_passes,
)
from courtside.engines.forward.tree_scoring import TrunkCache
from courtside.engines.lm_head import LMHead, find_lm_head
from courtside.engines.patches.fused_layers import find_fused_layers
from courtside.engines.routing import Routers, find_routers
from courtside.errors import NotFiniteError
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.recipe import Recipe
from courtside.recipe.router_validation import LOSS_NAME
from courtside.seeds import seed_for
from courtside.training.cpu_patches import GradientBuffers, RecomputedLayers, make_cpu_patches
from courtside.training.head import CastWeights, backward_through_head
from courtside.training.hint_branches import (
    HarmfulHints,
    complete_targets,
    drop_turns,
    find_harmful_hints,
    uses_dropout,
)
from courtside.training.loss_terms import (
    LossTerm,
    TrainedTokens,
    check_divergences,
    drop_harmful_turns,
    find_trained_tokens,
    make_loss_terms,
    preference_pairs,
)
from courtside.training.metrics import MetricAccumulator, record_losses, step_metrics
from courtside.training.optimizer import make_optimizer
from courtside.training.preference import weigh_preferences
from courtside.training.router_balance import StepRouting
from courtside.training.token_batch import forward_ids, gather_trained, make_token_batch
from courtside.training.weights import StudentWeights
from courtside.types import Scored, Update


class Student:
    caches_cast_weights = True
    """Under autocast each weight is cast once a step, not in each pass."""

    def __init__(
        self,
        weights: StudentWeights,
        recipe: Recipe,
        *,
        vocab_size: int,
        pad_id: int,
        progress: ProgressMeter | None = None,
    ):
        self.progress = progress or ProgressMeter()
        self.weights = weights
        self.head = self.find_head(vocab_size)
        self.recipe = recipe
        self.pad_id = pad_id
        self.optimizer = make_optimizer(weights.trained, recipe)
        self.micro_batch_tokens = recipe.train.micro_batch_tokens
        self.default_pass_tokens = default_pass_tokens(weights.device)
        self.uses_cpu_patches = weights.device.type == "cpu"
        self.chunk = recipe.train.logits_chunk_tokens or default_chunk_size(
            vocab_size, weights.device
        )
        check_divergences(recipe.losses)
        self.batch: Sequence[Scored] = ()
        """Records of the last step of all ranks, by id; empty where there is one process."""
        self._routing: StepRouting | None = None
        """Of a mixture of experts whose routing is recorded."""
        self._cast_weights: CastWeights | None = None
        """Head weights in the matmul dtype, cast once a step on a CPU, where casting is slow."""

    def step(self, step: int, scored: Sequence[Scored]) -> Update:
        """Forward, backward and update over all of `scored`, in micro-batches of any size.

        Without a token to train on, no weight changes and the update counts no tokens.
        """
        terms = self.make_terms(scored)
        rate = self.recipe.learning_rate_at(step)
        metrics, logps = MetricAccumulator(), LogProbs({}, {}, {})
        if any(term.num_tokens for term in terms):
            logps = self.accumulate(step, scored, terms, metrics)
            terms = [drop_harmful_turns(term, scored, logps.harmful) for term in terms]
        if any(term.num_tokens for term in terms):
            self.apply_gradients(step, rate, metrics)
        losses = {term.name: metrics.losses.get(term.name, float("nan")) for term in terms}
        weights = {term.name: term.loss.weight for term in terms}
        if LOSS_NAME in metrics.losses:
            losses[LOSS_NAME] = metrics.losses[LOSS_NAME]
            weights[LOSS_NAME] = self.recipe.student.router_aux_loss_coef
        return Update(
            step=step,
            loss=sum(weights[name] * value for name, value in losses.items() if value == value),
            components=losses,
            metrics={"grad_norm": 0.0, **metrics.means(), **step_metrics(self.recipe, step, terms)},
            num_tokens={term.name: term.num_tokens for term in terms},
            student_logp=logps.student,
            teacher_logp=logps.teacher,
            harmful_turns=logps.harmful,
        )

    def find_head(self, vocab_size: int) -> LMHead:
        return find_lm_head(self.weights.model, vocab_size=vocab_size)

    def make_terms(self, scored: Sequence[Scored]) -> list[LossTerm]:
        recipe = self.recipe
        rewards = dict(zip(recipe.reward_names(), recipe.rewards, strict=True))
        return make_loss_terms(
            recipe.losses, recipe.loss_names(), scored, rewards=rewards, route_of=recipe.route_of
        )

    @torch.enable_grad()  # a module of the user may have switched them off when it was imported
    def accumulate(
        self,
        step: int,
        scored: Sequence[Scored],
        terms: Sequence[LossTerm],
        metrics: MetricAccumulator,
    ) -> LogProbs:
        """Add this step's gradients to the weights.

        Trajectories without a trained token take no part, nor does what follows the last one.
        Log-probs of completion tokens that take no part are NaN.
        """
        logps = DeviceLogProbs({}, {}, {})
        trained = find_trained_tokens(terms)
        with self.training(step):
            batch = [s for s in scored if s.trajectory.id in trained]
            micro_batches = self._micro_batches(batch, trained)
            progress = PhaseProgress(total=len(micro_batches), unit="micro-batches")
            self.progress.phase = progress
            if self.passes.routers is not None:
                self._routing = StepRouting(
                    self.passes.routers,
                    [(s.trajectory.routed_experts, len(forward_ids(s, trained))) for s in batch],
                    coefficient=self.recipe.student.router_aux_loss_coef,
                    exchange=self.exchange,
                    device=self.weights.device,
                )
            for micro in self.each_pass(micro_batches):
                self._micro_batch(micro, terms, trained, metrics, logps)
                progress.finished += 1
        return _copy_to_host(logps, trained)

    def each_pass(self, micro_batches: Sequence[MicroBatch]) -> Iterable[MicroBatch]:
        """The forward and backward passes of a step: one for each micro-batch."""
        return micro_batches

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Around the forward and backward passes of a step: train mode, autocast and patches."""
        device = self.weights.device
        passes = self.passes  # probed before dropout acts and autocast caches a weight
        self.weights.model.train()
        try:
            with (
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
                self._autocast(),  # around all passes
                self._patch_model(passes),
            ):
                # Dropout, the only random operation, is a function of the step.
                torch.manual_seed(self.dropout_seed(step))
                yield
        finally:
            # Cast weights must not outlive the step, which changes the weights; a caller's own
            # autocast around this one would keep them.
            torch.clear_autocast_cache()
            self.weights.model.eval()

    def dropout_seed(self, step: int) -> int:
        return seed_for(self.recipe.seed, "dropout", step)

    @cached_property
    def passes(self) -> ForwardPasses:
        """How trajectories are batched into forward passes."""
        return self.probe_passes()

    def probe_passes(self) -> ForwardPasses:
        model = self.weights.model
        with self._autocast():
            routers = find_routers(model)
            return probe_forward_passes(
                model,
                pad_id=self.pad_id,
                fused_layers=find_fused_layers(model, self.head, self.weights.autocast),
                uses_dropout=uses_dropout(model),
                routers=routers if isinstance(routers, Routers) else None,
            )

    def exchange(self, value: Any) -> list[Any]:
        """That of each process."""
        return [value]

    @contextmanager
    def _patch_model(self, passes: ForwardPasses) -> Iterator[None]:
        """Inside autocast. On a CPU also preallocated gradients and shadow weights, which do not
        fragment the heap; a GPU's caching allocator does without."""
        if not self.uses_cpu_patches:
            with passes.patch_model():
                yield
            return
        self._cast_weights = {}
        buffers = self._gradient_buffers
        model, head = self.weights.model, self.head.module
        patches = make_cpu_patches(model, head, buffers, self._recomputed)
        try:
            with buffers.collect(), passes.patch_model(patches):
                yield
        finally:
            self._cast_weights = None

    @cached_property
    def _gradient_buffers(self) -> GradientBuffers:
        return GradientBuffers(self.weights.trained.values())

    @cached_property
    def _recomputed(self) -> RecomputedLayers:
        return RecomputedLayers(self.weights.model)

    def _autocast(self, *, cache: bool = True) -> Any:
        dtype = self.weights.autocast
        return torch.autocast(
            self.weights.device.type,
            dtype=dtype or torch.bfloat16,
            enabled=dtype is not None,
            cache_enabled=cache and self.caches_cast_weights,
        )

    def _micro_batches(
        self, scored: Sequence[Scored], trained: TrainedTokens
    ) -> list[list[Scored]]:
        """The two members of a preference pair stay together."""
        units: list[tuple[Scored, ...]] = [*preference_pairs(scored)]
        paired = {s.trajectory.id for pair in units for s in pair}
        units += [(s,) for s in scored if s.trajectory.id not in paired]
        keys = self.passes.sharing_keys(
            [forward_ids(s, trained) for unit in units for s in unit],
            [s.trajectory.routed_experts for unit in units for s in unit],
            replays=self.recipe.student.router_replay,
        )
        remaining = iter(keys)
        batches = self.passes.plan_batches(
            [[*islice(remaining, len(unit))] for unit in units],
            self.micro_batch_tokens or self.default_pass_tokens,
            max_shared_tokens=self.micro_batch_tokens,  # a user's limit holds
            for_backward=True,
        )
        # Targets of one teacher are neighbors, teachers in the order of their first appearance:
        # an order by address would differ between processes.
        heads = list(dict.fromkeys(_head_key(s) for s in scored))
        return [
            sorted((s for i in batch for s in units[i]), key=lambda s: heads.index(_head_key(s)))
            for batch in batches
        ]

    def _micro_batch(
        self,
        micro: MicroBatch,
        terms: Sequence[LossTerm],
        trained: TrainedTokens,
        metrics: MetricAccumulator,
        logps: DeviceLogProbs,
    ) -> None:
        """One forward and backward pass; adds its log-probs to `logps`."""
        hidden_ND, micro, spans, harmful = self._forward(micro, trained)
        balance = None if self._routing is None else self._routing.finish_forward(metrics)
        logps.teacher.update(
            {s.trajectory.id: s.target.logp_T for s in micro if s.deferred and s.target}
        )
        remaining = trained
        if harmful:  # positions are selected before a loss, not masked after it
            turns = {id: hints.turns for id, hints in harmful.items()}
            logps.harmful.update(turns)
            terms = [drop_harmful_turns(term, micro, turns) for term in terms]
            remaining = find_trained_tokens(terms)
            on = [s.trajectory.id in remaining for s in micro]
            micro = [drop_turns(s, turns) for s in compress(micro, on)]
            spans = list(compress(spans, on))
        if micro:
            logps.student.update(
                self._backward(hidden_ND, micro, spans, terms, remaining, metrics, balance)
            )
        elif balance is not None:
            balance.backward()
        for id, hints in harmful.items():
            logps.student[id] = _merge_logps(
                hints, logps.student.get(id), remaining.get(id), trained[id]
            )

    def _backward(
        self,
        pass_hidden_ND: Tensor,
        micro: Sequence[Scored],
        spans: Sequence[SequenceSpan],
        terms: Sequence[LossTerm],
        trained: TrainedTokens,
        metrics: MetricAccumulator,
        balance: Tensor | None,
    ) -> dict[str, Tensor]:
        """Losses and gradients of a pass. By trajectory id: log-probs of the trained tokens."""
        hidden_ND = gather_trained(pass_hidden_ND, spans, micro, trained)
        counts = {s.trajectory.id: sum(trained[s.trajectory.id]) for s in micro}
        hidden = dict(zip(counts, hidden_ND.split(list(counts.values())), strict=True))
        terms = [
            weigh_preferences(term, micro, hidden, self.head, chunk=self.chunk, metrics=metrics)
            if term.loss.kind == "preference"
            else term
            for term in terms
        ]
        gradients, logps, start = [], [], 0
        for _, grouped in groupby(micro, key=_head_key):
            group = list(grouped)
            end = start + sum(counts[s.trajectory.id] for s in group)
            tokens = make_token_batch(group, terms, hidden_ND[start:end], trained)
            gradient_ND, logp_N, losses = backward_through_head(
                tokens, self.head, terms, chunk=self.recipe.train.logits_chunk_tokens,
                cast_weights=self._cast_weights,
            )  # fmt: skip
            record_losses(losses, metrics)
            gradients.append(gradient_ND)
            logps.append(logp_N)
            start = end
        if balance is None:
            hidden_ND.backward(torch.cat(gradients))
        else:
            torch.autograd.backward(
                [hidden_ND, balance], [torch.cat(gradients), torch.ones_like(balance)]
            )
        return dict(zip(counts, torch.cat(logps).split(list(counts.values())), strict=True))

    def _forward(self, micro: Sequence[Scored], trained: TrainedTokens) -> MicroBatchForward:
        """Deferred hints are scored over the pass's KV cache."""
        trunks = TrunkCache() if any(s.deferred for s in micro) else None
        ids = [forward_ids(s, trained) for s in micro]
        hidden_ND, spans = self.passes.forward(
            ids,
            cache=trunks,
            records=[s.trajectory.routed_experts for s in micro],
            replays=self.recipe.student.router_replay,
        )
        harmful: dict[str, HarmfulHints] = {}
        if trunks is not None:
            # Some versions of torch would cache a cast weight without its graph.
            with self._autocast(cache=False):
                micro = complete_targets(
                    self.passes, self.head, micro, spans, trunks,
                    max_tokens=self.default_pass_tokens,
                )  # fmt: skip
                if self.recipe.hints.harmful == "drop":
                    harmful = find_harmful_hints(self.head, micro, hidden_ND, spans, trained)
        return MicroBatchForward(hidden_ND, micro, spans, harmful)

    def clip_gradients(self) -> Tensor:
        """Returns their norm before."""
        return torch.nn.utils.clip_grad_norm_(
            self.weights.trained.values(), self.recipe.train.max_grad_norm
        )

    def apply_gradients(self, step: int, rate: float, metrics: MetricAccumulator) -> None:
        """Clip the gradients and update the weights, unless a loss or gradient is not finite."""
        metrics.mean("grad_norm", self.clip_gradients())  # copied to the host with the others
        bad = [name for name, value in metrics.losses.items() if not math.isfinite(value)]
        if bad or not math.isfinite(metrics.means()["grad_norm"]):
            self.optimizer.zero_grad(set_to_none=True)
            what = f"loss {bad[0]!r}" if bad else "gradient"
            raise NotFiniteError(f"step {step}: the {what} is not finite; no weight was changed")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


MicroBatch = Sequence[Scored]


class MicroBatchForward(NamedTuple):
    hidden_ND: Tensor
    """Hidden states of the whole pass, with their graph."""
    micro: Sequence[Scored]
    """With the targets of deferred hints."""
    spans: Sequence[SequenceSpan]
    harmful: Mapping[str, HarmfulHints]


class DeviceLogProbs(NamedTuple):
    """By trajectory id."""

    student: dict[str, Tensor]
    """Of the tokens that a loss term selected before their pass."""
    teacher: dict[str, Tensor]
    harmful: dict[str, frozenset[int]]


class LogProbs(NamedTuple):
    """By trajectory id."""

    student: dict[str, tuple[float, ...]]
    """Of the completion tokens."""
    teacher: dict[str, tuple[float, ...]]
    """Of the targets that the update scored itself."""
    harmful: dict[str, frozenset[int]]
    """Turns that trained nothing, as their hints make them more likely."""


def _merge_logps(
    harmful: HarmfulHints,
    trained_logp_T: Tensor | None,
    trained: Sequence[bool] | None,
    selected: Sequence[bool],
) -> Tensor:
    """Log-probs of the `selected` completion tokens: those of harmful turns, which were measured
    without a graph, and those that trained."""
    row_of = {i: row for row, i in enumerate(i for i, on in enumerate(selected) if on)}
    logp_T = harmful.plain_logp_T.new_empty(len(row_of))
    logp_T[[row_of[i] for i in harmful.token_indices]] = harmful.plain_logp_T
    if trained_logp_T is not None and trained is not None:
        rows = [row_of[i] for i, on in enumerate(trained) if on]
        logp_T[rows] = trained_logp_T.to(logp_T.dtype)
    return logp_T


def _copy_to_host(logps: DeviceLogProbs, trained: TrainedTokens) -> LogProbs:
    """In one copy at the end of a step: one synchronization with a GPU, not one a pass."""
    parts = [*logps.student.values(), *logps.teacher.values()]
    values = iter(torch.cat(parts).tolist() if parts else [])
    student = {
        id: tuple(next(values) if trains else math.nan for trains in trained[id])
        for id in logps.student
    }
    teacher = {id: tuple(islice(values, len(logp_T))) for id, logp_T in logps.teacher.items()}
    return LogProbs(student, teacher, logps.harmful)


def _head_key(s: Scored) -> int:
    """Equal for targets with one LM head; the same before and after deferred ones are scored."""
    if s.deferred is not None:
        return -1 if s.deferred.needs_hidden else 0
    return 0 if s.target is None or s.target.head is None else id(s.target.head)
