"""Messages to token ids through the model's own template.

What a model wrote is kept as ids and never re-tokenised; only prompts and texts from outside go
through the tokenizer. What the template does at the boundary of an answer is checked once, when the
renderer is made, not assumed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from courtside.errors import ModelError
from courtside.types import Message


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
        self._check_boundary()

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Everything up to where the assistant begins to write."""
        return self._render(messages, add_generation_prompt=True)

    def answer_ids(self, messages: Sequence[Message], text: str) -> tuple[int, ...]:
        """Ids of an answer from outside, its end token included, to stand behind `prompt_ids`."""
        prompt = self.prompt_ids(messages)
        whole = self._render(
            (*messages, Message(role="assistant", content=text)), add_generation_prompt=False
        )
        if whole[: len(prompt)] != prompt:
            raise ModelError(
                f"{self.name}: with an answer in place the template renders the prompt differently "
                "than without one (a thinking block, perhaps), so the answer's first tokens are "
                "not where the student would write them. Use texts that the template accepts, or "
                "let a model write them (rollout.rest = 'teacher')"
            )
        answer = whole[len(prompt) :]
        end = next((i for i, token in enumerate(answer) if token in self.eos_ids), None)
        assert end is not None, "checked when the renderer was made"
        return answer[: end + 1]  # what the template puts behind the end token nobody writes

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One text per token, for display."""
        return [str(self.tokenizer.decode([token])) for token in ids]

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> tuple[int, ...]:
        plain = [{"role": m.role, "content": m.content} for m in messages]
        try:
            rendered = self.tokenizer.apply_chat_template(
                plain, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True
            )
        except Exception as error:
            # jinja2's TemplateError is what templates raise on a role they do not know; jinja2 is
            # not a dependency of ours, so it is recognised by name.
            if type(error).__name__ != "TemplateError":
                raise
            roles = [m.role for m in messages]
            raise ModelError(
                f"{self.name}: its chat template refuses messages with roles {roles}: {error}"
            ) from None
        return tuple(rendered["input_ids"])

    def _check_boundary(self) -> None:
        ask = (Message(role="user", content="Is it?"),)
        prompt = self.prompt_ids(ask)
        bare = self._render(ask, add_generation_prompt=False)
        whole = self._render(
            (*ask, Message(role="assistant", content="It is.")), add_generation_prompt=False
        )
        if len(prompt) <= len(bare) or prompt[: len(bare)] != bare:
            raise ModelError(
                f"{self.name}: its chat template adds nothing where an answer begins "
                "(add_generation_prompt has no effect), so the student would not know whose turn "
                "it is. Use a template with a generation prompt"
            )
        if whole[: len(prompt)] == prompt and not self.eos_ids & set(whole[len(prompt) :]):
            ends = sorted(self.eos_ids)
            raise ModelError(
                f"{self.name}: an answer rendered by its template holds no end token {ends}, so "
                "the student would never stop where the template does. Set eos_token_id in "
                "generation_config.json to the token that ends an answer"
            )
        bos = self.tokenizer.bos_token_id
        if bos is not None and len(prompt) > 1 and prompt[0] == prompt[1] == bos:
            raise ModelError(
                f"{self.name}: prompts begin with two BOS tokens; the template and the tokenizer "
                "both add one. Remove it from one of them"
            )
