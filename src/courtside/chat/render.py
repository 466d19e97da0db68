"""Messages to token ids through the model's own template.

What a model wrote is kept as ids and never re-tokenised; only prompts and texts from outside go
through the tokenizer, and only the template can write special tokens: `<|im_end|>` inside a message
is ten characters. What the template does at the boundary of an answer is checked once, when the
renderer is made, not assumed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from jinja2 import TemplateError

from courtside.errors import ModelError
from courtside.types import Message

CUTS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Noncharacters: Unicode keeps them out of texts, for uses like a mark where tokens must part."""


class Renderer:
    """Turns messages into ids for one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, *, name: str, eos_ids: Collection[int]):
        self.tokenizer = tokenizer
        self.name = name
        self.eos_ids = frozenset(eos_ids)
        if not tokenizer.chat_template:
            raise ModelError(
                f"{name}: its tokenizer has no chat template, so messages cannot be rendered. Use "
                "an instruction-tuned model, or put a chat_template.jinja beside its tokenizer"
            )
        added = tokenizer.added_tokens_decoder.values()
        words = {str(word) for word in added if word.special} | set(tokenizer.all_special_tokens)
        special = "|".join(sorted(re.escape(word) for word in words if len(word) > 1)) or "(?!)"
        self._first_of_special = re.compile(f"(?={special}).", re.DOTALL)
        self._check_boundary()

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Everything up to where the assistant begins to write."""
        cut = _cut_for(messages)
        return self._ids(self._render(messages, cut, add_generation_prompt=True), cut)

    def answer_ids(self, messages: Sequence[Message], text: str) -> tuple[int, ...]:
        """Ids of an answer from outside, its end token included, to stand behind `prompt_ids`."""
        conversation = (*messages, Message(role="assistant", content=text))
        cut = _cut_for(conversation)
        before = self._render(messages, cut, add_generation_prompt=True)
        rendered = self._render(conversation, cut, add_generation_prompt=False)
        if not rendered.startswith(before):
            raise ModelError(
                f"{self.name}: with an answer in place the template renders the prompt differently "
                "than without one (a thinking block, perhaps), so the answer's first tokens are "
                "not where the student would write them. Use texts that the template accepts, or "
                "let a model write them (rollout.rest = 'teacher')"
            )
        prompt, whole = self._ids(before, cut), self._ids(rendered, cut)
        answer = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:
            # The tokenizer merged the prompt's last characters with the answer's first ("\n" with
            # "\n"). The student cannot: it writes behind the prompt's own tokens.
            answer = self._ids(rendered[len(before) :], cut)
        end = next((i for i, token in enumerate(answer) if token in self.eos_ids), None)
        if end is None:
            raise self._never_ends()
        return answer[: end + 1]  # what the template puts behind the end token nobody writes

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One text per token, for display."""
        return [str(self.tokenizer.decode([token])) for token in ids]

    def _render(self, messages: Sequence[Message], cut: str, *, add_generation_prompt: bool) -> str:
        """The template's text, with `cut` inside the special words that the messages hold."""

        def parted(text: str) -> str:
            return self._first_of_special.sub(lambda first: first[0] + cut, text)

        plain = [{"role": m.role, "content": parted(m.content)} for m in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    plain, add_generation_prompt=add_generation_prompt, tokenize=False
                )
            )
        except TemplateError as error:
            roles = [m.role for m in messages]
            raise ModelError(
                f"{self.name}: its chat template refuses messages with roles {roles}: {error}"
            ) from None

    def _ids(self, rendered: str, cut: str) -> tuple[int, ...]:
        pieces = [
            self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            for piece in rendered.split(cut)
        ]
        return tuple(token for piece in pieces for token in piece)

    def _check_boundary(self) -> None:
        ask = (Message(role="user", content="Is it?"),)
        say = (*ask, Message(role="assistant", content="It is."))
        prompt = self._render(ask, CUTS[0], add_generation_prompt=True)
        bare = self._render(ask, CUTS[0], add_generation_prompt=False)
        if len(prompt) <= len(bare) or not prompt.startswith(bare):
            raise ModelError(
                f"{self.name}: its chat template adds nothing where an answer begins "
                "(add_generation_prompt has no effect), so the student would not know whose turn "
                "it is. Use a template with a generation prompt"
            )
        if self._render(say, CUTS[0], add_generation_prompt=False).startswith(prompt):
            self.answer_ids(ask, "It is.")
        ids, bos = self.prompt_ids(ask), self.tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            raise ModelError(
                f"{self.name}: prompts begin with two BOS tokens; the template and the tokenizer "
                "both add one. Remove it from one of them"
            )

    def _never_ends(self) -> ModelError:
        return ModelError(
            f"{self.name}: an answer rendered by its template holds no end token "
            f"{sorted(self.eos_ids)}, so the student would never stop where the template does. Set "
            "eos_token_id in generation_config.json to the token that ends an answer"
        )


def _cut_for(messages: Sequence[Message]) -> str:
    return next(cut for cut in CUTS if not any(cut in message.content for message in messages))
