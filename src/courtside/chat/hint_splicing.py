"""Splicing hints above turns: the same tokens of the student, in a context that has the hint.

A hint is put in as ids: what was read and written before it and the turn behind it stay verbatim.
Where the template's own render with the hint is not the trunk with some ids put in (the tokenizer
merged across its edges), nothing is made up: `SpliceError` says why, for callers to count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from courtside.chat.incremental import IncrementalTemplate, RenderedSpan, common_prefix_length
from courtside.chat.privileged_context import insert_context
from courtside.errors import UserError
from courtside.types import Branch, Hint, Message, Trajectory

HintPlacement = Literal["before_turn", "last_message", "system"]
"""A message of its own above the turn; in the message above it; in the system message."""

HintRole = Literal["system", "user", "tool"]

DropReason = Literal[
    "merge", "too_long", "no_assistant_turn", "no_message", "empty", "other_render"
]

SEPARATORS = ("\n\n", "\n", " ")
"""What may part a message from a hint inside it, the best first. Many tokenizers have one token for
a full stop with the line breaks behind it; there a space still keeps the message's own tokens."""


class SpliceError(UserError):
    """A hint that cannot be put where it belongs. Callers drop the hint and count the reason."""

    def __init__(self, reason: DropReason, hint: Hint, why: str):
        super().__init__(f"hint for turn {hint.turn} of trajectory {hint.trajectory}: {why}")
        self.reason = reason
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class SplicedTrajectory:
    """A whole trajectory with several hints in it: each turn sees all hints above it."""

    trajectory: str
    token_ids: tuple[int, ...]
    scored: tuple[tuple[int, tuple[int, ...]], ...]
    """For each hinted turn its index and where in `token_ids` its chosen ids stand."""


def splice_hint(
    trajectory: Trajectory,
    hint: Hint,
    turns: IncrementalTemplate,
    *,
    place: HintPlacement,
    role: HintRole,
    max_tokens: int,
) -> Branch:
    """The hinted turn with the hint above it, and no other hint.

    `role` is that of a hint with a message of its own (position "before_turn"). `max_tokens`
    bounds the ids that the hint adds,
    its message's frame included. In the system message (place "system") it
    shares no trunk: the prompt is rendered anew, without the template's default system message
    where it has one, and only later turns are verbatim.
    """
    _check(trajectory, hint)
    target = trajectory.turns[hint.turn]
    if place == "system":
        splice, above = 0, _in_system(trajectory, hint, turns, max_tokens)
    else:
        num_replaced, above = (
            _as_message(trajectory, [hint], turns, role, max_tokens)
            if place == "before_turn"
            else _inside(trajectory, hint, turns, max_tokens)
        )
        splice = sum(len(turn.token_ids) for turn in trajectory.turns[: hint.turn]) - num_replaced
    return Branch(
        trajectory=trajectory.id,
        turn=hint.turn,
        splice=splice,
        token_ids=above + target.token_ids,
        scored=(False,) * len(above) + target.chosen,
    )


def splice_hints_cumulatively(
    trajectory: Trajectory,
    hints: Sequence[Hint],
    turns: IncrementalTemplate,
    *,
    role: HintRole,
    max_tokens: int,
) -> SplicedTrajectory:
    """The whole trajectory with every hint as a message above its turn, in one sequence.

    Several hints for one turn stand in the order given, each of `max_tokens` ids at most. A hint
    that does not fit is named by the error; leave it out and call again.
    """
    for hint in hints:
        _check(trajectory, hint)
    by_turn = {
        turn: list(group)
        for turn, group in groupby(sorted(hints, key=lambda h: h.turn), key=lambda h: h.turn)
    }
    ids: list[int] = []
    scored: list[tuple[int, tuple[int, ...]]] = []
    for index, turn in enumerate(trajectory.turns):
        if index in by_turn:
            num_replaced, above = _as_message(trajectory, by_turn[index], turns, role, max_tokens)
            del ids[len(ids) - num_replaced :]
            ids += above
            chosen = (len(ids) + i for i, chosen in enumerate(turn.chosen) if chosen)
            scored.append((index, tuple(chosen)))
        ids += turn.token_ids
    return SplicedTrajectory(trajectory=trajectory.id, token_ids=tuple(ids), scored=tuple(scored))


def _check(trajectory: Trajectory, hint: Hint) -> None:
    assert hint.trajectory == trajectory.id
    num_turns = len(trajectory.turns)
    if not 0 < hint.turn < num_turns or trajectory.turns[hint.turn].role != "assistant":
        has = [i for i, turn in enumerate(trajectory.turns) if turn.role == "assistant"]
        raise SpliceError(
            "no_assistant_turn", hint, f"that is no assistant's turn; the assistant's are {has}"
        )
    if not hint.text.strip():
        raise SpliceError("empty", hint, "it has no text")


