"""Conversations recorded elsewhere, as chat APIs write them, to trajectories.

Every turn is rendered as a student would have met it; the turns together must be, token by token,
what the template makes of the whole conversation. Where they are not, it is refused.
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
"""Name and arguments of a tool call to the text an assistant writes for it."""


def format_tagged_call(name: str, arguments: Any) -> str:
    """
    >>> print(in_tags("add", {"a": 1}))
    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>
    """
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def trajectory_from_chat_log(
    task: Task,
    messages: Sequence[Mapping[str, Any]],
    turns: IncrementalTemplate,
    *,
    id: str,
    temperature: float = 1.0,
    format_call: CallFormatter = format_tagged_call,
) -> Trajectory:
    """A conversation that begins with the task's messages and goes on with an assistant's.

    The template renders tool calls where it knows `tool_calls`, else `format_call` does, after the
    message's text. Arguments that are no JSON stay the string they are.
    """
    problem = f"task {task.id}: message "
    by_template = any(m.get("tool_calls") for m in messages) and _knows_calls(turns.renderer)
    spoken = [
        _spoken(message, f"{problem}{index}", None if by_template else format_call)
        for index, message in enumerate(messages)
    ]
    _check_prompt(task, spoken)
    built = [turns.prompt_turn(task)]
    firsts = [0]
    starts = [i for i in range(len(task.messages), len(spoken)) if _role(spoken[i]) == "assistant"]
    for start, stop in zip(starts, [*starts[1:], len(spoken)], strict=True):
        following = [m for m in spoken[start + 1 : stop] if isinstance(m, Message)]
        last = stop == len(spoken) and not following
        index = start + 1
        try:
            environment = [] if last else [turns.environment_turn(following, add_end_of_turn=False)]
            index = start
            answer = _answer(spoken[start], following, turns, last=last)
        except ModelError as error:
            raise TaskError(f"{problem}{index}: {error}") from None
        built += [answer, *environment]
        firsts += [start, start + 1][: 1 + len(environment)]
    _check_whole(built, firsts, spoken, turns, problem)
    return Trajectory(
        id=id,
        task=task,
        turns=tuple(built),
        source="dataset",
        policy_version=None,
        temperature=temperature,
        stop="dataset",
    )


def _answer(
    said: ChatMessage, following: Sequence[Message], turns: IncrementalTemplate, *, last: bool
) -> Turn:
    """An assistant's message, as the template renders it with what comes next in place."""
    renderer = turns.renderer
    (cut,) = unused_noncharacters((said, *following))
    opened = renderer.render((PROBE_PROMPT,), cut, add_generation_prompt=True)
    rendered = renderer.render(
        (PROBE_PROMPT, said, *following), cut, add_generation_prompt=not last
    )
    if not rendered.startswith(opened):
        raise ModelError(
            f"{renderer.name}: its chat template opens an answer with "
            f"{opened[-40:]!r}, but this message does not stand behind that (a thinking block, "
            "perhaps). Begin the message with what the template opens it with"
        )
    ids = renderer.tokenize(rendered[len(opened) :], cut)
    ids = ids[: renderer.length_through_eos(ids)]
    content = (said.content if isinstance(said, Message) else str(said["content"])).strip()
    if content not in rendered.replace(cut, "")[max(len(opened) - len(content), 0) :]:
        raise ModelError(
            f"{renderer.name}: its chat template leaves words of this message out when others "
            "follow (thinking, perhaps). Take them out of the message, or end the conversation "
            "with it"
        )
    sample = Sample(token_ids=ids, logp=(), stop="dataset", text=renderer.text(ids))
    return turns.assistant_turn(sample)


def _check_prompt(task: Task, spoken: Sequence[ChatMessage]) -> None:
    num = len(task.messages)
    for index, (ours, its) in enumerate(zip(task.messages, spoken, strict=False)):
        if ours != its:
            raise TaskError(
                f"task {task.id}: message {index} of the recorded conversation is not the task's. "
                "A recorded conversation begins with the messages of its task"
            )
    if len(spoken) <= num or _role(spoken[num]) != "assistant":
        raise TaskError(
            f"task {task.id}: the recorded conversation has no assistant's message at {num}, right "
            "behind the messages of its task, so there is nothing to learn from. Add it, or leave "
            "the conversation out"
        )


def _check_whole(
    built: Sequence[Turn],
    firsts: Sequence[int],
    spoken: Sequence[ChatMessage],
    turns: IncrementalTemplate,
    problem: str,
) -> None:
    (cut,) = unused_noncharacters(spoken)
    unanswered = built[-1].role != "assistant"
    rendered = turns.renderer.render(spoken, cut, add_generation_prompt=unanswered)
    whole = turns.renderer.tokenize(rendered, cut)
    went = [token for turn in built for token in turn.token_ids]
    same = common_prefix_length(went, whole)
    if same == len(went):
        return
    ends = [sum(len(turn.token_ids) for turn in built[: n + 1]) for n in range(len(built))]
    index = next(first for first, end in zip(firsts, ends, strict=True) if same < end)
    raise TaskError(
        f"{problem}{index}: in the whole conversation {turns.renderer.name}'s chat template "
        f"renders it otherwise than turn by turn: "
        f"{turns.describe_difference(went, whole, same)}. A student could not have produced "
        "that. Take thinking out of earlier answers and "
        "line breaks off their ends, or end the conversation before that message"
    )


# ── messages of chat APIs ────────────────────────────────────────────────────────────────────────


def _spoken(
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
        with suppress(json.JSONDecodeError):  # what was called, mistake and all
            arguments = json.loads(arguments)
    id = call.get("id")
    return {
        **({} if id is None else {"id": id}),
        "function": {"name": function["name"], "arguments": arguments},
    }


def _knows_calls(renderer: ChatTemplate) -> bool:
    probe = {"id": "abcdefghi", "function": {"name": "courtside_probe", "arguments": {"at": 1}}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **probe}]}
    (cut,) = unused_noncharacters(())
    try:
        rendered = renderer.render((PROBE_PROMPT, said), cut, add_generation_prompt=False)
    except ModelError:
        return False
    return "courtside_probe" in rendered


def _role(message: ChatMessage) -> str:
    return message.role if isinstance(message, Message) else str(message["role"])
