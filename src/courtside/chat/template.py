"""Messages to token ids through the model's own chat template.

Sampled ids are never re-tokenized; only prompts and texts from outside go through the tokenizer,
and only the template can give special tokens: `<|im_end|>` inside a message is ten characters. What
the template does at the boundary of an answer is checked once, at construction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from jinja2 import TemplateError

from courtside.errors import ModelError, TaskError
from courtside.interrupts import time_limit
from courtside.types import Grade, Message, Sample, Source, Task, Trajectory, Turn

NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode reserves them for internal use, such as marking where tokens must be split."""

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
        render_seconds: float = RENDER_SECONDS,
    ):
        self.tokenizer = tokenizer
        self.name = name
        self.eos_ids = frozenset(eos_ids)
        if not tokenizer.chat_template:
            raise ModelError(
                f"{name}: its tokenizer has no chat template, so messages cannot be rendered. Use "
                "an instruction-tuned model, or put a chat_template.jinja beside its tokenizer"
            )
        added = tokenizer.added_tokens_decoder.values()
        tokens = {str(t) for t in added if t.special} | set(tokenizer.all_special_tokens)
        special = "|".join(sorted(re.escape(t) for t in tokens if len(t) > 1)) or "(?!)"
        self._first_of_special = re.compile(f"(?={special}).", re.DOTALL)
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
        teacher. A last message of the assistant is a response prefix: the start of the answer, which is
        part of the prompt."""
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
        texts = (task.completion, task.rejected) if with_completions else ()
        sizes = [
            len(self.completion_ids(task.messages, text)) for text in texts if text is not None
        ]
        excess = max(0, max(sizes, default=0) - max_new_tokens)
        return len(self.prompt_ids(task.messages)) + excess

    def completion_ids(self, messages: Sequence[Message], text: str) -> tuple[int, ...]:
        """Ids of a text from outside as the answer to `messages`, its EOS token included. After a
        response prefix, those of the text alone."""
        request, response_prefix = split_response_prefix(messages)
        conversation = (*request, Message(role="assistant", content=response_prefix + text))
        cut = unused_noncharacters(conversation)[0]
        before = self.render(request, cut, add_generation_prompt=True)
        before += self._split_special(response_prefix, cut)
        rendered = self.render(conversation, cut, add_generation_prompt=False)
        if not rendered.startswith(before):
            raise ModelError(
                f"{self.name}: with an answer in place the template renders the prompt differently "
                "than without one (a thinking block, perhaps), so the answer's first tokens are "
                "not where the student would sample them. Use texts that the template accepts, or "
                "let a model write them (rollout.off_policy_source = 'teacher')"
            )
        prompt, whole = self.prompt_ids(messages), self.tokenize(rendered, cut)
        answer = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:
            # The tokenizer merged the prompt's last characters with the answer's first ("\n" with
            # "\n"). The student cannot: it samples after the prompt's own tokens.
            answer = self.tokenize(rendered[len(before) :], cut)
        # The template may add text after the EOS token, which no model samples.
        return answer[: self.length_through_eos(answer)]

    def length_through_eos(self, ids: Sequence[int]) -> int:
        """Number of ids up to and including the first EOS token."""
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), None)
        if end is None:
            raise ModelError(
                f"{self.name}: an answer rendered by its template holds no end token "
                f"{sorted(self.eos_ids)}, so the student would never stop where the template does. "
                "Set eos_token_id in generation_config.json to the token that ends an answer"
            )
        return end + 1

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
            raise ModelError(
                f"{self.name}: its chat template refuses messages with roles {roles}: "
                f"{error or type(error).__name__}"
            ) from None

    def _split_special(self, text: str, cut: str) -> str:
        return self._first_of_special.sub(lambda first: first[0] + cut, text)

    def _apply(self, trees: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str:
        options = {} if tools is None else {"tools": tools}
        return str(
            self.tokenizer.apply_chat_template(
                trees, add_generation_prompt=add_generation_prompt, tokenize=False, **options
            )
        )

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template renders tool schemas."""
        try:
            text = self._apply([{"role": "user", "content": "Is it?"}], [PROBE_TOOL], True)
        except TEMPLATE_ERRORS:
            return False
        return "courtside_probe" in text

    @cached_property
    def renders_tool_calls(self) -> bool:
        """Whether the template renders `tool_calls` of an assistant's message."""
        ask = {"role": "user", "content": "Is it?"}
        call = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
        try:
            return "courtside_probe" in self._apply([ask, call], None, False)
        except TEMPLATE_ERRORS:
            return False

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
        prompt = self.render(ask, NONCHARACTERS[0], add_generation_prompt=True)
        bare = self.render(ask, NONCHARACTERS[0], add_generation_prompt=False)
        if len(prompt) <= len(bare) or not prompt.startswith(bare):
            raise ModelError(
                f"{self.name}: its chat template adds nothing where an answer begins "
                "(add_generation_prompt has no effect), so the student would not know whose turn "
                "it is. Use a template with a generation prompt"
            )
        if self.render(say, NONCHARACTERS[0], add_generation_prompt=False).startswith(prompt):
            self.completion_ids(ask, "It is.")
        ids, bos = self.prompt_ids(ask), self.tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            raise ModelError(
                f"{self.name}: prompts begin with two BOS tokens; the template and the tokenizer "
                "both add one. Remove it from one of them"
            )


