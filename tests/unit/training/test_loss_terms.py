from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from courtside.errors import TaskError
from courtside.recipe.losses import (
    CrossEntropyLoss,
    DivergenceLoss,
    PolicyGradientLoss,
    PreferenceLoss,
)
from courtside.training.loss_terms import make_loss_terms, preference_pairs
from courtside.training.metrics import MetricAccumulator, reward_metrics
from courtside.types import (
    Event,
    Grade,
    Hint,
    HintOutcome,
    Message,
    Scored,
    Target,
    Task,
    Trajectory,
    Turn,
)


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
        Turn(role="prompt", text="", token_ids=(1,), completion_mask=(False,)),
        Turn(role="assistant", text="", token_ids=(2,) * tokens, completion_mask=(True,) * tokens),
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
        (PolicyGradientLoss(kind="policy_gradient"), "ac", 10),
        (PreferenceLoss(kind="preference"), "", 0),
    ],
)
def test_each_loss_is_taken_on_what_it_can_use(loss, on, tokens):
    (part,) = make_loss_terms([loss], ["name"], BATCH)
    assert part.weight.keys() == set(on)
    assert {w for ws in part.weight.values() for w in ws} <= {1.0}
    assert part.denominator == tokens


def test_rewards_are_compared_within_their_prompt():
    batch = [
        scored("a", task="x", reward=1.0), scored("b", task="x", reward=0.0),
        scored("c", task="y", reward=0.25), scored("d", task="y", reward=0.25),
        scored("e", task="z", reward=1.0),
    ]  # fmt: skip
    loss = PolicyGradientLoss(kind="policy_gradient", advantage="reward")
    (part,) = make_loss_terms([loss], ["rl"], batch)
    expected = {"a": 0.5, "b": -0.5, "c": 0.0, "d": 0.0, "e": 0.0}
    assert part.advantage == {id: (value,) * 3 for id, value in expected.items()}
    (other,) = make_loss_terms([loss], ["rl"], batch[::-1])
    assert other.advantage == part.advantage


def test_groups_of_equal_rewards_count_or_are_dropped():
    batch = [
        scored("a", task="x", reward=1.0), scored("b", task="x", reward=0.0, tokens=5),
        scored("c", task="y", reward=0.25), scored("d", task="y", reward=0.25),
        scored("e", task="z", reward=1.0),
    ]  # fmt: skip
    loss = PolicyGradientLoss(kind="policy_gradient", advantage="reward")
    (part,) = make_loss_terms([loss], ["rl"], batch)
    assert part.weight.keys() == set("abcde") and part.denominator == 17
    assert reward_metrics([part]) == {"reward/groups": 3, "reward/zero_variance_groups": 2}
    for normalize, denominator in (("token", 8), ("sequence", 2), ("turn", 2)):
        dropping = PolicyGradientLoss(
            kind="policy_gradient", advantage="reward", zero_variance_groups="drop",
            normalize=normalize,
        )  # fmt: skip
        (part,) = make_loss_terms([dropping], ["rl"], batch)
        assert part.weight.keys() == set("ab") and part.denominator == denominator
        assert reward_metrics([part])["reward/zero_variance_groups"] == 2
    (empty,) = make_loss_terms([dropping], ["rl"], batch[2:])
    assert not empty.weight and empty.num_tokens == 0


def test_a_group_of_equal_rewards_whose_turns_answer_for_errors_is_not_dropped():
    loss = PolicyGradientLoss(
        kind="policy_gradient", advantage="reward", turn_penalty=0.6, zero_variance_groups="drop"
    )
    (part,) = make_loss_terms([loss], ["rl"], [episode("a", wrong=(3,)), episode("b")])
    assert part.weight.keys() == set("ab") and part.denominator == 18
    (part,) = make_loss_terms([loss], ["rl"], [episode("a"), episode("b")])
    assert not part.weight


def test_what_a_loss_is_averaged_over():
    batch = [scored("a", tokens=2), scored("b", tokens=6)]
    sequence = DivergenceLoss(kind="divergence", normalize="sequence")
    (part,) = make_loss_terms([sequence], ["d"], batch)
    assert part.weight == {"a": (0.5,) * 2, "b": (1 / 6,) * 6} and part.denominator == 2
    constant = DivergenceLoss(kind="divergence", normalize="constant", normalize_tokens=10)
    (part,) = make_loss_terms([constant], ["d"], batch)
    assert part.weight == {"a": (1.0,) * 2, "b": (1.0,) * 6} and part.denominator == 20


