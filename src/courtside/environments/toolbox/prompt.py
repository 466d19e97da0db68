"""Messages of an episode. Tool lists are short, for small models with short contexts."""

from __future__ import annotations

from courtside.environments.tool_calls import CallFormat
from courtside.environments.toolbox.plan import TOOLS, Plan
from courtside.types import Message

FORMATS = {
    "json": '<tool_call>{"name": "…", "arguments": {…}}</tool_call>',
    "plain": 'name(argument="value")',
}


def tool_list(plan: Plan, call_format: CallFormat) -> str:
    lines = [
        f"{signature(capability, name, call_format)}: {TOOLS[capability].about}"
        for capability, name in plan.tools.items()
    ]
    head = f"Answer every request with one tool call:\n{FORMATS[call_format]}\nTools:"
    return "\n".join([head, *lines])


def signature(capability: str, name: str, call_format: CallFormat) -> str:
    parameters = TOOLS[capability].parameters
    if call_format == "plain":
        return f"{name}({', '.join(parameter.name for parameter in parameters)})"
    inside = ", ".join(f'"{parameter.name}": {parameter.kind}' for parameter in parameters)
    return f"{name} {{{inside}}}"


def first_messages(plan: Plan, call_format: CallFormat, *, tool_role: bool) -> tuple[Message, ...]:
    listed, request = tool_list(plan, call_format), plan.requests[0].text
    if not tool_role:
        return (Message(role="user", content=f"{listed}\n\n{request}"),)
    return (Message(role="system", content=listed), Message(role="user", content=request))


def answer_messages(result: str, request: str | None, *, tool_role: bool) -> tuple[Message, ...]:
    """A tool's result and the user's next request, if there is one."""
    if tool_role:
        user_messages = () if request is None else (Message(role="user", content=request),)
        return (Message(role="tool", content=result), *user_messages)
    content = f"Result: {result}" if request is None else f"Result: {result}\n\n{request}"
    return (Message(role="user", content=content),)