def unused_noncharacters(messages: Sequence[Message], num: int = 1) -> list[str]:
    """Noncharacters that do not occur in `messages`."""
    characters = {c for m in messages for text in (m.content, m.extra, m.tools) for c in text}
    free = [mark for mark in NONCHARACTERS if mark not in characters]
    if len(free) < num:
        raise TaskError(
            f"a message holds {len(NONCHARACTERS) - len(free)} of Unicode's noncharacters U+FDD0 "
            "to U+FDEF, which texts cannot and of which rendering needs a few. Remove them from it"
        )
    return free[:num]


def split_response_prefix(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """The request, and the start of the answer; empty: none is given."""
    *request, last = messages
    return (request, last.content) if request and last.role == "assistant" else (messages, "")


def message_tree(message: Message) -> dict[str, Any]:
    """The message in the format of chat APIs."""
    extra = json.loads(message.extra) if message.extra else {}
    return {"role": message.role, "content": message.content, **extra}


# ── messages and records ─────────────────────────────────────────────────────────────────────────


def insert_context(
    messages: Sequence[Message], text: str, place: Literal["system", "user"]
) -> tuple[Message, ...]:
    """The prompt with `text` in its system message, or at the end of its last user message.

    >>> insert_context([Message(role="user", content="Hi")], "Be brief.", "system")[0].content
    'Be brief.'
    """
    if place == "system":
        if messages[0].role == "system":
            joined = replace(messages[0], content=f"{messages[0].content}\n\n{text}")
            return (joined, *messages[1:])
        return (Message(role="system", content=text), *messages)
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if last is None:
        return (*messages, Message(role="user", content=text))
    joined = replace(messages[last], content=f"{messages[last].content}\n\n{text}")
    return (*messages[:last], joined, *messages[last + 1 :])


def make_trajectory(
    task: Task,
    prompt_ids: tuple[int, ...],
    sample: Sample,
    *,
    id: str,
    source: Source,
    policy_version: int | None,
    temperature: float,
    grade: Grade | None,
    preference: Literal["better", "worse"] | None = None,
) -> Trajectory:
    """A single-turn trajectory. A text from a data set has no sampler log-probs."""
    prompt = Turn(
        role="prompt",
        text=format_messages(task.messages),
        token_ids=prompt_ids,
        completion_mask=(False,) * len(prompt_ids),
    )
    answer = Turn(
        role="assistant",
        text=sample.text,
        token_ids=sample.token_ids,
        completion_mask=(True,) * len(sample.token_ids),
        sampler_logp=None if source == "dataset" else sample.logp,
    )
    return Trajectory(
        id=id,
        task=task,
        turns=(prompt, answer),
        source=source,
        policy_version=policy_version,
        temperature=temperature,
        stop=sample.stop,
        grade=grade,
        preference=preference,
    )


def format_messages(messages: Sequence[Message]) -> str:
    """Messages as display text; tool calls and the like follow as JSON, and tools come first."""
    tools = [f"tools: {message.tools}" for message in messages if message.tools]
    texts = ("\n".join(filter(None, (message.content, message.extra))) for message in messages)
    return "\n\n".join(
        [*tools, *(f"{m.role}: {text}" for m, text in zip(messages, texts, strict=True))]
    )
