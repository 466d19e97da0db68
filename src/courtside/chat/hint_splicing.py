"""Splices hints before turns: the student's own tokens, in a context that contains the hint.

A hint is inserted as ids; the context before it and the turn after it stay verbatim. Where the
template's render with the hint is not the trajectory with some ids inserted (the tokenizer merged
across the boundary), `SpliceError` gives the reason, for callers to count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Literal

from courtside.chat.answer_boundary import RenderedSpan, common_prefix_length
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.messages import insert_context
from courtside.errors import ModelError, UserError
from courtside.types import Branch, Hint, Message, Trajectory

HintPlacement = Literal["before_turn", "last_message", "system"]
"""A message of its own before the turn; the end of the message before it; the system prompt."""

HintRole = Literal["system", "user", "tool"]

DropReason = Literal[
    "merge", "too_long", "no_assistant_turn", "no_message", "empty", "other_render"
]

SEPARATORS = ("\n\n", "\n", " ")
"""Between a message and a hint inside it, in order of preference. Many tokenizers merge a full stop
with the line breaks after it; a space still leaves the message's own tokens unchanged."""


class SpliceError(UserError):
    """A hint that cannot be spliced. Callers drop the hint and count the reason."""

    def __init__(self, reason: DropReason, hint: Hint, why: str):
        super().__init__(f"hint for turn {hint.turn} of trajectory {hint.trajectory}: {why}")
        self.reason = reason
        self.why = why
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class SplicedTrajectory:
    """A whole trajectory with several hints: each turn attends to all hints before it."""

    trajectory: str
    token_ids: tuple[int, ...]
    scored: tuple[tuple[int, tuple[int, ...]], ...]
    """(turn, positions of its completion ids in `token_ids`) for each hinted turn."""


def splice_hint(
    trajectory: Trajectory,
    hint: Hint,
    template: IncrementalTemplate,
    *,
    place: HintPlacement,
    role: HintRole,
    max_tokens: int,
) -> Branch:
    """The hinted turn with the hint before it, and no other hint.

    `role` is that of a hint with a message of its own (position "before_turn"). `max_tokens`
    bounds the ids that the hint adds, its message's frame included. In the system message the
    branch shares no prefix with the trajectory: the prompt is rendered anew, without the template's
    default system message, and only later turns are verbatim.
    """
    _check_hint(trajectory, hint)
    target = trajectory.turns[hint.turn]
    if place == "system":
        splice, context = 0, _splice_into_system(trajectory, hint, template, max_tokens)
    else:
        num_replaced, context = (
            _splice_message(trajectory, [hint], template, role, max_tokens)
            if place == "before_turn"
            else _splice_into_message(trajectory, hint, template, max_tokens)
        )
        splice = sum(len(turn.token_ids) for turn in trajectory.turns[: hint.turn]) - num_replaced
    return Branch(
        trajectory=trajectory.id,
        turn=hint.turn,
        splice=splice,
        token_ids=context + target.token_ids,
        scored=(False,) * len(context) + target.completion_mask,
    )


def splice_hints_cumulatively(
    trajectory: Trajectory,
    hints: Sequence[Hint],
    template: IncrementalTemplate,
    *,
    role: HintRole,
    max_tokens: int,
) -> SplicedTrajectory:
    """The whole trajectory with every hint as a message before its turn, in one sequence.

    Several hints for one turn keep their order, each of `max_tokens` ids at most. A hint
    that does not fit is named by the error; leave it out and call again.
    """
    for hint in hints:
        _check_hint(trajectory, hint)
    by_turn = {
        turn: list(group)
        for turn, group in groupby(sorted(hints, key=lambda h: h.turn), key=lambda h: h.turn)
    }
    ids: list[int] = []
    scored: list[tuple[int, tuple[int, ...]]] = []
    for index, turn in enumerate(trajectory.turns):
        if index in by_turn:
            num_replaced, context = _splice_message(
                trajectory, by_turn[index], template, role, max_tokens
            )
            del ids[len(ids) - num_replaced :]
            ids += context
            chosen = (len(ids) + i for i, chosen in enumerate(turn.completion_mask) if chosen)
            scored.append((index, tuple(chosen)))
        ids += turn.token_ids
    return SplicedTrajectory(trajectory=trajectory.id, token_ids=tuple(ids), scored=tuple(scored))


def _check_hint(trajectory: Trajectory, hint: Hint) -> None:
    assert hint.trajectory == trajectory.id
    num_turns = len(trajectory.turns)
    if not 0 < hint.turn < num_turns or trajectory.turns[hint.turn].role != "assistant":
        has = [i for i, turn in enumerate(trajectory.turns) if turn.role == "assistant"]
        raise SpliceError(
            "no_assistant_turn", hint, f"that is no assistant's turn; the assistant's are {has}"
        )
    if not hint.text.strip():
        raise SpliceError("empty", hint, "it has no text")


# ── the span before the turn, with the hint ───────────────────────────────────────────────────
# Each returns how many of the span's last ids are replaced, and the ids that replace them.

Splice = tuple[int, tuple[int, ...]]


