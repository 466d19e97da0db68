"""From a recipe's losses to loss terms: which tokens each trains on, with which weights.

Everything here is decided for a whole optimizer step, before it is split into micro-batches:
denominators and group-relative advantages must not depend on the split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from courtside.errors import RecipeError
from courtside.losses.fused.types import DivergenceSpec, Support
from courtside.recipe.losses import DivergenceLoss, Loss
from courtside.recipe.rewards import Reward
from courtside.training.advantages import RewardAdvantages, compute_advantages
from courtside.types import Scored

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
    """Of the whole step, as `loss.normalize` says: trained tokens, those of harmful hints included,
    turns, trajectories, or a constant for each trajectory; for preferences, pairs."""
    advantage: Mapping[str, tuple[float, ...]]
    """By trajectory id, per completion token: the advantage from rewards, or a preference's
    coefficient, which `Student` computes."""
    rewards: RewardAdvantages | None = None
    """Of a loss with advantage = 'reward'."""
    route: Mapping[str, str] = field(default_factory=dict)
    """By trajectory id: the route of its teacher; empty where the teacher has no routes."""

    def __post_init__(self) -> None:
        if self.num_tokens:
            assert self.denominator > 0, "tokens without a denominator: count the whole step's"

    @property
    def num_tokens(self) -> int:
        return sum(w > 0 for weights in self.weight.values() for w in weights)

    @property
    def num_route_tokens(self) -> Mapping[str, int]:
        """The same by route."""
        counts: Counter[str] = Counter()
        for id, route in self.route.items():
            counts[route] += sum(w > 0 for w in self.weight.get(id, ()))
        return counts

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
    losses: Sequence[Loss],
    names: Sequence[str],
    scored: Sequence[Scored],
    *,
    rewards: Mapping[str, Reward] | None = None,
    route_of: Callable[[Sequence[str]], str | None] = lambda tags: None,
) -> list[LossTerm]:
    """`rewards`: by name, what the reward is the sum of; None: it is the grade. `route_of`: from a
    task's tags to the route of its teacher."""
    result = []
    for loss, name in zip(losses, names, strict=True):
        masks = {s.trajectory.id: mask for s in scored if any(mask := select_tokens(loss, s))}
        on = [s for s in scored if s.trajectory.id in masks]
        compared = None
        if loss.kind == "policy_gradient" and loss.advantage == "reward" and on:
            compared = compute_advantages(loss, on, rewards or {})
            if loss.zero_variance_groups == "drop":
                on = [s for s in on if s.trajectory.id not in compared.zero_variance]
        weight, denominator = weigh_routes(loss, on, masks, route_of)
        term = LossTerm(
            name=name,
            loss=loss,
            weight=weight,
            denominator=len(preference_pairs(on)) if loss.kind == "preference" else denominator,
            advantage=compared.by_token if compared is not None else {},
            rewards=compared,
            route={
                s.trajectory.id: route
                for s in on
                if (route := route_of(s.trajectory.task.tags)) is not None
            },
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
    if trajectory.is_pair_copy or (loss.on == "chosen" and trajectory.preference != "better"):
        return none  # a copy's tokens are those of trajectories that train elsewhere
    if loss.on in ("student", "teacher", "dataset") and loss.on != trajectory.source:
        return none
    if loss.kind == "cross_entropy" and trajectory.preference == "worse":
        return none
    if loss.kind == "policy_gradient" and trajectory.source == "dataset":
        return none  # not sampled, so it has no sampling probability
    if (
        loss.kind == "divergence"
        and loss.gate is not None
        and (trajectory.source != "student" or trajectory.sampler_logp is None)
    ):
        return none  # a gate compares the teacher with the student that sampled the token
    where = all_
    if loss.on in ("hinted_turns", "unhinted_turns"):
        hinted = {j.hint.turn for j in scored.hints if j.drop_reason in (None, "harmful")}
        where = tuple((t in hinted) == (loss.on == "hinted_turns") for t in trajectory.turn_of)
    if loss.kind == "divergence" and loss.against == "reference":
        return where if scored.reference is not None else none
    if loss.kind == "divergence" or (
        loss.kind == "policy_gradient" and loss.advantage in ("teacher_gap", "hint_contrast")
    ):
        harmful = scored.harmful_turns
        columns = zip(where, scored.target_mask, trajectory.turn_of, strict=True)
        return tuple(on and (has_target or turn in harmful) for on, has_target, turn in columns)
    return where


def weigh_routes(
    loss: Loss,
    on: Sequence[Scored],
    masks: TrainedTokens,
    route_of: Callable[[Sequence[str]], str | None],
) -> tuple[dict[str, tuple[float, ...]], int]:
    """As `weigh_tokens`; with route weights, a weighted mean of the means of the step's routes."""
    if loss.route_weights is None or not on:
        return weigh_tokens(loss, on, masks)
    routes: dict[str, list[Scored]] = {}
    for s in on:
        route = route_of(s.trajectory.task.tags)
        assert route is not None, "the teacher has routed this task"
        routes.setdefault(route, []).append(s)
    factors = loss.route_weights
    importance = {r: 1.0 if factors == "equal" else factors[r] for r in routes}
    parts = {route: weigh_tokens(loss, members, masks) for route, members in routes.items()}
    denominator = sum(size for _, size in parts.values())
    weight: dict[str, tuple[float, ...]] = {}
    for route, (weights, size) in parts.items():
        # Over the common denominator this is the route's own mean times its share.
        factor = importance[route] / sum(importance.values()) * denominator / size
        weight |= {id: tuple(factor * w for w in row) for id, row in weights.items()}
    return weight, denominator


def weigh_tokens(
    loss: Loss, on: Sequence[Scored], masks: TrainedTokens
) -> tuple[dict[str, tuple[float, ...]], int]:
    """(weights by trajectory id, denominator): Σ weight · loss / denominator over the whole step is
    the mean that `loss.normalize` names."""
    if loss.normalize in ("turn", "sequence"):
        return _weigh_units(on, masks, by_turn=loss.normalize == "turn")
    weight = {s.trajectory.id: tuple(map(float, masks[s.trajectory.id])) for s in on}
    if loss.normalize == "constant":
        assert loss.normalize_tokens is not None
        return weight, loss.normalize_tokens * len(on)
    return weight, sum(sum(masks[id]) for id in weight)


def _weigh_units(
    on: Sequence[Scored], masks: TrainedTokens, *, by_turn: bool
) -> tuple[dict[str, tuple[float, ...]], int]:
    """Every turn, or every trajectory, counts 1, spread over its trained tokens."""
    weight, num_units = {}, 0
    for s in on:
        mask = masks[s.trajectory.id]
        units = s.trajectory.turn_of if by_turn else (0,) * len(mask)
        sizes = Counter(unit for unit, trained in zip(units, mask, strict=True) if trained)
        weight[s.trajectory.id] = tuple(
            1 / sizes[unit] if trained else 0.0 for unit, trained in zip(units, mask, strict=True)
        )
        num_units += len(sizes)
    return weight, num_units


def find_trained_tokens(terms: Sequence[LossTerm]) -> dict[str, tuple[bool, ...]]:
    """By trajectory id: which completion tokens any loss trains on; others need no logits."""
    trained: dict[str, tuple[bool, ...]] = {}
    for term in terms:
        for id, weights in term.weight.items():
            before = trained.get(id, (False,) * len(weights))
            trained[id] = tuple(a or w > 0 for a, w in zip(before, weights, strict=True))
    return trained


def preference_pairs(scored: Sequence[Scored]) -> list[tuple[Scored, Scored]]:
    """(better, worse) of each whole preference pair: those that share `pair`, else their task. A
    task that is in the batch twice has two pairs."""
    sides: dict[tuple[str | None, str], tuple[list[Scored], list[Scored]]] = {}
    for s in scored:
        if s.trajectory.preference is not None:
            key = (s.trajectory.pair, s.trajectory.task.id)
            better, worse = sides.setdefault(key, ([], []))
            (better if s.trajectory.preference == "better" else worse).append(s)
    return [pair for two in sides.values() for pair in zip(*two, strict=False)]
