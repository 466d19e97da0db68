"""Made-up episodes with a toolbox: errors, hints, and what they did. No model is asked."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unit.report.made_up import Logps

from courtside.types import (
    Evaluation,
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
    Update,
)

PIECE = re.compile(r"<[|\w]*>|</\w+>|\s?\w+|\s?[^\w\s]|\s")
END = "<|im_end|>"
OPENING = "<|im_start|>assistant\n"

_ids: dict[str, int] = {}


def spell(text: str) -> tuple[int, ...]:
    """Ids of a text's pieces; a piece has the same id wherever it stands."""
    return tuple(_ids.setdefault(piece, len(_ids)) for piece in PIECE.findall(text))


def decode(token_ids: Sequence[int]) -> list[str]:
    pieces = list(_ids)
    return [pieces[i] for i in token_ids]


SYSTEM = """Answer every request with one tool call:
<tool_call>{"name": "…", "arguments": {…}}</tool_call>
Tools:
meteo_lookup {"place": text}: what the weather is at a place
ledger_sum {"numbers": list}: the sum of numbers
jotter_add {"title": text, "words": text}: writes a note"""

REQUESTS = (
    ("What is the weather in Oslo?", "meteo_lookup", "weather", '{"place": "Oslo"}'),
    ("Add 17, 4 and 21 for me, please.", "ledger_sum", "calculator", '{"numbers": [17, 4, 21]}'),
    ("Note down <b>milk & bread</b> under shopping.", "jotter_add", "notes",
     '{"title": "shopping", "words": "milk & bread"}'),
    ("What is the weather in Lima?", "meteo_lookup", "weather", '{"place": "Lima"}'),
)  # fmt: skip
RESULTS = ("4 °C, light rain", "42", "Noted.", "19 °C, fog")


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def assistant(text: str, draw: random.Random, events: tuple[Event, ...] = ()) -> Turn:
    ids = spell(text + END)
    return Turn(
        role="assistant",
        text=text,
        token_ids=ids,
        completion_mask=(True,) * len(ids),
        sampler_logp=tuple(-draw.randrange(1, 16) / 32 for _ in ids),
        events=events,
    )


def make_turn(role: Any, messages: Sequence[Message]) -> Turn:
    text = "".join(f"<|im_start|>{m.role}\n{m.content}{END}\n" for m in messages)
    ids, opening = spell(text), spell(OPENING)
    return Turn(
        role=role,
        text="\n\n".join(f"{m.role}: {m.content}" for m in messages),
        token_ids=ids + opening,
        completion_mask=(False,) * (len(ids) + len(opening)),
        messages=tuple(messages),
        num_generation_prompt_tokens=len(opening),
    )


def make_episode(name: str, *, wrong: Sequence[int] = (1,), num: int = 4) -> Trajectory:
    """`num` requests; in the turns of those in `wrong` the tool has another name, then a retry."""
    draw = random.Random(name)
    opening = (
        Message(role="system", content=SYSTEM),
        Message(role="user", content=REQUESTS[0][0]),
    )
    task = Task(id=f"task-{name.split('-')[-1]}", split="train", messages=opening, tags=("tools",))
    turns = [make_turn("prompt", opening)]
    for i in range(num):
        request, listed, common, arguments = REQUESTS[i % 4]
        if i in wrong:
            message = f"Tool not found: {common}"
            details = {"message": message, "tool": common, "listed": listed, "request": request}
            event = Event(kind="tool_not_found", details=details)
            turns.append(assistant(called(common, arguments), draw, (event,)))
            turns.append(make_turn("environment", [Message(role="tool", content=message)]))
        turns.append(assistant(called(listed, arguments), draw))
        if i + 1 < num:
            replies = [
                Message(role="tool", content=RESULTS[i % 4]),
                Message(role="user", content=REQUESTS[(i + 1) % 4][0]),
            ]
            turns.append(make_turn("environment", replies))
    passed = not wrong
    return Trajectory(
        id=name,
        task=task,
        turns=tuple(turns),
        source="student",
        policy_version=0,
        temperature=1.0,
        stop="done",
        grade=Grade(
            score=1.0 if passed else 0.5,
            passed=passed,
            feedback="" if passed else f"{num - len(wrong)} of {num} requests were solved.",
        ),
    )


