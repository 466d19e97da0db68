"""A teacher that gives text alone: a model behind a chat server.

It is shown the conversation as messages. What it writes becomes the tokens that the student would
have sampled to say the same, or a failure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from courtside.chat.answer_boundary import PROBE_PROMPT
from courtside.chat.api_messages import parse_message
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.model_client import Reply
from courtside.chat.openai_client import OpenAIClient
from courtside.chat.privileged_context import insert_context_text, task_context
from courtside.chat.reply_failures import Failure, quote_reply
from courtside.chat.text_answers import render_text_answer
from courtside.chat.thinking import THOUGHT_TAGS, begins_with_thoughts
from courtside.environments.tool_calls import CLOSE, OPEN, ToolCall, parse_call
from courtside.errors import ModelError, RunError, TaskError
from courtside.recipe.context import FieldContext, SystemContext
from courtside.types import Message, Sample, Task, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTeacher:
    client: OpenAIClient
    context: SystemContext | FieldContext | None
    template: IncrementalTemplate
    """The student's."""
    keep_thoughts: bool = False

    @property
    def name(self) -> str:
        return self.client.endpoint.model

    def make_prompt(self, task: Task, turns: Sequence[Turn], prefix: str = "") -> list[Message]:
        """`turns`: those after the prompt. `prefix`: of the answer, which the server continues."""
        messages = list(task.messages)
        if self.context is not None and (text := task_context(self.context, task)) is not None:
            messages = list(insert_context_text(self.context, task, text))
        offers_tools = any(message.tools for message in messages)
        for turn in turns:
            if turn.role == "assistant":
                messages.append(show_reply(turn.text, with_call=offers_tools))
            else:
                messages += turn.messages
        if prefix:
            messages.append(Message(role="assistant", content=prefix))
        return messages

    def read_reply(
        self, reply: Reply | RunError, task: Task, turns: Sequence[Turn], prefix: str = ""
    ) -> Sample | Failure:
        """What the student would have sampled; the other arguments are those of the prompt."""
        if isinstance(reply, RunError):
            return Failure(kind="no_answer", details=str(reply))
        if reply.is_truncated:
            return Failure(kind="truncated", details=quote_reply(reply))
        if not reply.text.startswith(prefix):
            return Failure(
                kind="not_continued",
                details="the server does not go on with an answer, as takeover.can_continue says; "
                + quote_reply(reply),
            )
        thoughts, text = ("", reply.text.removeprefix(prefix)) if prefix else find_thoughts(reply)
        if not (text.strip() or reply.tool_calls):
            return Failure(kind="empty", details=quote_reply(reply))
        # Later turns begin as after any question: ids of the conversation before are not touched.
        prompt = (PROBE_PROMPT,) if turns else task.messages
        if prefix:
            prompt = (*task.messages, Message(role="assistant", content=prefix))
        tree = {
            "role": "assistant",
            "content": text,
            "tool_calls": list(reply.tool_calls) or None,
            "reasoning_content": thoughts if self.keep_thoughts else None,
        }
        try:
            return render_text_answer(self.template, prompt, parse_message(tree, "the reply"))
        except (TaskError, ModelError) as error:
            return Failure(kind="not_rendered", details=str(error))

    def find_prefix(self, ids: Sequence[int]) -> str | None:
        """The text of an answer's first tokens; None: they end inside a character, or some are no
        text, so no server could go on from them."""
        renderer = self.template.renderer
        text = renderer.text(ids)
        is_whole = not text.endswith("\ufffd") and not renderer.special_ids & set(ids)
        return text if is_whole and bool(text) == bool(ids) else None


def find_thoughts(reply: Reply) -> tuple[str, str]:
    """Thoughts, and the text that follows them; none follows where they do not end."""
    for opening, closing in THOUGHT_TAGS:
        thoughts, end, text = reply.text.rpartition(closing)
        if end:
            return thoughts.strip().removeprefix(opening).strip(), text.strip()
    text = "" if begins_with_thoughts(reply.text) else reply.text.strip()
    return reply.thoughts.strip(), text


def show_reply(text: str, *, with_call: bool) -> Message:
    """A reply of the student. `with_call`: in a conversation whose tools the server knows, a call
    is one of the protocol; what cannot be read as one, and text after it, stay text."""
    if with_call and isinstance(call := parse_call(text, "json"), ToolCall):
        before, _, remainder = text.partition(OPEN)
        if not call.num_ignored and not remainder.rpartition(CLOSE)[2].strip():
            calls = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
            ]
            extra = json.dumps({"tool_calls": calls}, ensure_ascii=False)
            return Message(role="assistant", content=before.strip(), extra=extra)
    return Message(role="assistant", content=text)
