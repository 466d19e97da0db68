from __future__ import annotations

import pytest
import torch

from courtside.config import CrossEntropyLoss, DivergenceLoss, PolicyGradientLoss, PreferenceLoss
from courtside.errors import TaskError
from courtside.student.components import components, pairs
from courtside.student.tally import Tally
from courtside.types import Grade, Message, Scored, Target, Task, Trajectory, Turn


def scored(
    id: str,
    *,
    task: str = "t",
    source: str = "student",
    tokens: int = 3,
    reward: float | None = 0.0,
    teacher: bool = True,
    preference: str | None = None,
) -> Scored:
    turns = (
        Turn(role="prompt", text="", token_ids=(1,), chosen=(False,)),
        Turn(role="assistant", text="", token_ids=(2,) * tokens, chosen=(True,) * tokens),
    )
    trajectory = Trajectory(
        id=id,
        task=Task(id=task, split="train", messages=(Message(role="user", content="x"),)),
        turns=turns,
        source=source,  # type: ignore[arg-type]
        policy_version=0,
        temperature=1.0,
        stop="eos",
        grade=None if reward is None else Grade(score=reward, passed=False, feedback=""),
        preference=preference,  # type: ignore[arg-type]
    )
    target = Target(teacher="q", context=None, logp_T=torch.zeros(tokens)) if teacher else None
    return Scored(trajectory=trajectory, target=target)


BATCH = [
    scored("a", tokens=3),
    scored("b", tokens=5, source="dataset"),
    scored("c", tokens=7, source="teacher"),
    scored("d", tokens=11, teacher=False),
]


@pytest.mark.parametrize(
    ("loss", "on", "tokens"),
    [
        (DivergenceLoss(kind="divergence"), "abc", 15),
        (DivergenceLoss(kind="divergence", on="student"), "a", 3),
        (CrossEntropyLoss(kind="cross_entropy"), "abcd", 26),
        (CrossEntropyLoss(kind="cross_entropy", on="dataset"), "b", 5),
        (PolicyGradientLoss(kind="policy_gradient", on="student"), "a", 3),
        (PolicyGradientLoss(kind="policy_gradient", on="student", advantage="reward"), "ad", 14),
        (PreferenceLoss(kind="preference"), "", 0),
    ],
)
def test_each_loss_is_taken_on_what_it_can_use(loss, on, tokens):
    (part,) = components([loss], ["name"], BATCH)
    assert part.on == frozenset(on)
    assert part.denominator == tokens


def test_rewards_are_compared_within_their_prompt():
    batch = [
        scored("a", task="x", reward=1.0), scored("b", task="x", reward=0.0),
        scored("c", task="y", reward=0.25), scored("d", task="y", reward=0.25),
        scored("e", task="z", reward=1.0),
    ]  # fmt: skip
    loss = PolicyGradientLoss(kind="policy_gradient", advantage="reward")
    (part,) = components([loss], ["rl"], batch)
    assert part.advantage == {"a": 0.5, "b": -0.5, "c": 0.0, "d": 0.0, "e": 0.0}
    (other,) = components([loss], ["rl"], batch[::-1])
    assert other.advantage == part.advantage


def test_a_reward_needs_a_grader():
    loss = PolicyGradientLoss(kind="policy_gradient", advantage="reward")
    with pytest.raises(TaskError, match=r"task x has no grader.*Name a grader"):
        components([loss], ["rl"], [scored("a", task="x", reward=None)])


def test_the_rejected_text_is_not_imitated():
    batch = [scored("a", preference="better"), scored("b", preference="worse")]
    (part,) = components([CrossEntropyLoss(kind="cross_entropy")], ["ce"], batch)
    assert part.on == {"a"}


def test_a_task_that_comes_twice_has_two_pairs():
    batch = [
        scored("a", task="x", preference="better"), scored("b", task="x", preference="worse"),
        scored("c", task="y", preference="better"), scored("d", task="y", preference="worse"),
        scored("e", task="x", preference="better"), scored("f", task="x", preference="worse"),
        scored("g", task="x"),
    ]  # fmt: skip
    found = [(b.trajectory.id, w.trajectory.id) for b, w in pairs(batch)]
    assert sorted(found) == [("a", "b"), ("c", "d"), ("e", "f")]
    (part,) = components([PreferenceLoss(kind="preference")], ["dpo"], batch)
    assert part.denominator == 3 and "g" not in part.on


def test_a_tally_is_a_mean_over_tokens_not_over_chunks():
    tally = Tally()
    tally.mean("kl", torch.tensor([1.0, 1.0, 1.0]))
    tally.mean("kl", torch.tensor([5.0]))
    tally.mean("kl", torch.tensor([]))
    tally.largest("max", torch.tensor([1.0, 4.0]))
    tally.largest("max", torch.tensor([2.0]))
    tally.largest("max", torch.tensor([]))
    tally.value("loss", torch.tensor(0.25))
    tally.value("loss", torch.tensor(0.5))
    assert tally.metrics() == {"kl": 2.0, "max": 4.0}
    assert tally.values == {"loss": 0.75}
