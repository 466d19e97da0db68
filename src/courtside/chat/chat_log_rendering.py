"""Renders chat logs (messages of a chat API) as trajectories of this model.

Every turn is rendered as in a rollout. The turns together must equal, token by token, what the
template renders of the whole conversation; a conversation that does not is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from courtside.chat.answer_boundary import PROBE_PROMPT, common_prefix_length
from courtside.chat.api_messages import parse_message
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.messages import split_thoughts, unused_noncharacters
from courtside.errors import ModelError, TaskError
from courtside.types import Message, Sample, Task, Trajectory, Turn

CallFormatter = Callable[[str, Any], str]
"""(name, arguments) of a tool call → its text in an assistant's message."""


def format_tagged_call(name: str, arguments: Any) -> str:
    """
    >>> print(format_tagged_call("add", {"a": 1}))
    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>
    """
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def trajectory_from_chat_log(
    task: Task,
    messages: Sequence[Mapping[str, Any]],
    template: IncrementalTemplate,
    *,
    id: str,
    temperature: float = 1.0,
    format_call: CallFormatter = format_tagged_call,
) -> Trajectory:
    """A trajectory of a conversation whose first messages are the task's.

    The template renders tool calls where it knows `tool_calls`, else `format_call` does, after the
    message's text. Arguments that are no JSON stay the string they are.
    """
    where = f"task {task.id}: message "
    conversation = [
        parse_message(message, f"{where}{index}") for index, message in enumerate(messages)
    ]
    _check_prompt(task, conversation)
    conversation = [*task.messages, *conversation[len(task.messages) :]]
    if any("tool_calls" in m.extra for m in conversation) and not (
        template.renderer.renders_tool_calls
    ):
        conversation = [spell_out_calls(message, format_call) for message in conversation]
    rendered_turns = [template.prompt_turn(task)]
    message_indices = [0]
    starts = [
        i
        for i in range(len(task.messages), len(conversation))
        if conversation[i].role == "assistant"
    ]
    for start, stop in zip(starts, [*starts[1:], len(conversation)], strict=True):
        following = conversation[start + 1 : stop]
        last = stop == len(conversation) and not following
        index = start + 1
        try:
            environment = (
                []
                if last
                else [
                    template.environment_turn(
                        following, add_end_of_turn=False, prompt=task.messages
                    )
                ]
            )
            index = start
            answer = render_answer(conversation[start], following, template, last=last)
        except ModelError as error:
            raise TaskError(f"{where}{index}: {error}") from None
        rendered_turns += [answer, *environment]
        message_indices += [start, start + 1][: 1 + len(environment)]
    _check_whole_render(rendered_turns, message_indices, conversation, template, where)
    return Trajectory(
        id=id,
        task=task,
        turns=tuple(rendered_turns),
        source="dataset",
        policy_version=None,
        temperature=temperature,
        stop="dataset",
    )


def render_answer(
    message: Message, following: Sequence[Message], template: IncrementalTemplate, *, last: bool
) -> Turn:
    """The turn of an assistant's message, rendered with the messages that follow it."""
    renderer = template.renderer
    (cut,) = unused_noncharacters((message, *following))
    prompt = renderer.render((PROBE_PROMPT,), cut, add_generation_prompt=True)
    rendered = renderer.render(
        (PROBE_PROMPT, message, *following), cut, add_generation_prompt=not last
    )
    header: str | None = prompt
    if not rendered.startswith(prompt):
        header = renderer.header_of(prompt, rendered, message.content)
    if header is None:
        raise ModelError(
            f"{renderer.name}: the generation prompt of its chat template ends with "
            f"{prompt[-40:]!r}, but this message does not follow it (a thinking block, perhaps). "
            "Begin the message with what the generation prompt begins, or switch thinking off "
            "(student.chat_template_args) where the template can"
        )
    ids = renderer.tokenize(rendered[len(header) :], cut)
    end = renderer.boundary.find_end(ids)
    if following and end is not None and not renderer.eos_ids & set(ids):
        # History has another end (gpt-oss: <|end|>), at which the model would not stop.
        ids = (*ids[: end - 1], renderer.tokenizer.eos_token_id)
    ids = renderer.boundary.end_answer(ids)
    _, thoughts = split_thoughts(message)
    if thoughts.strip() not in rendered.replace(cut, "")[len(header) :]:
        raise ModelError(
            f"{renderer.name}: its chat template leaves the thoughts of this message out"
            f"{'' if last else ' when others follow'}, so they would be missing from what trains. "
            "Remove its reasoning_content, or end the conversation with it"
        )
    content = message.content.strip()
    if content not in rendered.replace(cut, "")[max(len(header) - len(content), 0) :]:
        raise ModelError(
            f"{renderer.name}: its chat template leaves text of this message out when others "
            "follow (thinking, perhaps). Take them out of the message, or end the conversation "
            "with it"
        )
    sample = Sample(token_ids=ids, logp=(), stop="dataset", text=renderer.text(ids))
    return template.assistant_turn(sample)