def test_a_reward_needs_a_grader():
    loss = PolicyGradientLoss(kind="policy_gradient", advantage="reward")
    with pytest.raises(TaskError, match=r"task x has no grader.*Name a grader"):
        make_loss_terms([loss], ["rl"], [scored("a", task="x", reward=None)])


def test_the_rejected_text_is_not_imitated():
    batch = [scored("a", preference="better"), scored("b", preference="worse")]
    (part,) = make_loss_terms([CrossEntropyLoss(kind="cross_entropy")], ["ce"], batch)
    assert part.weight.keys() == {"a"}


def test_a_task_that_comes_twice_has_two_pairs():
    batch = [
        scored("a", task="x", preference="better"), scored("b", task="x", preference="worse"),
        scored("c", task="y", preference="better"), scored("d", task="y", preference="worse"),
        scored("e", task="x", preference="better"), scored("f", task="x", preference="worse"),
        scored("g", task="x"),
    ]  # fmt: skip
    weights = [(b.trajectory.id, w.trajectory.id) for b, w in preference_pairs(batch)]
    assert sorted(weights) == [("a", "b"), ("c", "d"), ("e", "f")]
    (part,) = make_loss_terms([PreferenceLoss(kind="preference")], ["dpo"], batch)
    assert part.denominator == 3 and "g" not in part.weight


def test_a_tally_is_a_mean_over_tokens_not_over_chunks():
    metrics = MetricAccumulator()
    metrics.mean("kl", torch.tensor([1.0, 1.0, 1.0]))
    metrics.mean("kl", torch.tensor([5.0]))
    metrics.mean("kl", torch.tensor([]))
    metrics.max("max", torch.tensor([1.0, 4.0]))
    metrics.max("max", torch.tensor([2.0]))
    metrics.max("max", torch.tensor([]))
    metrics.add_loss("loss", torch.tensor(0.25))
    metrics.add_loss("loss", torch.tensor(0.5))
    assert metrics.means() == {"kl": 2.0, "max": 4.0}
    assert metrics.losses == {"loss": 0.75}


# ── turns ────────────────────────────────────────────────────────────────────────────────────────


def episode(
    id: str,
    *,
    sizes: tuple[int, ...] = (2, 4, 3),
    wrong: tuple[int, ...] = (),
    hinted: tuple[int, ...] = (),
    dropped: tuple[int, ...] = (),
    reward: float = 0.0,
    reference: bool = False,
) -> Scored:
    """Assistant turns at 1, 3, 5…; `wrong`, `hinted` and `dropped` are numbers of turns."""
    turns = [Turn(role="prompt", text="", token_ids=(1,), completion_mask=(False,))]
    for number, size in enumerate(sizes):
        if number:
            turns.append(
                Turn(role="environment", text="", token_ids=(9,), completion_mask=(False,))
            )
        events = (Event(kind="bad"),) if len(turns) in wrong else ()
        turns.append(
            Turn(role="assistant", text="", token_ids=(2,) * size, completion_mask=(True,) * size,
                 events=events)
        )  # fmt: skip
    trajectory = Trajectory(
        id=id,
        task=Task(id="t", split="train", messages=(Message(role="user", content="x"),)),
        turns=tuple(turns),
        source="student",
        policy_version=0,
        temperature=1.0,
        stop="done",
        grade=Grade(score=reward, passed=False, feedback=""),
    )
    where = tuple(i for i, turn in enumerate(trajectory.turn_of) if turn in hinted)
    target = Target(teacher="q", context=None, logp_T=torch.zeros(len(where)), token_indices=where)
    hint_outcomes = [(turn, None) for turn in hinted] + [(turn, "shift") for turn in dropped]
    return Scored(
        trajectory=trajectory,
        target=target if hinted else None,
        reference=Target(teacher="r", context=None, logp_T=torch.zeros(sum(sizes)))
        if reference
        else None,
        hints=tuple(
            HintOutcome(hint=Hint(trajectory=id, turn=turn, text="h", source="s"), shift=1.0,
                   drop_reason=why)
            for turn, why in hint_outcomes
        ),
    )  # fmt: skip


