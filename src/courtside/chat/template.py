"""Messages to token ids through the model's own chat template.

Sampled ids are never re-tokenized; only prompts and texts from outside go through the tokenizer,
and only the template can give special tokens: `<|im_end|>` inside a message is ten characters. What
the template does at the boundary of an answer is checked once, at construction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from courtside.chat.answer_boundary import AnswerBoundary
from courtside.chat.messages import (
    NONCHARACTERS,
    join_thoughts,
    message_tree,
    split_response_prefix,
    unused_noncharacters,
)
from courtside.chat.template_variables import check_args, check_date, set_clock, writes_date
from courtside.chat.thinking import begins_with_thoughts, name_thoughts
from courtside.errors import ModelError
from courtside.interrupts import time_limit
from courtside.types import Message, Task

MAX_CACHED_PROMPTS = 4096

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "courtside_probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
PROBE_CALL: dict[str, Any] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "courtside_probe", "arguments": {"at": 1}},
}

RENDER_SECONDS = 20
"""For what is rendered at construction; ordinary templates take milliseconds."""

MAX_OPENING = 100
"""Characters of an answer that a generation prompt may have begun: `<think>` and the like."""

TEMPLATE_ERRORS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What a template can raise: it is code of others."""


class TemplateTimeoutError(Exception):
    """Raised inside a template that does not end."""