def _splice_message(
    trajectory: Trajectory,
    hints: Sequence[Hint],
    template: IncrementalTemplate,
    role: HintRole,
    max_tokens: int,
) -> Splice:
    hint = hints[0]
    messages, span, render = _previous_span(trajectory, hint, template)
    if messages:
        template.check_role(role, after=messages[-1].role)
    hinted = render((*messages, *(Message(role=role, content=h.text) for h in hints)))
    spliced = _find_insertion(span, hinted)
    if spliced is None:
        plain_hint = render((*messages, Message(role=role, content="So.")))
        _check_same_beginning(span, plain_hint, role, template)
        raise _merge_error(hint, f"as a {role!r} message")
    _check_length(hint, hinted, span, max_tokens * len(hints))
    return spliced


def _splice_into_message(
    trajectory: Trajectory, hint: Hint, template: IncrementalTemplate, max_tokens: int
) -> Splice:
    messages, span, render = _previous_span(trajectory, hint, template)
    if not messages:
        raise SpliceError("no_message", hint, "no message right before it can hold the hint")
    for separator in SEPARATORS:
        longer = replace(messages[-1], content=f"{messages[-1].content}{separator}{hint.text}")
        hinted = render((*messages[:-1], longer))
        spliced = _find_insertion(span, hinted)
        if spliced is not None:
            _check_length(hint, hinted, span, max_tokens)
            return spliced
    raise _merge_error(hint, "inside the message before")


def _splice_into_system(
    trajectory: Trajectory, hint: Hint, template: IncrementalTemplate, max_tokens: int
) -> tuple[int, ...]:
    messages = trajectory.task.messages
    plain, hinted = (
        template.render_prompt(m) for m in (messages, insert_context(messages, hint.text, "system"))
    )
    _check_same_render(trajectory.turns[0].token_ids, plain, hint)
    _check_length(hint, hinted, plain, max_tokens)
    generation_prompt = plain.token_ids[len(plain.token_ids) - plain.num_generation_prompt_tokens :]
    if (
        hinted.token_ids[len(hinted.token_ids) - plain.num_generation_prompt_tokens :]
        != generation_prompt
    ):
        raise _merge_error(hint, "in the system message")
    later = (i for turn in trajectory.turns[1 : hint.turn] for i in turn.token_ids)
    return (*hinted.token_ids, *later)


def _previous_span(
    trajectory: Trajectory, hint: Hint, template: IncrementalTemplate
) -> tuple[tuple[Message, ...], RenderedSpan, Callable[[Sequence[Message]], RenderedSpan]]:
    """The messages right before the hinted turn, their ids, and the function that renders them.

    An environment's turn may begin with end-of-turn ids; the span is what follows them.
    """
    before = trajectory.turns[hint.turn - 1]
    first, prompt = hint.turn == 1, trajectory.task.messages
    messages = prompt if first else before.messages
    render: Callable[[Sequence[Message]], RenderedSpan] = (
        template.render_prompt if first else partial(template.render_continuation, prompt=prompt)
    )
    span = render(messages)
    _check_same_render(before.token_ids[-len(span.token_ids) :], span, hint)
    return messages, span, render


def _find_insertion(plain: RenderedSpan, hinted: RenderedSpan) -> Splice | None:
    """None where `hinted` is not `plain` with ids inserted before its generation prompt."""
    old, new = plain.token_ids, hinted.token_ids
    at = min(common_prefix_length(old, new), len(old) - plain.num_generation_prompt_tokens)
    num_replaced = len(old) - at
    if len(new) <= len(old) or new[len(new) - num_replaced :] != old[at:]:
        return None
    return num_replaced, new[at:]


def _check_same_beginning(
    plain: RenderedSpan, hinted: RenderedSpan, role: HintRole, template: IncrementalTemplate
) -> None:
    """Whatever the hint says: the turn must follow the same generation prompt."""
    first, second = (
        span.token_ids[len(span.token_ids) - span.num_generation_prompt_tokens :]
        for span in (plain, hinted)
    )
    # Of plain text, the tokenizer may merge the beginning with the end of the message above.
    special = template.renderer.special_ids
    if [i for i in first if i in special] != [i for i in second if i in special]:
        decode = template.renderer.tokenizer.decode
        raise ModelError(
            f"{template.renderer.name}: after a {role!r} message its chat template begins an "
            f"answer with {decode(second)!r}, and without it with {decode(first)!r}, so the turn "
            "would not follow the hint as it was sampled. Choose another hints.role, or put hints "
            "inside the message above (hints.position = 'last_message')"
        )


def _check_length(hint: Hint, hinted: RenderedSpan, plain: RenderedSpan, max_tokens: int) -> None:
    num_tokens = len(hinted.token_ids) - len(plain.token_ids)
    if num_tokens > max_tokens:
        raise SpliceError("too_long", hint, f"it adds {num_tokens} tokens, allowed: {max_tokens}")


def _check_same_render(ids: tuple[int, ...], span: RenderedSpan, hint: Hint) -> None:
    if ids != span.token_ids:
        raise SpliceError(
            "other_render",
            hint,
            "the turn before it is not what this model's chat template makes of its messages, so "
            "another model's template, or another version, rendered it. Use the one that did",
        )


def _merge_error(hint: Hint, where: str) -> SpliceError:
    return SpliceError(
        "merge",
        hint,
        f"{where} the tokenizer merges characters across its edges, so ids that the student saw "
        "would change. Word it differently, or choose another place or role",
    )
