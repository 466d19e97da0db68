"""A made-up step with every kind of correction. No model is asked."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

from unit.report.played import called, make_episode, spell

from courtside.types import (
    Grade,
    Message,
    Scored,
    TakeoverOutcome,
    Task,
    Trajectory,
    Turn,
)

HOSTILE = "<script>document.title='owned'</script>"
PASSED = Grade(score=1.0, passed=True)
FAILED = Grade(score=0.0, passed=False)


def make_answer(id: str, text: str, *, num_given: int = 0, **changes: Any) -> Trajectory:
    """The first `num_given` tokens of the answer are context."""
    number = id.partition("+")[0].split("-")[1]
    messages = (Message(role="user", content=f"What is 2 + {number}?"),)
    prompt_ids, ids = spell(messages[0].content), spell(text)
    mask = (False,) * num_given + (True,) * (len(ids) - num_given)
    turns = (
        Turn(role="prompt", text=messages[0].content, token_ids=prompt_ids,
             completion_mask=(False,) * len(prompt_ids)),
        Turn(role="assistant", text=text, token_ids=ids, completion_mask=mask,
             sampler_logp=tuple(-0.5 if m else nan for m in mask)),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "id": id,
        "task": Task(id=f"task-{number}", split="train", messages=messages),
        "turns": turns,
        "source": "student",
        "policy_version": 0,
        "temperature": 1.0,
        "stop": "eos",
        "grade": FAILED,
    }
    return Trajectory(**fields | changes)


def make_taken_over_episode(draft: Trajectory, turn: int, text: str) -> Trajectory:
    """The turns before `turn` are context; the teacher's turn is the last one."""
    trunk = tuple(
        replace(t, completion_mask=(False,) * len(t.token_ids), sampler_logp=None)
        for t in draft.turns[:turn]
    )
    ids = spell(text)
    last = Turn(role="assistant", text=text, token_ids=ids, completion_mask=(True,) * len(ids))
    return replace(draft, id=f"{draft.id}+takeover", turns=(*trunk, last), source="teacher",
                   draft=draft.id, correction="takeover", grade=PASSED)  # fmt: skip


def make_corrected_batch(step: int = 0) -> list[Scored]:
    """Task 1: a repair of a criticized draft. 2: a take-over with its pair. 3: two samples, one
    chosen. 4: an episode taken over at turn 3. 5: mixed sampling. 6: criticized only."""
    wrong, forked, worse, plain, mixed, lonely = (f"{step}-{n}-0" for n in range(1, 7))
    takeover = {"draft": forked, "correction": "takeover"}
    sides = {**takeover, "pair": f"{forked}+takeover", "num_given": 3}
    teacher = {"source": "teacher", "policy_version": None}
    pair = f"{worse}+choose"
    episode = make_episode(plain, wrong=(1,), num=3)
    trajectories = [
        make_answer(wrong, f"It is nine {HOSTILE}", critique=f"Count again. {HOSTILE}"),
        make_answer(f"{wrong}+rewrite", "It is three.", draft=wrong, correction="rewrite",
                    grade=PASSED, **teacher),
        make_answer(forked, "Two and two are seven."),
        make_answer(f"{forked}+better", "Two and two are four.", preference="better", **sides,
                    **teacher),
        make_answer(f"{forked}+takeover", "Two and two are four.", num_given=3, grade=PASSED,
                    **takeover, **teacher),
        make_answer(f"{forked}+worse", "Two and two are seven.", preference="worse", **sides),
        make_answer(worse, "Eleven.", preference="worse", pair=pair,
                    rewards={"grade": 0.0, "length": -0.25, HOSTILE: None}),
        make_answer(f"{step}-3-1", "Five.", preference="better", pair=pair, draft=worse,
                    correction="choose", grade=PASSED,
                    rewards={"grade": 1.0, "length": 0.0, HOSTILE: 0.5}),
        episode,
        make_taken_over_episode(episode, 3, called("ledger_sum", "{}")),
        make_answer(mixed, "Seven of nine.", num_replaced=2),
        make_answer(lonely, "No idea.", critique="Try at least."),
    ]  # fmt: skip
    outcomes = {
        forked: TakeoverOutcome(turn=1, num_sampled_tokens=3, stop="eos", grade=PASSED),
        wrong: TakeoverOutcome(turn=1, num_sampled_tokens=4, stop="eos", grade=FAILED,
                               drop_reason="not_passed"),
    }  # fmt: skip
    return [Scored(trajectory=t, target=None, takeover=outcomes.get(t.id)) for t in trajectories]
