"""Weights and denominators: Σ w·loss / N is the mean that a loss names, taken by hand."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from courtside.recipe.losses import Loss
from courtside.training.loss_terms import make_loss_terms
from courtside.types import Grade, Message, Scored, Task, Trajectory, Turn

Values = dict[str, list[list[float]]]
"""By trajectory id: the losses of the tokens of each turn."""


def make_batch(sizes: list[list[int]]) -> list[Scored]:
    """A trajectory for each list, with turns of these sizes; every third task has another tag."""
    batch = []
    for number, turns in enumerate(sizes):
        trajectory = Trajectory(
            id=f"t{number}",
            task=Task(
                id=f"task-{number % 2}", split="train", tags=("ab"[number % 3 == 0],),
                messages=(Message(role="user", content="x"),),
            ),
            turns=(
                Turn(role="prompt", text="", token_ids=(1,), completion_mask=(False,)),
                *(
                    Turn(role="assistant", text="", token_ids=(2,) * size,
                         completion_mask=(True,) * size)
                    for size in turns
                ),
            ),
            source="student", policy_version=0, temperature=1.0, stop="eos",
            grade=Grade(score=float(number % 2 == 0 and number), passed=False),
        )  # fmt: skip
        batch.append(Scored(trajectory=trajectory, target=None))
    return batch


def weighted_mean(loss: dict[str, Any], batch: list[Scored], values: Values) -> float | None:
    """As the update takes it; None: nothing trains."""
    parsed = TypeAdapter(Loss).validate_python(
        {"kind": "policy_gradient", "advantage": "reward", **loss}
    )
    (term,) = make_loss_terms([parsed], ["rl"], batch, route_of=lambda tags: tags[0])
    flat = {id: [x for turn in turns for x in turn] for id, turns in values.items()}
    products = [w * x for id, ws in term.weight.items() for w, x in zip(ws, flat[id], strict=True)]
    return sum(products) / term.denominator if products else None


def mean_by_hand(loss: dict[str, Any], values: Values) -> float:
    tokens = [x for turns in values.values() for turn in turns for x in turn]
    match loss.get("normalize", "token"):
        case "token":
            return fmean(tokens)
        case "turn":
            return fmean(fmean(turn) for turns in values.values() for turn in turns)
        case "sequence":
            return fmean(fmean(x for turn in turns for x in turn) for turns in values.values())
    return sum(tokens) / loss["normalize_tokens"] / len(values)


NORMALIZED: list[dict[str, Any]] = [
    {},
    {"normalize": "turn"},
    {"normalize": "sequence"},
    {"normalize": "constant", "normalize_tokens": 7},
]


@pytest.mark.parametrize("loss", NORMALIZED, ids=str)
@given(
    sizes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=6),
    seed=st.integers(0, 2**20),
)
def test_a_mean_is_over_what_the_loss_says(
    loss: dict[str, Any], sizes: list[list[int]], seed: int
) -> None:
    draw = random.Random(seed)
    batch = make_batch(sizes)
    values = {
        s.trajectory.id: [[draw.gauss(0, 1) for _ in range(size)] for size in turns]
        for s, turns in zip(batch, sizes, strict=True)
    }
    assert weighted_mean(loss, batch, values) == pytest.approx(mean_by_hand(loss, values))
    # Each route on its own.
    routes: dict[str, Values] = {}
    for s in batch:
        by_id = routes.setdefault(s.trajectory.task.tags[0], {})
        by_id[s.trajectory.id] = values[s.trajectory.id]
    means = {route: mean_by_hand(loss, part) for route, part in routes.items()}
    equal = weighted_mean(loss | {"route_weights": "equal"}, batch, values)
    assert equal == pytest.approx(fmean(means.values()))
    weights = {"a": 3.0, "b": 0.5}
    total = sum(weights[route] for route in means)
    by_hand = sum(weights[route] / total * mean for route, mean in means.items())
    given_weights = weighted_mean(loss | {"route_weights": weights}, batch, values)
    assert given_weights == pytest.approx(by_hand)
    # Of the two tasks the second has equal rewards, the first only if it has one sample.
    dropped = weighted_mean(loss | {"zero_variance_groups": "drop"}, batch, values)
    informative = {id: x for id, x in values.items() if int(id[1:]) % 2 == 0}
    if len(informative) > 1:
        assert dropped == pytest.approx(mean_by_hand(loss, informative))
    else:
        assert dropped is None


def test_trained_tokens_are_counted_by_route() -> None:
    """The fourth trajectory has another tag than those between it and the first."""
    batch = make_batch([[2, 3], [4], [1], [5, 5]])
    loss = TypeAdapter(Loss).validate_python({"kind": "policy_gradient", "advantage": "reward"})
    (term,) = make_loss_terms([loss], ["rl"], batch, route_of=lambda tags: tags[0])
    assert term.num_route_tokens == {"b": 5 + 10, "a": 4 + 1}
    assert sum(term.num_route_tokens.values()) == term.num_tokens
    (alone,) = make_loss_terms([loss], ["rl"], batch)
    assert alone.num_route_tokens == {}