class ChatTemplate:
    """Renders messages to token ids with one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str,
        eos_ids: Collection[int],
        args: Mapping[str, Any] = MappingProxyType({}),
        day: date | None = None,
        field: str = "student",
        render_seconds: float = RENDER_SECONDS,
    ):
        """`args` are the template's switches, `day` is the date that it writes (None: today's);
        `field` is the section of the recipe that has them."""
        self.tokenizer = tokenizer
        self.name = name
        self.eos_ids = frozenset(eos_ids)
        if not tokenizer.chat_template:
            raise ModelError(
                f"{name}: its tokenizer has no chat template, so messages cannot be rendered. Use "
                "an instruction-tuned model, or put a chat_template.jinja beside its tokenizer"
            )
        if args:
            check_args(tokenizer, args, name=name, field=field)
        if day is not None and field == "student":
            check_date(tokenizer, day, name=name, field=field)
        self._args, self._day = dict(args), day
        self._has_fixed_date = day is not None
        added = {id: t for id, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special_ids = frozenset(added) | frozenset(tokenizer.all_special_ids)
        tokens = {str(t) for t in added.values()} | set(tokenizer.all_special_tokens)
        self.special_tokens = sorted(token for token in tokens if len(token) > 1)
        special = "|".join(map(re.escape, self.special_tokens)) or "(?!)"
        self._first_of_special = re.compile(f"(?={special}).", re.DOTALL)
        self.boundary = AnswerBoundary(self)
        self._cached_prompt_ids = lru_cache(MAX_CACHED_PROMPTS)(self._render_prompt)
        try:
            with time_limit(render_seconds, TemplateTimeoutError):
                self._check_boundary()
        except TemplateTimeoutError:
            raise ModelError(
                f"{name}: its chat template renders a short prompt for more than {render_seconds} "
                "s; it seems to loop. Use a template that ends"
            ) from None

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt with its generation prompt, rendered once for length check, samples and
        teacher. A last message of the assistant is a response prefix: the start of the answer,
        which is part of the prompt."""
        return self._cached_prompt_ids(tuple(messages))

    def _render_prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        cut = unused_noncharacters(messages)[0]
        request, response_prefix = split_response_prefix(messages)
        prompt = self.tokenize(self.render(request, cut, add_generation_prompt=True), cut)
        return prompt + self.tokenize(self._split_special(response_prefix, cut), cut)

    def count_prompt_tokens(
        self, task: Task, *, max_new_tokens: int = 0, with_completions: bool = False
    ) -> int:
        """Of the prompt, and of what a completion from data has beyond `max_new_tokens`."""
        sizes = [
            len(self.completion_ids(task.messages, *answer))
            for answer in task.given_answers
            if with_completions
        ]
        excess = max(0, max(sizes, default=0) - max_new_tokens)
        return len(self.prompt_ids(task.messages)) + excess

    def completion_ids(
        self, messages: Sequence[Message], text: str, thoughts: str = ""
    ) -> tuple[int, ...]:
        """Ids of a text from outside as the answer to `messages`, its EOS token included. After a
        response prefix, those of the text alone. `thoughts` before the text, where they are apart
        from it, are what the template makes of them."""
        request, response_prefix = split_response_prefix(messages)
        conversation = (*request, join_thoughts(response_prefix + text, thoughts))
        cut = unused_noncharacters(conversation)[0]
        before = self.render(request, cut, add_generation_prompt=True)
        before += self._split_special(response_prefix, cut)
        rendered = self.render(conversation, cut, add_generation_prompt=False)
        opening = "" if thoughts else find_opening(before, text)
        answer = rendered[len(before) :]
        if not (
            rendered.startswith(before)
            and _holds(answer, text[len(opening) :], cut)
            and _holds(answer, thoughts, cut)
        ):
            if thoughts:
                raise self._make_answer_error(before, rendered)
            # The template renders answers in another way than they are sampled.
            if opening:  # after thoughts that the generation prompt has opened
                return self.tokenize(text[len(opening) :], cut) + self.boundary.end_of_turn_ids
            header = self.header_of(before, rendered, text)
            if header is None:
                raise self._make_answer_error(before, rendered)
            return self.boundary.end_answer(self.tokenize(rendered[len(header) :], cut))
        prompt, whole = self.prompt_ids(messages), self.tokenize(rendered, cut)
        ids = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:
            # The tokenizer merged the prompt's last characters with the answer's first ("\n" with
            # "\n"). The student cannot: it samples after the prompt's own tokens.
            ids = self.tokenize(answer, cut)
        return self.boundary.end_answer(ids)

    def header_of(self, prompt: str, rendered: str, text: str) -> str | None:
        """The prompt as it is before an answer that stands in history: without the empty thoughts
        of a generation prompt that switches thinking off. None: it is not rendered so, either."""
        empty = self.boundary.empty_thoughts
        header = prompt.removesuffix(empty) if empty else None
        if header is None or begins_with_thoughts(text) or not rendered.startswith(header):
            return None
        return header

    def _make_answer_error(self, before: str, rendered: str) -> ModelError:
        change = "leaves text of an answer out"
        if not rendered.startswith(before):
            change = (
                "with an answer in place renders the prompt differently than without one, so the "
                "answer's first tokens are not where the student would sample them"
            )
        return ModelError(
            f"{self.name}: its chat template {change} (a thinking block, perhaps; the generation "
            f"prompt ends with {before[-40:]!r}). Use texts that begin as that ends, thoughts "
            "included; switch thinking off or on (student.chat_template_args), where the template "
            "can; or let a model write the texts (rollout.off_policy_source = 'teacher')"
        )

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One text per token, for display."""
        return [str(self.tokenizer.decode([token])) for token in ids]

    def render(self, messages: Sequence[Message], cut: str, *, add_generation_prompt: bool) -> str:
        """The template's text, with `cut` inside special tokens that messages spell out."""

        def split_special(value: Any) -> Any:
            if isinstance(value, str):
                return self._split_special(value, cut)
            if isinstance(value, Mapping):
                return {split_special(key): split_special(inner) for key, inner in value.items()}
            return (
                [split_special(inner) for inner in value]
                if isinstance(value, (list, tuple))
                else value
            )

        trees = [message_tree(message) for message in messages]
        if any("reasoning_content" in tree for tree in trees):
            if not self.renders_thoughts:
                raise ModelError(
                    f"{self.name}: its chat template does not render thoughts that a message has "
                    "apart from its content (reasoning_content). Put them at the beginning of "
                    "`content` as the model writes them (<think>…</think>), or remove them"
                )
            trees = [name_thoughts(tree) for tree in trees]
        tools = next((json.loads(message.tools) for message in messages if message.tools), None)
        if tools and not self.takes_tools:
            raise ModelError(
                f"{self.name}: its chat template does not render `tools`, so the student would not "
                "see them. Describe the tools in the system message and remove `tools`, or use a "
                "model whose template takes tools"
            )
        if any("tool_calls" in tree for tree in trees) and not self.renders_tool_calls:
            raise ModelError(
                f"{self.name}: its chat template does not render `tool_calls`, so the calls would "
                "be missing from the prompt. Write them as text in `content`, or use a model whose "
                "template renders them"
            )
        plain = [split_special(tree) for tree in trees]
        try:
            return self._apply(plain, split_special(tools), add_generation_prompt)
        except TEMPLATE_ERRORS as error:
            roles = [message["role"] for message in plain]
            fix = ""
            if roles[0] == "system" and not self.takes_system:
                fix = (
                    ". It takes no system message: put the text into the user's (position = "
                    "'user' of a context, 'last_message' of hints)"
                )
            raise ModelError(
                f"{self.name}: its chat template refuses messages with roles {roles}: "
                f"{error or type(error).__name__}{fix}"
            ) from None

    def _split_special(self, text: str, cut: str) -> str:
        return self._first_of_special.sub(lambda first: first[0] + cut, text)

    def _apply(self, trees: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str:
        if any("tool_calls" in tree for tree in trees) and self._takes_arguments_as_text:
            trees = [_encode_arguments(tree) for tree in trees]
        return self._apply_as_is(trees, tools, add_generation_prompt)

    def _apply_as_is(self, trees: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str:
        options = {} if tools is None else {"tools": tools}
        if self._writes_date:
            set_clock(self.tokenizer, self._day)
        return str(
            self.tokenizer.apply_chat_template(
                trees,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options,
                **self._args,
            )
        )

    @cached_property
    def _writes_date(self) -> bool:
        return writes_date(self.tokenizer)

    # ── what the template can do, each probed once ───────────────────────────────────────────────

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template renders a system message at the start."""
        trees = [{"role": role, "content": f"Is it {role}?"} for role in ("system", "user")]
        try:
            return "Is it system?" in self._apply_as_is(trees, None, True)
        except TEMPLATE_ERRORS:
            return False

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template renders tool schemas."""
        try:
            text = self._apply([PROBE_ASK], [PROBE_TOOL], True)
        except TEMPLATE_ERRORS:
            return False
        return "courtside_probe" in text

    @cached_property
    def renders_thoughts(self) -> bool:
        """Whether the template renders thoughts that an assistant's message has apart from its
        content, in the last answer at least, or in a call."""
        for answer in ({"content": "It is."}, {"content": "", "tool_calls": [PROBE_CALL]}):
            tree = {"role": "assistant", **answer, "reasoning_content": "courtside thinks"}
            try:
                if "courtside thinks" in self._apply([PROBE_ASK, name_thoughts(tree)], None, False):
                    return True
            except TEMPLATE_ERRORS:
                continue
        return False

    @cached_property
    def renders_tool_calls(self) -> bool:
        """Whether the template renders `tool_calls` of an assistant's message."""
        return self._takes_arguments_as_text is not None

    @cached_property
    def _takes_arguments_as_text(self) -> bool | None:
        """Whether arguments of a call are JSON text to the template, not an object; None: it
        renders no calls."""
        call = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
        for as_text in (False, True):
            tree = _encode_arguments(call) if as_text else call
            try:
                rendered = self._apply_as_is([PROBE_ASK, tree], None, False)
            except TEMPLATE_ERRORS:
                continue
            # Some render the call's id in place of its name.
            if "courtside_probe" in rendered or PROBE_CALL["id"] in rendered:
                return as_text
        return None

    @cached_property
    def probe_call_text(self) -> str | None:
        """`PROBE_CALL` as the text of a sampled reply that the template would render so; None: the
        template renders no calls."""
        ask = {"role": "user", "content": NONCHARACTERS[1]}
        call = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
        try:
            rendered = self._apply([ask, call], [PROBE_TOOL], False)
        except TEMPLATE_ERRORS:
            return None
        _, mark, reply = rendered.rpartition(NONCHARACTERS[1])
        return self.text(self.tokenize(reply, NONCHARACTERS[0])) if mark else None

    @property
    def date_note(self) -> str | None:
        """What a user should know of a template that writes the date; None: nothing."""
        if self._has_fixed_date or not self._writes_date:
            return None
        return (
            f"{self.name}: its chat template writes today's date into prompts, so a run that is "
            "resumed on another day has other ones. student.chat_template_date keeps one"
        )

    def tokenize(self, rendered: str, cut: str) -> tuple[int, ...]:
        """Ids of a text by `render`; no token spans a `cut`."""
        pieces = [
            self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            for piece in rendered.split(cut)
        ]
        return tuple(token for piece in pieces for token in piece)

    def _check_boundary(self) -> None:
        ask = (Message(role="user", content="Is it?"),)
        say = (*ask, Message(role="assistant", content="It is."))
        prompt, bare = (
            self.render(ask, NONCHARACTERS[0], add_generation_prompt=add) for add in (True, False)
        )
        self.boundary.split(bare, prompt, NONCHARACTERS[0], messages=ask)
        if self.render(say, NONCHARACTERS[0], add_generation_prompt=False).startswith(prompt):
            self.completion_ids(ask, "It is.")
        ids, bos = self.prompt_ids(ask), self.tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            raise ModelError(
                f"{self.name}: prompts begin with two BOS tokens; the template and the tokenizer "
                "both add one. Remove it from one of them"
            )


PROBE_ASK = {"role": "user", "content": "Is it?"}


def _encode_arguments(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text."""
    calls = [dict(call) for call in tree.get("tool_calls", ())]
    for call in calls:
        function = dict(call["function"])
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        call["function"] = function
    return {**tree, "tool_calls": calls} if calls else dict(tree)


def find_opening(prompt: str, text: str) -> str:
    """The beginning of an answer's text that the generation prompt has already: `<think>` and the
    like. White space at the prompt's end may differ."""
    begun = [text[:n] for n in range(min(len(text), MAX_OPENING), 0, -1) if text[:n].strip()]
    exact = (x for x in begun if prompt.endswith(x))
    alike = (x for x in begun if prompt.rstrip().endswith(x.rstrip()))
    return next(exact, None) or next(alike, "")


def _holds(rendered: str, text: str, cut: str) -> bool:
    """Whether a text is in what was rendered, whatever its white space."""
    return "".join(text.split()) in "".join(rendered.replace(cut, "").split())
