"""Answers that are texts of another model, as the tokens that the student would have sampled."""

from __future__ import annotations

from collections.abc import Sequence

from courtside.chat.chat_log_rendering import format_tagged_call, render_answer, spell_out_calls
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.messages import split_thoughts
from courtside.types import Message, Sample


def render_text_answer(
    template: IncrementalTemplate, prompt: Sequence[Message], message: Message
) -> Sample:
    """`message`: the assistant's, with text, calls or both, and thoughts apart from them. A last
    message of the assistant in `prompt` is the beginning of the answer. It ends with the template's
    own end token, and its text is that of the ids: what an environment or a grader would get of the
    student."""
    renderer = template.renderer
    if "tool_calls" in message.extra:
        if renderer.renders_tool_calls:
            ids = render_answer(message, (), template, last=True).token_ids
            return Sample(token_ids=ids, logp=(), stop="eos", text=renderer.text(ids))
        message = spell_out_calls(message, format_tagged_call)
    message, thoughts = split_thoughts(message)
    ids = renderer.completion_ids(prompt, message.content, thoughts)
    return Sample(token_ids=ids, logp=(), stop="eos", text=renderer.text(ids))