def test_a_loss_on_hinted_turns_trains_their_tokens_only():
    batch = [episode("a", hinted=(3,), dropped=(5,)), episode("b"), episode("c", hinted=(1, 5))]
    (part,) = make_loss_terms([DivergenceLoss(kind="divergence", on="hinted_turns")], ["d"], batch)
    assert part.weight == {
        "a": (0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0),
        "c": (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0),
    }
    assert part.denominator == part.num_tokens == 9


def test_an_anchor_trains_all_the_others():
    anchor = DivergenceLoss(kind="divergence", on="unhinted_turns", against="reference")
    batch = [episode("a", hinted=(3,), dropped=(5,), reference=True), episode("b", reference=True)]
    (part,) = make_loss_terms([anchor], ["d"], batch)
    # A turn whose hint was dropped is one of the others.
    assert part.weight["a"] == (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0)
    assert part.weight["b"] == (1.0,) * 9 and part.denominator == 14
    (empty,) = make_loss_terms([anchor], ["d"], [episode("c")])
    assert not empty.weight and empty.denominator == 0


def test_turns_can_count_the_same_however_long_they_are():
    loss = DivergenceLoss(kind="divergence", on="hinted_turns", normalize="turn")
    (part,) = make_loss_terms(
        [loss], ["d"], [episode("a", hinted=(1, 3)), episode("b", hinted=(5,))]
    )
    assert part.weight["a"] == (0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.0, 0.0, 0.0)
    assert part.weight["b"][-3:] == pytest.approx((1 / 3,) * 3)
    assert (part.denominator, part.num_tokens) == (3, 9)


def test_a_turn_answers_for_its_own_error():
    loss = PolicyGradientLoss(kind="policy_gradient", advantage="reward", turn_penalty=0.6)
    batch = [episode("a", wrong=(3,), reward=1.0), episode("b", wrong=(1, 5), reward=0.0)]
    (part,) = make_loss_terms([loss], ["rl"], batch)
    right, wrong = 0.6 * 0.5, -0.6 * 0.5  # half of the group's six turns went wrong
    assert part.advantage["a"] == pytest.approx(
        (0.5 + right,) * 2 + (0.5 + wrong,) * 4 + (0.5 + right,) * 3
    )
    assert part.advantage["b"] == pytest.approx(
        (-0.5 + wrong,) * 2 + (-0.5 + right,) * 4 + (-0.5 + wrong,) * 3
    )


def test_only_penalized_kinds_of_events_are_an_error():
    batch = [episode("a", wrong=(3,), reward=1.0), episode("b", wrong=(1, 5), reward=0.0)]
    advantages = {}
    for kinds in (None, ("bad",), ("bad", "worse"), ("worse",)):
        loss = PolicyGradientLoss(
            kind="policy_gradient", advantage="reward", turn_penalty=0.6, penalized_events=kinds
        )
        (part,) = make_loss_terms([loss], ["rl"], batch)
        advantages[kinds] = part.advantage
    assert advantages[None] == advantages["bad",] == advantages["bad", "worse"]
    # Without an error anywhere every turn is as good as the mean: the reward alone is left.
    assert advantages["worse",] == {"a": (0.5,) * 9, "b": (-0.5,) * 9}


def test_a_turn_with_a_penalized_and_another_event_is_one_error():
    batch = [episode("a", wrong=(3,)), episode("b")]
    turns = list(batch[0].trajectory.turns)
    turns[3] = replace(turns[3], events=(Event(kind="other"), Event(kind="bad"), Event(kind="bad")))
    turns[5] = replace(turns[5], events=(Event(kind="other"),))
    batch[0] = replace(batch[0], trajectory=replace(batch[0].trajectory, turns=tuple(turns)))
    loss = PolicyGradientLoss(
        kind="policy_gradient", advantage="reward", turn_penalty=0.6, penalized_events=("bad",)
    )
    (part,) = make_loss_terms([loss], ["rl"], batch)
    right, wrong = 0.6 / 6, -0.6 * 5 / 6  # one of the group's six turns
    assert part.advantage["a"] == pytest.approx((right,) * 2 + (wrong,) * 4 + (right,) * 3)
    assert part.advantage["b"] == pytest.approx((right,) * 9)


def test_without_a_penalty_events_change_nothing():
    loss = PolicyGradientLoss(kind="policy_gradient", advantage="reward")
    wrong, right = (
        make_loss_terms([loss], ["rl"], [episode("a", wrong=w, reward=1.0), episode("b")])[
            0
        ].advantage
        for w in ((3,), ())
    )
    assert wrong == right and wrong["a"] == (0.5,) * 9
