"""From a recipe's losses to loss terms: which tokens each trains on, with which weights.

Everything here is decided for a whole optimizer step, before it is split into micro-batches:
denominators and group-relative advantages must not depend on the split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from courtside.errors import RecipeError, TaskError
from courtside.losses.fused.types import DivergenceSpec, Support
from courtside.losses.policy_gradient import group_advantage
from courtside.recipe.losses import DivergenceLoss, Loss, PolicyGradientLoss
from courtside.types import Scored, Trajectory

TrainedTokens = Mapping[str, tuple[bool, ...]]
"""By trajectory id: which of its completion tokens train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One loss of the recipe, for one optimizer step."""

    name: str
    loss: Loss
    weight: Mapping[str, tuple[float, ...]]
    """By trajectory id: weight of each completion token in this loss's mean, 0 where it does not
    train. Trajectories without trained tokens are left out."""
    denominator: int
    """Trained tokens over the whole step and those of harmful hints, or turns; for preferences,
    pairs."""
    advantage: Mapping[str, tuple[float, ...]]
    """By trajectory id, per completion token: the advantage from rewards, or a preference's
    coefficient, which `Student` computes."""

    def __post_init__(self) -> None:
        if self.num_tokens:
            assert self.denominator > 0, "tokens without a denominator: count the whole step's"

    @property
    def num_tokens(self) -> int:
        return sum(w > 0 for weights in self.weight.values() for w in weights)

    @property
    def divergence(self) -> DivergenceSpec:
        assert self.loss.kind == "divergence"
        return divergence_spec(self.loss)


def divergence_spec(loss: DivergenceLoss) -> DivergenceSpec:
    support = None
    if loss.support.kind == "top_k":
        support = Support(k=loss.support.k, of=loss.support.of, form=loss.support.form)
    parameters = tuple(sorted(loss.divergence_parameters.items()))
    return _find_divergence(loss.divergence, parameters, support, loss.clip)


@cache
def _find_divergence(
    name: str,
    parameters: tuple[tuple[str, float], ...],
    support: Support | None,
    clip: float | None,
) -> DivergenceSpec:
    """Looked up, imported and checked once."""
    return DivergenceSpec(name=name, parameters=dict(parameters), support=support, clip=clip)


def check_divergences(losses: Sequence[Loss]) -> None:
    """Import and check divergences that are not of this package before a run starts."""
    for index, loss in enumerate(losses):
        if loss.kind == "divergence":
            try:
                divergence_spec(loss)
            except ValueError as error:
                raise RecipeError(f"losses[{index}]: {error}") from error


def make_loss_terms(
    losses: Sequence[Loss], names: Sequence[str], scored: Sequence[Scored]
) -> list[LossTerm]:
    result = []
    for loss, name in zip(losses, names, strict=True):
        masks = {s.trajectory.id: mask for s in scored if any(mask := select_tokens(loss, s))}
        on = [s for s in scored if s.trajectory.id in masks]
        weight = {id: tuple(map(float, mask)) for id, mask in masks.items()}
        denominator = sum(sum(mask) for mask in masks.values())
        if loss.normalize == "turn":
            weight, denominator = _by_turn(on, masks)
        term = LossTerm(
            name=name,
            loss=loss,
            weight=weight,
            denominator=len(preference_pairs(on)) if loss.kind == "preference" else denominator,
            advantage=_advantages(loss, on),
        )
        harmful = {s.trajectory.id: turns for s in on if (turns := s.harmful_turns)}
        result.append(drop_harmful_turns(term, on, harmful))
    return result


def drop_harmful_turns(
    term: LossTerm, scored: Sequence[Scored], harmful: Mapping[str, Collection[int]]
) -> LossTerm:
    """The term with weight 0 on turns that their hints make more likely; `harmful`: by trajectory
    id. The denominator still counts them: whether they were measured before the update or inside
    it, and however many there are, the other hints weigh the same."""
    if term.loss.on != "hinted_turns" or not harmful:
        return term
    weight = dict(term.weight)
    for s in scored:
        id = s.trajectory.id
        if id in harmful and id in weight:
            turns = zip(s.trajectory.turn_of, weight.pop(id), strict=True)
            remaining = tuple(0.0 if turn in harmful[id] else w for turn, w in turns)
            if any(remaining):
                weight[id] = remaining
    return replace(term, weight=weight)


def select_tokens(loss: Loss, scored: Scored) -> tuple[bool, ...]:
    """Which completion tokens of a trajectory the loss averages over: those that have what it
    needs, and those of harmful hints, which then train nothing."""
    trajectory = scored.trajectory
    none, all_ = ((value,) * trajectory.num_completion_tokens for value in (False, True))
    if loss.kind == "preference":
        return all_ if trajectory.preference is not None else none
    if trajectory.pair is not None:
        return none  # its tokens are those of trajectories that train elsewhere
    if loss.on in ("student", "teacher", "dataset") and loss.on != trajectory.source:
        return none
    if loss.kind == "cross_entropy" and trajectory.preference == "worse":
        return none
    if loss.kind == "policy_gradient" and trajectory.source == "dataset":
        return none  # not sampled, so it has no sampling probability
    where = all_
    if loss.on in ("hinted_turns", "unhinted_turns"):
        hinted = {j.hint.turn for j in scored.hints if j.drop_reason in (None, "harmful")}
        where = tuple((t in hinted) == (loss.on == "hinted_turns") for t in trajectory.turn_of)
    if loss.kind == "divergence" and loss.against == "reference":
        return where if scored.reference is not None else none
    if loss.kind == "divergence" or (
        loss.kind == "policy_gradient" and loss.advantage == "teacher_gap"
    ):
        harmful = scored.harmful_turns
        columns = zip(where, scored.target_mask, trajectory.turn_of, strict=True)
        return tuple(on and (has_target or turn in harmful) for on, has_target, turn in columns)
    return where


def _by_turn(
    on: Sequence[Scored], masks: Mapping[str, tuple[bool, ...]]
) -> tuple[dict[str, tuple[float, ...]], int]:
    """Every turn counts 1, spread over its trained tokens."""
    weight, num_turns = {}, 0
    for s in on:
        mask = masks[s.trajectory.id]
        turns = s.trajectory.turn_of
        sizes = Counter(turn for turn, trained in zip(turns, mask, strict=True) if trained)
        weight[s.trajectory.id] = tuple(
            1 / sizes[turn] if trained else 0.0 for turn, trained in zip(turns, mask, strict=True)
        )
        num_turns += len(sizes)
    return weight, num_turns


def find_trained_tokens(terms: Sequence[LossTerm]) -> dict[str, tuple[bool, ...]]:
    """By trajectory id: which completion tokens any loss trains on; others need no logits."""
    trained: dict[str, tuple[bool, ...]] = {}
    for term in terms:
        for id, weights in term.weight.items():
            before = trained.get(id, (False,) * len(weights))
            trained[id] = tuple(a or w > 0 for a, w in zip(before, weights, strict=True))
    return trained


def preference_pairs(scored: Sequence[Scored]) -> list[tuple[Scored, Scored]]:
    """(better, worse) of each preference pair: those that share `pair`, else their task. A task
    that is in the batch twice has two pairs."""
    sides: dict[tuple[str | None, str], tuple[list[Scored], list[Scored]]] = {}
    for s in scored:
        if s.trajectory.preference is not None:
            key = (s.trajectory.pair, s.trajectory.task.id)
            better, worse = sides.setdefault(key, ([], []))
            (better if s.trajectory.preference == "better" else worse).append(s)
    return [pair for two in sides.values() for pair in zip(*two, strict=True)]


# ── rewards ──────────────────────────────────────────────────────────────────────────────────────


def _advantages(loss: Loss, on: Sequence[Scored]) -> Mapping[str, tuple[float, ...]]:
    if loss.kind != "policy_gradient" or loss.advantage != "reward" or not on:
        return {}
    # An episode that a bug of its environment ended has no reward, and is not compared.
    faulty = {s.trajectory.id: s for s in on if s.trajectory.fault is not None}
    on = [s for s in on if s.trajectory.id not in faulty]
    whole = _rewards(loss, on)
    penalty = _penalties(loss, on)
    return {id: (0.0,) * s.trajectory.num_completion_tokens for id, s in faulty.items()} | {
        s.trajectory.id: tuple(
            whole[s.trajectory.id] + penalty.get((s.trajectory.id, turn), 0.0)
            for turn in s.trajectory.turn_of
        )
        for s in on
    }


def _rewards(loss: PolicyGradientLoss, on: Sequence[Scored]) -> Mapping[str, float]:
    rewards = []
    for s in on:
        if s.trajectory.grade is None:
            raise TaskError(
                f"task {s.trajectory.task.id} has no grader, so it gives no reward. Name a grader "
                "on the tasks, or use advantage = 'teacher_gap'"
            )
        rewards.append(s.trajectory.grade.score)
    task_ids = sorted({s.trajectory.task.id for s in on})
    number = {id: i for i, id in enumerate(task_ids)}
    advantage = group_advantage(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([number[s.trajectory.task.id] for s in on]),
        scale_by_std=loss.scale_by_std,
    )
    return dict(zip((s.trajectory.id for s in on), advantage.tolist(), strict=True))


def _penalties(loss: PolicyGradientLoss, on: Sequence[Scored]) -> dict[tuple[str, int], float]:
    """−penalty · (error − mean error of the group's turns): a turn answers for its own error."""
    if not loss.turn_penalty:
        return {}
    kinds = loss.penalized_events
    groups: dict[str, list[Trajectory]] = {}
    for s in on:
        groups.setdefault(s.trajectory.task.id, []).append(s.trajectory)
    penalties: dict[tuple[str, int], float] = {}
    for group in groups.values():
        wrong = {
            (t.id, i): float(any(kinds is None or e.kind in kinds for e in turn.events))
            for t in group
            for i, turn in enumerate(t.turns)
            if any(turn.completion_mask)
        }
        mean = sum(wrong.values()) / len(wrong)
        penalties |= {turn: -loss.turn_penalty * (error - mean) for turn, error in wrong.items()}
    return penalties
