"""Conversations that only grow: the ids a template puts between what an assistant writes.

What was said is never rendered again, so a turn costs the same however long the conversation is.
The ids come from a short stand-in for it, cut behind its assistant's end token. Whether a template
would render the whole conversation the same way is found out once and said in `Turns.note`: what
the student saw and wrote is what trains, not what the template would make of it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

from courtside.chat.template import ChatTemplate, unused_noncharacters
from courtside.chat.trajectories import format_messages
from courtside.errors import ModelError
from courtside.types import Event, Message, Role, Sample, Task, Turn

PROBE_PROMPT = Message(role="user", content="Is it?")
CACHE_SIZE = 2048
"""Stretches: samples of a task have its prompt, and a hint is put above what was rendered once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSpan:
    """Ids by a template, up to where the assistant writes."""

    token_ids: tuple[int, ...]
    num_generation_prompt_tokens: int
    """How many of the last are the opening of the assistant's message."""


class IncrementalTemplate:
    """Renders conversations turn by turn, for one tokenizer and its chat template."""

    def __init__(self, renderer: ChatTemplate):
        self.renderer = renderer
        self._known: set[tuple[Role, Role]] = set()
        self._prompt = lru_cache(CACHE_SIZE)(self._rendered_prompt)
        self._between = lru_cache(CACHE_SIZE)(self._rendered_between)

    # ── ids ──────────────────────────────────────────────────────────────────────────────────────

    def render_prompt(self, messages: Sequence[Message]) -> RenderedSpan:
        """A conversation's beginning."""
        return self._prompt(tuple(messages))

    def render_continuation(self, messages: Sequence[Message]) -> RenderedSpan:
        """What stands behind an assistant's end token when `messages` come next."""
        return self._between(tuple(messages))

    def _rendered_prompt(self, messages: tuple[Message, ...]) -> RenderedSpan:
        (cut,) = unused_noncharacters(messages)
        bare, opened = (
            self.renderer.render(messages, cut, add_generation_prompt=begin)
            for begin in (False, True)
        )
        return self._stretch(bare, opened, cut)

    def _rendered_between(self, messages: tuple[Message, ...]) -> RenderedSpan:
        assert all(message.role != "assistant" for message in messages)
        roles: list[Role] = ["assistant", *(message.role for message in messages)]
        for previous, role in pairwise(roles):
            self.check_role(role, behind=previous)
        cut, mark = unused_noncharacters(messages, 2)
        spoken = (PROBE_PROMPT, _said(mark), *messages)
        bare, opened = (
            self._parted(self.renderer.render(spoken, cut, add_generation_prompt=begin), mark)[1]
            for begin in (False, True)
        )
        whole = self._stretch(bare, opened, cut)
        end = self.renderer.length_through_eos(whole.token_ids)
        return RenderedSpan(
            token_ids=whole.token_ids[end:],
            num_generation_prompt_tokens=whole.num_generation_prompt_tokens,
        )

    @cached_property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """What the template puts behind an assistant's words, up to and with the end token."""
        cut, mark, next_mark = unused_noncharacters((), 3)
        spoken = (PROBE_PROMPT, _said(mark), Message(role="user", content=f"Was it{next_mark}?"))
        rendered = self.renderer.render(spoken, cut, add_generation_prompt=True)
        behind = self._parted(rendered, mark)[1]
        ids = self.renderer.tokenize(self._parted(behind, next_mark)[0], cut)
        return ids[: self.renderer.length_through_eos(ids)]

    def is_ended(self, ids: Sequence[int]) -> bool:
        """Whether an assistant's turn has its end token, so that it needs no end-of-turn tokens."""
        return bool(ids) and ids[-1] in self.renderer.eos_ids

    # ── records ──────────────────────────────────────────────────────────────────────────────────

    def prompt_turn(self, task: Task) -> Turn:
        return _said_to("prompt", task.messages, self.render_prompt(task.messages))

    def assistant_turn(self, sample: Sample, events: Sequence[Event] = ()) -> Turn:
        """What was drawn, as it was drawn. A text from a data set has no log-probs of a sampler."""
        return Turn(
            role="assistant",
            text=sample.text,
            token_ids=sample.token_ids,
            chosen=(True,) * len(sample.token_ids),
            sampler_logp=sample.logp or None,
            events=tuple(events),
        )

    def environment_turn(self, messages: Sequence[Message], *, add_end_of_turn: bool) -> Turn:
        """`add_end_of_turn`: the assistant's turn was truncated, so this one ends it."""
        between = self.render_continuation(messages)
        before = self.end_of_turn_ids if add_end_of_turn else ()
        return _said_to("environment", messages, between, before)

    # ── what the template does, found out once ───────────────────────────────────────────────────

    def check_role(self, role: Role, *, behind: Role) -> None:
        """That the template shows a message of this role behind one of that; found out once."""
        if (behind, role) in self._known:
            return
        cut, mark, next_mark = unused_noncharacters((), 3)
        last = Message(role=role, content=f"Was it{next_mark}?")
        middle = () if behind == "assistant" else (Message(role=behind, content="So."),)
        known = "Join the two into one message"
        if role != "user":
            known = f"Say it as 'user', or use a model whose template knows {role!r}"
        fix = (
            f"{known}; a hint can also go inside the message above it (hints.position = "
            "'last_message')"
        )
        try:
            rendered = self.renderer.render(
                (PROBE_PROMPT, _said(mark), *middle, last), cut, add_generation_prompt=True
            )
        except ModelError as error:
            raise ModelError(
                f"{error}. So no {role!r} message may stand behind {_a(behind)} one. {fix}"
            ) from None
        if not 0 <= rendered.find(mark) < rendered.find(next_mark):
            does = "moves" if next_mark in rendered else "does not show"
            raise ModelError(
                f"{self.renderer.name}: its chat template {does} a {role!r} message that stands "
                f"behind {_a(behind)} one. {fix}"
            )
        ids = self.renderer.tokenize(rendered[rendered.find(mark) : rendered.find(next_mark)], cut)
        self.renderer.length_through_eos(ids)
        self._known.add((behind, role))

    @cached_property
    def note(self) -> str | None:
        """How the template's render of a whole conversation differs from what the student sees.

        None where it does not. Sequences are never changed for it.
        """
        for thinking, which in (
            ("", ""),
            ("<think>\nHm.\n</think>\n\n", " that begin with thinking"),
        ):
            answers = [f"{thinking}{text}" for text in ("It is.", "It was.", "It will.")]
            difference = self._difference(answers)
            if difference is not None:
                return (
                    f"{self.renderer.name}: of a conversation of three answers{which} its chat "
                    f"template makes other tokens than a student reads and writes: {difference}. "
                    "Sequences stay as the student read and wrote them"
                )
        return None

    def _difference(self, answers: Sequence[str]) -> str | None:
        (cut,) = unused_noncharacters(())
        asks = [Message(role="user", content=text) for text in ("Is it?", "Was it?", "Will it?")]
        stretches = [
            self.render_prompt(asks[:1]),
            *(self.render_continuation([ask]) for ask in asks[1:]),
        ]
        went: list[int] = []
        for stretch, answer in zip(stretches, answers, strict=True):
            opening = self.renderer.tokenizer.decode(stretch.token_ids)
            # Where the opening has begun the answer ("<think>\n"), the student writes the rest.
            begun = max(n for n in range(len(answer)) if opening.endswith(answer[:n]))
            went += [*stretch.token_ids, *self.renderer.tokenize(answer[begun:], cut)]
            went += self.end_of_turn_ids
        spoken = [
            message
            for ask, answer in zip(asks, answers, strict=True)
            for message in (ask, Message(role="assistant", content=answer))
        ]
        rendered = self.renderer.render(spoken, cut, add_generation_prompt=False)
        whole = self.renderer.tokenize(rendered, cut)
        same = common_prefix_length(went, whole)
        return None if same == len(went) else self.describe_difference(went, whole, same)

    def describe_difference(self, went: Sequence[int], whole: Sequence[int], same: int) -> str:
        """For people: where the ids of a conversation as it went leave the template's own."""
        behind = self.renderer.tokenizer.decode(went[:same][-8:])
        its, ours = (self.renderer.pieces(ids[same : same + 4]) for ids in (whole, went))
        return f"behind {behind!r} it has {its}, not {ours}"

    # ── parts ────────────────────────────────────────────────────────────────────────────────────

    def _stretch(self, bare: str, opened: str, cut: str) -> RenderedSpan:
        if len(opened) <= len(bare) or not opened.startswith(bare):
            raise ModelError(
                f"{self.renderer.name}: its chat template changes messages where it opens an "
                "answer (add_generation_prompt), so the opening cannot be told from them. Use a "
                "template that only adds to them"
            )
        whole = self.renderer.tokenize(opened, cut)
        # A token that reaches across belongs to the opening: without it that token is another.
        before = common_prefix_length(self.renderer.tokenize(bare, cut), whole)
        return RenderedSpan(token_ids=whole, num_generation_prompt_tokens=len(whole) - before)

    def _parted(self, rendered: str, mark: str) -> tuple[str, str]:
        before, found, behind = rendered.partition(mark)
        if not found or mark in behind:
            raise ModelError(
                f"{self.renderer.name}: its chat template does not show an earlier message exactly "
                "once, so turns cannot be told apart. Use a template that does"
            )
        return before, behind


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _said(mark: str) -> Message:
    return Message(role="assistant", content=f"It is.{mark}")


def _said_to(
    role: Literal["prompt", "environment"],
    messages: Sequence[Message],
    stretch: RenderedSpan,
    before: tuple[int, ...] = (),
) -> Turn:
    ids = before + stretch.token_ids
    return Turn(
        role=role,
        text=format_messages(messages),
        token_ids=ids,
        chosen=(False,) * len(ids),
        messages=tuple(messages),
        num_generation_prompt_tokens=stretch.num_generation_prompt_tokens,
    )


def _a(role: Role) -> str:
    return f"an {role!r}" if role == "assistant" else f"a {role!r}"
