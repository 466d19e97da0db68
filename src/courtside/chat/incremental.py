"""Incremental chat rendering: the token ids that a template puts between assistant turns.

Earlier turns are never rendered again, so a turn costs the same however long the conversation is.
The ids come from a short probe conversation, cut after its assistant's end-of-turn token. Whether
the template renders a whole conversation to the same ids is probed once (`note`): the ids that the
student was given and sampled are what trains, whatever the template makes of them afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

from courtside.chat.template import ChatTemplate, format_messages, unused_noncharacters
from courtside.errors import ModelError
from courtside.types import Event, Message, Role, Sample, Task, Turn

PROBE_PROMPT = Message(role="user", content="Is it?")
CACHE_SIZE = 2048
"""Rendered spans: samples of a task share its prompt, and hints splice into spans seen before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSpan:
    """Ids rendered by a template, up to and including a generation prompt."""

    token_ids: tuple[int, ...]
    num_generation_prompt_tokens: int


class IncrementalTemplate:
    """Renders conversations turn by turn, for one tokenizer and its chat template."""

    def __init__(self, renderer: ChatTemplate):
        self.renderer = renderer
        self._accepted_roles: set[tuple[Role, Role]] = set()
        self._cached_prompt = lru_cache(CACHE_SIZE)(self._render_prompt)
        self._cached_continuation = lru_cache(CACHE_SIZE)(self._render_continuation)

    # ── ids ──────────────────────────────────────────────────────────────────────────────────────

    def render_prompt(self, messages: Sequence[Message]) -> RenderedSpan:
        """The start of a conversation."""
        return self._cached_prompt(tuple(messages))

    def render_continuation(self, messages: Sequence[Message]) -> RenderedSpan:
        """What follows an assistant's end-of-turn token when `messages` come next."""
        return self._cached_continuation(tuple(messages))

    def _render_prompt(self, messages: tuple[Message, ...]) -> RenderedSpan:
        (cut,) = unused_noncharacters(messages)
        bare, prompted = (
            self.renderer.render(messages, cut, add_generation_prompt=add) for add in (False, True)
        )
        return self._make_span(bare, prompted, cut)

    def _render_continuation(self, messages: tuple[Message, ...]) -> RenderedSpan:
        assert all(message.role != "assistant" for message in messages)
        roles: list[Role] = ["assistant", *(message.role for message in messages)]
        for previous, role in pairwise(roles):
            self.check_role(role, after=previous)
        cut, mark = unused_noncharacters(messages, 2)
        probe = (PROBE_PROMPT, _probe_answer(mark), *messages)
        bare, prompted = (
            self._split_at(self.renderer.render(probe, cut, add_generation_prompt=add), mark)[1]
            for add in (False, True)
        )
        whole = self._make_span(bare, prompted, cut)
        end = self.renderer.length_through_eos(whole.token_ids)
        return RenderedSpan(
            token_ids=whole.token_ids[end:],
            num_generation_prompt_tokens=whole.num_generation_prompt_tokens,
        )

    @cached_property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """What the template puts after an assistant's text, up to and including the EOS token."""
        cut, mark, next_mark = unused_noncharacters((), 3)
        probe = (
            PROBE_PROMPT,
            _probe_answer(mark),
            Message(role="user", content=f"Was it{next_mark}?"),
        )
        rendered = self.renderer.render(probe, cut, add_generation_prompt=True)
        after = self._split_at(rendered, mark)[1]
        ids = self.renderer.tokenize(self._split_at(after, next_mark)[0], cut)
        return ids[: self.renderer.length_through_eos(ids)]

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
        )

    def environment_turn(self, messages: Sequence[Message], *, add_end_of_turn: bool) -> Turn:
        """`add_end_of_turn`: the assistant's turn was truncated, so this one ends it."""
        prefix = self.end_of_turn_ids if add_end_of_turn else ()
        span = self.render_continuation(messages)
        return _make_turn("environment", messages, span, prefix)

    # ── probes of the template, each run once ────────────────────────────────────────────────────

    def check_role(self, role: Role, *, after: Role) -> None:
        """Probes once that the template renders a message of `role` after one of role `after`."""
        if (after, role) in self._accepted_roles:
            return
        cut, mark, next_mark = unused_noncharacters((), 3)
        last = Message(role=role, content=f"Was it{next_mark}?")
        middle = () if after == "assistant" else (Message(role=after, content="So."),)
        fix = "Join the two into one message"
        if role != "user":
            fix = f"Say it as 'user', or use a model whose template knows {role!r}"
        fix = (
            f"{fix}; a hint can also go inside the message above it (hints.position = "
            "'last_message')"
        )
        try:
            rendered = self.renderer.render(
                (PROBE_PROMPT, _probe_answer(mark), *middle, last), cut, add_generation_prompt=True
            )
        except ModelError as error:
            raise ModelError(
                f"{error}. So no {role!r} message may follow {_a(after)} one. {fix}"
            ) from None
        if not 0 <= rendered.find(mark) < rendered.find(next_mark):
            does = "moves" if next_mark in rendered else "does not render"
            raise ModelError(
                f"{self.renderer.name}: its chat template {does} a {role!r} message that follows "
                f"{_a(after)} one. {fix}"
            )
        ids = self.renderer.tokenize(rendered[rendered.find(mark) : rendered.find(next_mark)], cut)
        self.renderer.length_through_eos(ids)
        self._accepted_roles.add((after, role))

    @cached_property
    def note(self) -> str | None:
        """How rendering a whole conversation differs from rendering it turn by turn; None: it does
        not. Sequences are never changed for it."""
        for thinking, which in (
            ("", ""),
            ("<think>\nHm.\n</think>\n\n", " that begin with thinking"),
        ):
            answers = [f"{thinking}{text}" for text in ("It is.", "It was.", "It will.")]
            difference = self._difference(answers)
            if difference is not None:
                return (
                    f"{self.renderer.name}: of a conversation of three answers{which} its chat "
                    f"template makes other tokens than turn by turn: {difference}. Sequences stay "
                    "as they were sampled"
                )
        return None

    def _difference(self, answers: Sequence[str]) -> str | None:
        (cut,) = unused_noncharacters(())
        asks = [Message(role="user", content=text) for text in ("Is it?", "Was it?", "Will it?")]
        spans = [
            self.render_prompt(asks[:1]),
            *(self.render_continuation([ask]) for ask in asks[1:]),
        ]
        ids: list[int] = []
        for span, answer in zip(spans, answers, strict=True):
            prompt = self.renderer.tokenizer.decode(span.token_ids)
            # A generation prompt may begin the answer ("<think>\n"); the student continues it.
            begun = max(n for n in range(len(answer)) if prompt.endswith(answer[:n]))
            ids += [*span.token_ids, *self.renderer.tokenize(answer[begun:], cut)]
            ids += self.end_of_turn_ids
        conversation = [
            message
            for ask, answer in zip(asks, answers, strict=True)
            for message in (ask, Message(role="assistant", content=answer))
        ]
        rendered = self.renderer.render(conversation, cut, add_generation_prompt=False)
        whole = self.renderer.tokenize(rendered, cut)
        num_same = common_prefix_length(ids, whole)
        return None if num_same == len(ids) else self.describe_difference(ids, whole, num_same)

    def describe_difference(
        self, ids: Sequence[int], rendered_ids: Sequence[int], num_same: int
    ) -> str:
        """Where the ids of a conversation leave those that the template renders, for messages."""
        prefix = self.renderer.tokenizer.decode(ids[:num_same][-8:])
        expected, actual = (
            self.renderer.pieces(tokens[num_same : num_same + 4]) for tokens in (rendered_ids, ids)
        )
        return f"after {prefix!r} it has {expected}, not {actual}"

    # ── parts ────────────────────────────────────────────────────────────────────────────────────

    def _make_span(self, bare: str, prompted: str, cut: str) -> RenderedSpan:
        if len(prompted) <= len(bare) or not prompted.startswith(bare):
            raise ModelError(
                f"{self.renderer.name}: its chat template changes messages where it adds a "
                "generation prompt, so the two cannot be told apart. Use a template that only adds "
                "to them"
            )
        whole = self.renderer.tokenize(prompted, cut)
        # A token across the boundary belongs to the generation prompt: without it, it differs.
        before = common_prefix_length(self.renderer.tokenize(bare, cut), whole)
        return RenderedSpan(token_ids=whole, num_generation_prompt_tokens=len(whole) - before)

    def _split_at(self, rendered: str, mark: str) -> tuple[str, str]:
        before, separator, after = rendered.partition(mark)
        if not separator or mark in after:
            raise ModelError(
                f"{self.renderer.name}: its chat template does not render an earlier message "
                "exactly once, so turns cannot be told apart. Use a template that does"
            )
        return before, after


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading ids that two sequences share."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _probe_answer(mark: str) -> Message:
    return Message(role="assistant", content=f"It is.{mark}")


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