def _check_prompt(task: Task, conversation: Sequence[Message]) -> None:
    num = len(task.messages)
    for index, (expected, message) in enumerate(zip(task.messages, conversation, strict=False)):
        if replace(expected, tools="") != message:
            raise TaskError(
                f"task {task.id}: message {index} of the recorded conversation is not the task's. "
                "A recorded conversation begins with the messages of its task"
            )
    if len(conversation) <= num or conversation[num].role != "assistant":
        raise TaskError(
            f"task {task.id}: the recorded conversation has no assistant's message at {num}, right "
            "after the messages of its task, so there is nothing to learn from. Add it, or leave "
            "the conversation out"
        )


def _check_whole_render(
    rendered_turns: Sequence[Turn],
    message_indices: Sequence[int],
    conversation: Sequence[Message],
    template: IncrementalTemplate,
    where: str,
) -> None:
    (cut,) = unused_noncharacters(conversation)
    unanswered = rendered_turns[-1].role != "assistant"
    rendered = template.renderer.render(conversation, cut, add_generation_prompt=unanswered)
    whole_ids = template.renderer.tokenize(rendered, cut)
    boundary = template.renderer.boundary
    # Thoughts that a generation prompt ends at once need not be in history.
    empty = template.renderer.tokenize(boundary.empty_thoughts, cut)
    start = 0
    for turn, index in zip(rendered_turns, message_indices, strict=True):
        ids = turn.token_ids
        if turn.role != "assistant" and empty and ids[-len(empty) :] == empty:
            ids = ids if whole_ids[start : start + len(ids)] == ids else ids[: -len(empty)]
        num_same = common_prefix_length(ids, whole_ids[start:])
        after = whole_ids[start + num_same :]
        # An answer ends where the model stops; history has another end, or none at its own.
        num_open = len(ids) - (len(boundary.end_of_turn_ids) if not after else 1)
        has_end = not after or boundary.find_end(after[:1]) is not None
        if num_same < (num_open if turn.role == "assistant" and has_end else len(ids)):
            difference = template.describe_difference(ids, whole_ids[start:], num_same)
            raise TaskError(
                f"{where}{index}: in the whole conversation {template.renderer.name}'s chat "
                f"template renders it otherwise than turn by turn: {difference}. A rollout could "
                "not have given that. Take thinking out of earlier answers and line breaks off "
                "their ends, or end the conversation before that message"
            )
        start += len(ids)


def spell_out_calls(message: Message, format_call: CallFormatter) -> Message:
    """The message with its tool calls as text, for templates that do not render them."""
    extra = json.loads(message.extra) if message.extra else {}
    functions = [call["function"] for call in extra.pop("tool_calls", ())]
    texts = [format_call(function["name"], function["arguments"]) for function in functions]
    lines = [message.content, *texts] if message.content else texts
    return replace(message, content="\n".join(lines), extra=json.dumps(extra) if extra else "")
