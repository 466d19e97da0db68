"""Renders chat logs (messages of a chat API) as trajectories of this model.

Every turn is rendered as in a rollout. The turns together must equal, token by token, what the
template renders of the whole conversation; a conversation that does not is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from courtside.chat.incremental import PROBE_PROMPT, IncrementalTemplate, common_prefix_length
from courtside.chat.template import ChatMessage, ChatTemplate, unused_noncharacters
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
    by_template = any(m.get("tool_calls") for m in messages) and _renders_tool_calls(
        template.renderer
    )
    conversation = [
        _parse_message(message, f"{where}{index}", None if by_template else format_call)
        for index, message in enumerate(messages)
    ]
    _check_prompt(task, conversation)
    rendered_turns = [template.prompt_turn(task)]
    message_indices = [0]
    starts = [
        i
        for i in range(len(task.messages), len(conversation))
        if _role(conversation[i]) == "assistant"
    ]
    for start, stop in zip(starts, [*starts[1:], len(conversation)], strict=True):
        following = [m for m in conversation[start + 1 : stop] if isinstance(m, Message)]
        last = stop == len(conversation) and not following
        index = start + 1
        try:
            environment = (
                [] if last else [template.environment_turn(following, add_end_of_turn=False)]
            )
            index = start
            answer = _render_answer(conversation[start], following, template, last=last)
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


def _render_answer(
    message: ChatMessage, following: Sequence[Message], template: IncrementalTemplate, *, last: bool
) -> Turn:
    """The turn of an assistant's message, rendered with the messages that follow it."""
    renderer = template.renderer
    (cut,) = unused_noncharacters((message, *following))
    prompt = renderer.render((PROBE_PROMPT,), cut, add_generation_prompt=True)
    rendered = renderer.render(
        (PROBE_PROMPT, message, *following), cut, add_generation_prompt=not last
    )
    if not rendered.startswith(prompt):
        raise ModelError(
            f"{renderer.name}: the generation prompt of its chat template ends with "
            f"{prompt[-40:]!r}, but this message does not follow it (a thinking block, perhaps). "
            "Begin the message with what the generation prompt begins"
        )
    ids = renderer.tokenize(rendered[len(prompt) :], cut)
    ids = ids[: renderer.length_through_eos(ids)]
    content = (message.content if isinstance(message, Message) else str(message["content"])).strip()
    if content not in rendered.replace(cut, "")[max(len(prompt) - len(content), 0) :]:
        raise ModelError(
            f"{renderer.name}: its chat template leaves text of this message out when others "
            "follow (thinking, perhaps). Take them out of the message, or end the conversation "
            "with it"
        )
    sample = Sample(token_ids=ids, logp=(), stop="dataset", text=renderer.text(ids))
    return template.assistant_turn(sample)


def _check_prompt(task: Task, conversation: Sequence[ChatMessage]) -> None:
    num = len(task.messages)
    for index, (expected, message) in enumerate(zip(task.messages, conversation, strict=False)):
        if expected != message:
            raise TaskError(
                f"task {task.id}: message {index} of the recorded conversation is not the task's. "
                "A recorded conversation begins with the messages of its task"
            )
    if len(conversation) <= num or _role(conversation[num]) != "assistant":
        raise TaskError(
            f"task {task.id}: the recorded conversation has no assistant's message at {num}, right "
            "after the messages of its task, so there is nothing to learn from. Add it, or leave "
            "the conversation out"
        )


def _check_whole_render(
    rendered_turns: Sequence[Turn],
    message_indices: Sequence[int],
    conversation: Sequence[ChatMessage],
    template: IncrementalTemplate,
    where: str,
) -> None:
    (cut,) = unused_noncharacters(conversation)
    unanswered = rendered_turns[-1].role != "assistant"
    rendered = template.renderer.render(conversation, cut, add_generation_prompt=unanswered)
    whole_ids = template.renderer.tokenize(rendered, cut)
    ids = [token for turn in rendered_turns for token in turn.token_ids]
    num_same = common_prefix_length(ids, whole_ids)
    if num_same == len(ids):
        return
    ends = [
        sum(len(turn.token_ids) for turn in rendered_turns[: n + 1])
        for n in range(len(rendered_turns))
    ]
    index = next(first for first, end in zip(message_indices, ends, strict=True) if num_same < end)
    raise TaskError(
        f"{where}{index}: in the whole conversation {template.renderer.name}'s chat template "
        "renders it otherwise than turn by turn: "
        f"{template.describe_difference(ids, whole_ids, num_same)}. A rollout could not have given "
        "that. Take thinking out of earlier answers and line breaks off their ends, or end the "
        "conversation before that message"
    )


# ── messages of chat APIs ────────────────────────────────────────────────────────────────────────


def _parse_message(
    message: Mapping[str, Any], where: str, format_call: CallFormatter | None
) -> ChatMessage:
    role, content = message.get("role"), _content(message.get("content"), where)
    if role not in ("system", "user", "assistant", "tool"):
        raise TaskError(
            f"{where}: its role is {role!r}. Known: 'system' ('developer' elsewhere), 'user', "
            "'assistant', 'tool'"
        )
    calls = [_call(call, where) for call in message.get("tool_calls") or ()]
    if calls and role != "assistant":
        raise TaskError(f"{where}: tool_calls on a {role!r} message. Only assistants call tools")
    if not calls:
        return Message(role=role, content=content)
    if format_call is None:
        listed = [{"type": "function", **call} for call in calls]
        return {"role": role, "content": content, "tool_calls": listed}
    functions = [call["function"] for call in calls]
    texts = [format_call(function["name"], function["arguments"]) for function in functions]
    return Message(role=role, content="\n".join([content, *texts] if content else texts))


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part["text"], str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise TaskError(f"{where}: its content is neither a text nor a list of text parts")


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TaskError(
            f"{where}: a tool call is written as "
            '{"id": …, "function": {"name": …, "arguments": …}}, not as ' + f"{call!r}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(json.JSONDecodeError):  # invalid arguments stay as they were sent
            arguments = json.loads(arguments)
    id = call.get("id")
    return {
        **({} if id is None else {"id": id}),
        "function": {"name": function["name"], "arguments": arguments},
    }


def _renders_tool_calls(renderer: ChatTemplate) -> bool:
    probe = {"id": "abcdefghi", "function": {"name": "courtside_probe", "arguments": {"at": 1}}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **probe}]}
    (cut,) = unused_noncharacters(())
    try:
        rendered = renderer.render((PROBE_PROMPT, message), cut, add_generation_prompt=False)
    except ModelError:
        return False
    return "courtside_probe" in rendered


def _role(message: ChatMessage) -> str:
    return message.role if isinstance(message, Message) else str(message["role"])