# ── the stretch above the turn, with the hint ────────────────────────────────────────────────────
# Each gives how many of the stretch's last ids are replaced, and by which.

Spliced = tuple[int, tuple[int, ...]]


def _as_message(
    trajectory: Trajectory,
    hints: Sequence[Hint],
    turns: IncrementalTemplate,
    role: HintRole,
    max_tokens: int,
) -> Spliced:
    hint = hints[0]
    messages, stretch, render = _above(trajectory, hint, turns)
    if messages:
        turns.check_role(role, behind=messages[-1].role)
    hinted = render((*messages, *(Message(role=role, content=h.text) for h in hints)))
    spliced = _put_in(stretch, hinted)
    if spliced is None:
        raise _merged(hint, f"as a {role!r} message")
    _check_length(hint, hinted, stretch, max_tokens * len(hints))
    return spliced


def _inside(
    trajectory: Trajectory, hint: Hint, turns: IncrementalTemplate, max_tokens: int
) -> Spliced:
    messages, stretch, render = _above(trajectory, hint, turns)
    if not messages:
        raise SpliceError(
            "no_message", hint, "no message stands right above it for the hint to go into"
        )
    for separator in SEPARATORS:
        longer = replace(messages[-1], content=f"{messages[-1].content}{separator}{hint.text}")
        hinted = render((*messages[:-1], longer))
        spliced = _put_in(stretch, hinted)
        if spliced is not None:
            _check_length(hint, hinted, stretch, max_tokens)
            return spliced
    raise _merged(hint, "inside the message above")


def _in_system(
    trajectory: Trajectory, hint: Hint, turns: IncrementalTemplate, max_tokens: int
) -> tuple[int, ...]:
    messages = trajectory.task.messages
    plain, hinted = (
        turns.render_prompt(m) for m in (messages, insert_context(messages, hint.text, "system"))
    )
    _check_same(trajectory.turns[0].token_ids, plain, hint)
    _check_length(hint, hinted, plain, max_tokens)
    opening = plain.token_ids[len(plain.token_ids) - plain.num_generation_prompt_tokens :]
    if hinted.token_ids[len(hinted.token_ids) - plain.num_generation_prompt_tokens :] != opening:
        raise _merged(hint, "in the system message")
    later = (i for turn in trajectory.turns[1 : hint.turn] for i in turn.token_ids)
    return (*hinted.token_ids, *later)


def _above(
    trajectory: Trajectory, hint: Hint, turns: IncrementalTemplate
) -> tuple[tuple[Message, ...], RenderedSpan, Callable[[Sequence[Message]], RenderedSpan]]:
    """The messages right above the hinted turn, their ids, and what renders others in their place.

    An environment's turn may begin with a closing; the stretch is what follows that.
    """
    before = trajectory.turns[hint.turn - 1]
    first = hint.turn == 1
    messages = trajectory.task.messages if first else before.messages
    render = turns.render_prompt if first else turns.render_continuation
    stretch = render(messages)
    _check_same(before.token_ids[-len(stretch.token_ids) :], stretch, hint)
    return messages, stretch, render


def _put_in(plain: RenderedSpan, hinted: RenderedSpan) -> Spliced | None:
    """None where `hinted` is not `plain` with ids put in somewhere above its opening."""
    old, new = plain.token_ids, hinted.token_ids
    at = min(common_prefix_length(old, new), len(old) - plain.num_generation_prompt_tokens)
    num_behind = len(old) - at
    if len(new) <= len(old) or new[len(new) - num_behind :] != old[at:]:
        return None
    return num_behind, new[at:]


def _check_length(hint: Hint, hinted: RenderedSpan, plain: RenderedSpan, max_tokens: int) -> None:
    num_tokens = len(hinted.token_ids) - len(plain.token_ids)
    if num_tokens > max_tokens:
        raise SpliceError("too_long", hint, f"it adds {num_tokens} tokens, allowed: {max_tokens}")


def _check_same(ids: tuple[int, ...], stretch: RenderedSpan, hint: Hint) -> None:
    if ids != stretch.token_ids:
        raise SpliceError(
            "other_render",
            hint,
            "the turn above it is not what this model's chat template makes of its messages, so "
            "another model's template, or another version, rendered it. Use the one that did",
        )


def _merged(hint: Hint, where: str) -> SpliceError:
    return SpliceError(
        "merge",
        hint,
        f"{where} the tokenizer merges characters across its edges, so ids that the student saw "
        "would change. Word it differently, or choose another place or role",
    )