def hinted(trajectory: Trajectory, *, dropped: str | None = None) -> Scored:
    """A hint above every turn with an event; the teacher speaks on those turns only."""
    draw = random.Random(trajectory.id)
    hint_outcomes, where, logps = [], [], []
    for place, turn_index in enumerate(trajectory.turn_of):
        turn = trajectory.turns[turn_index]
        if turn.events and dropped is None:
            piece = decode([trajectory.completion_ids[place]])[0]
            wrong = piece.strip() == turn.events[0].details["tool"]
            where.append(place)
            logps.append(-7.5 - draw.random() if wrong else -draw.randrange(1, 24) / 32)
    for index, turn in enumerate(trajectory.turns):
        for event in turn.events:
            listed = event.details["listed"]
            hint = Hint(
                trajectory=trajectory.id,
                turn=index,
                text=f"The tool is called {listed} here; there is no {event.details['tool']}.",
                source=f"rules:{event.kind}",
                reason=f"the turn calls {event.details['tool']}",
                bad_span=event.details["tool"],
            )
            shift = draw.uniform(0.0, 0.3) if dropped == "shift" else draw.uniform(3, 9)
            hint_outcomes.append(
                HintOutcome(
                    hint=hint,
                    shift=None if dropped == "merge" else shift,
                    bad_span_shift=None if dropped == "merge" else shift - 0.25,
                    drop_reason=dropped,
                )
            )
    target = Target(
        teacher="self:live",
        context=None,
        logp_T=Logps(logps),  # type: ignore[arg-type]
        token_indices=tuple(where),
    )
    return Scored(
        trajectory=trajectory, target=target if where else None, hints=tuple(hint_outcomes)
    )


def make_hinted_batch(step: int) -> list[Scored]:
    """Three episodes with a kept hint or two, one each dropped by shift and merge, one clean."""
    wrongs = ((0, 2), (1,), (3,))
    hinted_batch = [hinted(make_episode(f"{step}-{i}", wrong=w)) for i, w in enumerate(wrongs)]
    by_shift = hinted(make_episode(f"{step}-3", wrong=(1,)), dropped="shift")
    hint_text = "Read the request again before you answer."
    other = tuple(
        replace(
            j,
            hint=replace(j.hint, text=hint_text, source="model", bad_span=None, confidence=0.4),
            bad_span_shift=None,
        )
        for j in by_shift.hints
    )
    merged = hinted(make_episode(f"{step}-4", wrong=(2,)), dropped="merge")
    clean = Scored(trajectory=make_episode(f"{step}-5", wrong=()), target=None)
    return [*hinted_batch, replace(by_shift, hints=other), merged, clean]


def make_hinted_update(step: int, scored: Sequence[Scored]) -> Update:
    return Update(
        step=step,
        loss=0.9 / (step + 1),
        components={"hints": 0.9 / (step + 1)},
        metrics={"kl": 0.4 / (step + 1), "grad_norm": 0.5, "learning_rate": 1e-4},
        num_tokens={"hints": sum(len(s.target.token_indices or ()) for s in scored if s.target)},
        student_logp={
            s.trajectory.id: s.trajectory.sampler_logp or () for s in scored if s.target is not None
        },
    )


def make_episode_evaluation(
    step: int, errors: float, *, policy: str = "student", **metrics: float
) -> Evaluation:
    wrong = (0, 2) if errors > 0.2 else ()
    return Evaluation(
        step=step,
        policy=policy,
        split="test",
        scores={f"task-{i}": float(i < 8 * (1 - errors)) for i in range(8)},
        mean_score=1 - errors,
        ci_low=max(0.9 - errors, 0.0),
        ci_high=min(1.1 - errors, 1.0),
        metrics={
            "error_rate": errors,
            "error_rate/low": max(errors - 0.06, 0.0),
            "error_rate/high": errors + 0.07,
            "turns": 4 + 2 * errors,
            "events/tool_not_found": 0.75 * errors,
            "length": 80.0,
        }
        | ({"events/repeated_call": 0.1 * errors} if errors > 0.2 else {})
        | metrics,
        samples=tuple(make_episode(f"{policy}-{step}-{i}", wrong=wrong) for i in range(3)),
    )
