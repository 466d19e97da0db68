"""Incremental chat rendering: the token ids that a template puts between assistant turns.

Earlier turns are never rendered again, so a turn costs the same however long the conversation is.
The ids come from a short stand-in conversation, cut after its assistant's end-of-turn token; where
the conversation's own prompt decides how answers begin (`/no_think` in it), it heads the stand-in.
Whether the template renders a whole conversation to the same ids is probed once (`note`): the ids
that the student was given and sampled are what trains, whatever the template makes of them later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

from courtside.chat.answer_boundary import PROBE_PROMPT, RenderedSpan
from courtside.chat.history_probes import HistoryChange, find_history_change
from courtside.chat.messages import format_messages, unused_noncharacters
from courtside.chat.stand_ins import (
    Marks,
    check_placeholders,
    choose_marks,
    stand_in_conversations,
)
from courtside.chat.template import ChatTemplate
from courtside.errors import ModelError
from courtside.types import Event, Message, Role, Sample, Task, Turn

CACHE_SIZE = 2048
"""Rendered spans: samples of a task share its prompt, and hints splice into spans seen before."""


class IncrementalTemplate:
    """Renders conversations turn by turn, for one tokenizer and its chat template."""

    def __init__(self, renderer: ChatTemplate):
        self.renderer = renderer
        self._end_of_turn_ids: dict[tuple[Role, Role], tuple[int, ...]] = {}
        """Of answers, by the accepted pairs of a role and the role before it."""
        self._cached_prompt = lru_cache(CACHE_SIZE)(self._render_prompt)
        self._cached_continuation = lru_cache(CACHE_SIZE)(self._render_continuation)
        self._cached_head = lru_cache(CACHE_SIZE)(self._choose_head)

    # ── ids ──────────────────────────────────────────────────────────────────────────────────────

    def render_prompt(self, messages: Sequence[Message]) -> RenderedSpan:
        """The start of a conversation."""
        return self._cached_prompt(tuple(messages))

    def render_continuation(
        self, messages: Sequence[Message], *, prompt: Sequence[Message] = ()
    ) -> RenderedSpan:
        """What follows an assistant's end-of-turn token when `messages` come next, in a
        conversation that began with `prompt`."""
        head = self._cached_head(tuple(prompt)) if prompt else ()
        return self._cached_continuation(tuple(messages), head)

    def _render_prompt(self, messages: tuple[Message, ...]) -> RenderedSpan:
        (cut,) = unused_noncharacters(messages)
        bare, prompted = (
            self.renderer.render(messages, cut, add_generation_prompt=add) for add in (False, True)
        )
        return self.renderer.boundary.split(bare, prompted, cut, messages=messages)

    def _choose_head(self, prompt: tuple[Message, ...]) -> tuple[Message, ...]:
        """The prompt, where it changes how answers begin; else nothing."""
        if prompt[-1].role != "user":
            return ()
        in_place, plain = (self.render_prompt(messages) for messages in (prompt, (PROBE_PROMPT,)))
        first, second = (
            span.token_ids[len(span.token_ids) - span.num_generation_prompt_tokens :]
            for span in (in_place, plain)
        )
        # Tools stay where they were offered.
        return () if first == second else tuple(replace(m, tools="") for m in prompt)

    def _render_continuation(
        self, messages: tuple[Message, ...], head: tuple[Message, ...]
    ) -> RenderedSpan:
        assert all(message.role != "assistant" for message in messages)
        roles: list[Role] = ["assistant", *(message.role for message in messages)]
        for previous, role in pairwise(roles):
            self.check_role(role, after=previous)
        marks = choose_marks((*head, *messages))
        probe, bare, prompted = self._render_stand_in(messages, marks, head)
        boundary = self.renderer.boundary
        bare, prompted = (boundary.split_at(text, marks.answer)[1] for text in (bare, prompted))
        whole = boundary.split(bare, prompted, marks.cut, messages=probe)
        end = boundary.length_through_end(whole.token_ids)
        if marks.name in prompted or marks.id in prompted:  # in the call, or after it, too
            after = self.renderer.tokenizer.decode(whole.token_ids[end:])
            check_placeholders(after, marks, name=self.renderer.name)
        return RenderedSpan(
            token_ids=whole.token_ids[end:],
            num_generation_prompt_tokens=min(
                whole.num_generation_prompt_tokens, len(whole.token_ids) - end
            ),
        )

    def _render_stand_in(
        self, messages: Sequence[Message], marks: Marks, head: Sequence[Message] = ()
    ) -> tuple[tuple[Message, ...], str, str]:
        """A stand-in conversation that the template takes, without and with generation prompt."""
        error: ModelError | None = None
        for probe in stand_in_conversations(
            messages, marks, head=head, with_calls=self.renderer.renders_tool_calls
        ):
            try:
                bare, prompted = (
                    self.renderer.render(probe, marks.cut, add_generation_prompt=add)
                    for add in (False, True)
                )
            except ModelError as problem:
                error = error or problem
            else:
                return probe, bare, prompted
        assert error is not None
        raise error

    def end_of_turn_ids(self, *, before: Role = "user") -> tuple[int, ...]:
        """What the template puts after an assistant's text, up to and including its end, where a
        message of role `before` comes next."""
        self.check_role(before, after="assistant")
        return self._end_of_turn_ids["assistant", before]

    def is_ended(self, ids: Sequence[int]) -> bool:
        """Whether an assistant turn ends in an EOS token, so that it needs no end-of-turn ids."""
        return bool(ids) and ids[-1] in self.renderer.eos_ids

    # ── records ──────────────────────────────────────────────────────────────────────────────────

    def prompt_turn(self, task: Task) -> Turn:
        return _make_turn("prompt", task.messages, self.render_prompt(task.messages))

    def assistant_turn(
        self, sample: Sample, events: Sequence[Event] = (), decision: str | None = None
    ) -> Turn:
        """The sampled ids, verbatim. A text from a data set has no sampler log-probs."""
        return Turn(
            role="assistant",
            text=sample.text,
            token_ids=sample.token_ids,
            completion_mask=(True,) * len(sample.token_ids),
            sampler_logp=sample.logp or None,
            events=tuple(events),
            decision=decision,
            policy_versions=sample.policy_versions,
        )

    def environment_turn(
        self,
        messages: Sequence[Message],
        *,
        add_end_of_turn: bool,
        prompt: Sequence[Message] = (),
    ) -> Turn:
        """`add_end_of_turn`: the assistant's turn was truncated, so this one ends it. `prompt` is
        how the conversation began."""
        span = self.render_continuation(messages, prompt=prompt)
        end: tuple[int, ...] = ()
        if add_end_of_turn:
            end = self.end_of_turn_ids(before=messages[0].role if messages else "user")
        return _make_turn("environment", messages, span, end)

    # ── probes of the template, each run once ────────────────────────────────────────────────────

    def check_role(self, role: Role, *, after: Role) -> None:
        """Probes once that the template renders a message of `role` after one of role `after`."""
        if (after, role) in self._end_of_turn_ids:
            return
        (next_mark,) = unused_noncharacters(())
        last = Message(role=role, content=f"Was it{next_mark}?")
        messages = (last,) if after == "assistant" else (Message(role=after, content="So."), last)
        marks = choose_marks(messages)
        fix = "Join the two into one message"
        if role != "user":
            fix = f"Say it as 'user', or use a model whose template knows {role!r}"
        fix = (
            f"{fix}; a hint can also go inside the message above it (hints.position = "
            "'last_message')"
        )
        try:
            rendered = self._render_stand_in(messages, marks)[2]
        except ModelError as error:
            raise ModelError(
                f"{error}. So no {role!r} message may follow {_a(after)} one. {fix}"
            ) from None
        if not 0 <= rendered.find(marks.answer) < rendered.find(next_mark):
            does = "moves" if next_mark in rendered else "does not render"
            raise ModelError(
                f"{self.renderer.name}: its chat template {does} a {role!r} message that follows "
                f"{_a(after)} one. {fix}"
            )
        if rendered == self._render_as_assistant(messages, marks):
            raise ModelError(
                f"{self.renderer.name}: its chat template renders a {role!r} message that follows "
                f"{_a(after)} one as an assistant's. {fix}"
            )
        between = rendered[rendered.find(marks.answer) : rendered.find(next_mark)]
        ids = self.renderer.tokenize(between.replace(marks.answer, ""), marks.cut)
        ids = ids[: self.renderer.boundary.length_through_end(ids)]
        # The end of a text; that of a call may have the rest of the call before it.
        plain = self.renderer.boundary.end_of_turn_ids
        ends_plainly = ids[len(ids) - len(plain) :] == plain
        self._end_of_turn_ids[after, role] = plain if ends_plainly else ids[-1:]

    def _render_as_assistant(self, messages: Sequence[Message], marks: Marks) -> str | None:
        """The stand-in with the last message as an assistant's; None: the template refuses it."""
        as_answer = (*messages[:-1], replace(messages[-1], role="assistant"))
        try:
            return self._render_stand_in(as_answer, marks)[2]
        except ModelError:
            return None

    @cached_property
    def history_change(self) -> HistoryChange | None:
        """How rendering a whole conversation differs from rendering it turn by turn; None: it does
        not."""
        return find_history_change(self)

    @property
    def note(self) -> str | None:
        """The change of history, for users. Sequences are never changed for it."""
        if self.history_change is None:
            return None
        change = self.history_change
        return (
            f"{self.renderer.name}: of a conversation of three {change.answers} its chat template "
            f"makes other tokens than turn by turn: {change.difference}. Sequences stay as they "
            "were sampled"
        )

    def describe_difference(
        self, ids: Sequence[int], rendered_ids: Sequence[int], num_same: int
    ) -> str:
        """Where the ids of a conversation leave those that the template renders, for messages."""
        prefix = self.renderer.tokenizer.decode(ids[:num_same][-8:])
        expected, actual = (
            self.renderer.pieces(tokens[num_same : num_same + 4]) for tokens in (rendered_ids, ids)
        )
        return f"after {prefix!r} it has {expected}, not {actual}"


def _make_turn(
    role: Literal["prompt", "environment"],
    messages: Sequence[Message],
    span: RenderedSpan,
    prefix: tuple[int, ...] = (),
) -> Turn:
    ids = prefix + span.token_ids
    return Turn(
        role=role,
        text=format_messages(messages),
        token_ids=ids,
        completion_mask=(False,) * len(ids),
        messages=tuple(messages),
        num_generation_prompt_tokens=span.num_generation_prompt_tokens,
    )


def _a(role: Role) -> str:
    return f"an {role!r}" if role == "assistant" else f"a {role!r}"
