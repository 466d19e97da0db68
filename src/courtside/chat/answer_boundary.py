"""Where an answer begins and ends in what a chat template renders.

It begins after the generation prompt, which may be empty (`[/INST]` ends the question, a tool's
result is inside the answer's message) or always there. It ends with an end token that the model
samples; history may have another token in its place (`<|end|>` for `<|return|>`), or none at all,
where the header of the next message ends the one before it (`<|user|>`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from courtside.chat.messages import unused_noncharacters
from courtside.chat.thinking import ends_thoughts
from courtside.errors import ModelError
from courtside.types import Message

if TYPE_CHECKING:
    from courtside.chat.template import ChatTemplate

PROBE_PROMPT = Message(role="user", content="Is it?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSpan:
    """Ids rendered by a template, up to and including a generation prompt."""

    token_ids: tuple[int, ...]
    num_generation_prompt_tokens: int


class AnswerBoundary:
    """For one tokenizer and its chat template."""

    def __init__(self, renderer: ChatTemplate):
        self._renderer = renderer
        self._direct_answers: set[tuple[str, ...]] = set()
        """Roles at the end of conversations that an answer follows without a prompt."""

    # ── the beginning ────────────────────────────────────────────────────────────────────────────

    def split(
        self, bare: str, prompted: str, cut: str, *, messages: Sequence[Message]
    ) -> RenderedSpan:
        """Ids of `prompted`, which is `bare` with a generation prompt. `messages` are rendered in
        both, for templates that have none."""
        renderer = self._renderer
        whole, without = renderer.tokenize(prompted, cut), renderer.tokenize(bare, cut)
        # A token across the boundary belongs to the generation prompt: without it, it differs.
        num_same = common_prefix_length(without, whole)
        # Some templates add the end of text where they add no generation prompt.
        only_end = without[num_same:] == (renderer.tokenizer.eos_token_id,)
        if bare == prompted:
            self._check_direct_answer(messages, cut)
        elif not (prompted.startswith(bare) or only_end):
            raise ModelError(
                f"{renderer.name}: its chat template changes messages where it adds a generation "
                "prompt, so the two cannot be told apart. Use a template that only adds to them"
            )
        return RenderedSpan(token_ids=whole, num_generation_prompt_tokens=len(whole) - num_same)

    def _check_direct_answer(self, messages: Sequence[Message], cut: str) -> None:
        """Refuses a template without a generation prompt, unless an answer follows the messages at
        once, or the prompt is always there."""
        roles = tuple(message.role for message in messages[-2:])
        if roles in self._direct_answers:
            return
        (mark,) = unused_noncharacters((*messages, Message(role="user", content=cut)))
        answered = (*messages, Message(role="assistant", content=f"{mark}It is."))
        prompt = self._renderer.render(messages, cut, add_generation_prompt=True)
        rendered = self._renderer.render(answered, cut, add_generation_prompt=False)
        before, _, after = rendered.partition(mark)
        if not (before.startswith(prompt) and not before[len(prompt) :].strip()):
            follow_up = self._renderer.render(
                (*answered, PROBE_PROMPT), cut, add_generation_prompt=False
            )
            if not rendered.startswith(prompt) or follow_up.partition(mark)[2].startswith(after):
                raise ModelError(
                    f"{self._renderer.name}: its chat template adds nothing where an answer begins "
                    "(add_generation_prompt has no effect), so the student would not know whose "
                    "turn it is. Use a template with a generation prompt"
                )
        self._direct_answers.add(roles)

    @cached_property
    def empty_thoughts(self) -> str:
        """What a generation prompt that switches thinking off ends with, where history does not
        have it; empty: it does, or thinking is not off."""
        cut, mark = unused_noncharacters((), 2)
        prompt = self._renderer.render((PROBE_PROMPT,), cut, add_generation_prompt=True)
        say = Message(role="assistant", content=f"{mark}It is.")
        rendered = self._renderer.render(
            (PROBE_PROMPT, say, PROBE_PROMPT), cut, add_generation_prompt=False
        )
        header = rendered.partition(mark)[0]
        is_off = ends_thoughts(prompt) and prompt.startswith(header)
        return prompt[len(header) :] if is_off else ""

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def find_end(self, ids: Sequence[int]) -> int | None:
        """Number of ids up to and including those that end an answer; None: nothing ends it."""
        ends = self._renderer.eos_ids | self._message_end_ids
        return next((i + 1 for i, token in enumerate(ids) if token in ends), None)

    def length_through_end(self, ids: Sequence[int]) -> int:
        end = self.find_end(ids)
        if end is None:
            raise ModelError(
                f"{self._renderer.name}: an answer rendered by its template holds no end token "
                f"{sorted(self._renderer.eos_ids)}, so the student would never stop where the "
                "template does. Set eos_token_id in generation_config.json to the token that ends "
                "an answer"
            )
        return end

    @cached_property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """What a conversation has after an assistant's text, up to and including its end."""
        cut, mark, next_mark = unused_noncharacters((), 3)
        probe = (
            PROBE_PROMPT,
            Message(role="assistant", content=f"It is.{mark}"),
            Message(role="user", content=f"Was it{next_mark}?"),
        )
        rendered = self._renderer.render(probe, cut, add_generation_prompt=True)
        after = self.split_at(rendered, mark)[1]
        ids = self._renderer.tokenize(self.split_at(after, next_mark)[0], cut)
        return ids[: self.length_through_end(ids)]

    def end_answer(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids of an answer, up to and including an EOS token. The template may add text after it,
        which no model samples, or no end at all: then the answer ends as it does in history."""
        eos_ids = self._renderer.eos_ids
        end = next((i + 1 for i, token in enumerate(ids) if token in eos_ids), None)
        return ids + self.end_of_turn_ids if end is None else ids[:end]

    @cached_property
    def _message_end_ids(self) -> frozenset[int]:
        """The special token right after a question, which ends answers in history, too, where only
        the last answer has an EOS token."""
        cut, mark = unused_noncharacters((), 2)
        ask = Message(role="user", content=f"Is it?{mark}")
        say = Message(role="assistant", content=f"It is.{mark}")
        after_ask, after_answer = (
            self._renderer.tokenize(rendered.rpartition(mark)[2], cut)
            for rendered in (
                self._renderer.render(messages, cut, add_generation_prompt=False)
                for messages in ((ask,), (PROBE_PROMPT, say))
            )
        )
        if not self._renderer.eos_ids & frozenset(after_answer):
            return frozenset()
        return frozenset(after_ask[:1]) & self._renderer.special_ids

    def split_at(self, rendered: str, mark: str) -> tuple[str, str]:
        before, separator, after = rendered.partition(mark)
        if not separator or mark in after:
            raise ModelError(
                f"{self._renderer.name}: its chat template does not render an earlier message "
                "exactly once, so turns cannot be told apart. Use a template that does"
            )
        return before, after


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading ids that two sequences share."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
