"""Conversations as chat servers take them.

A server takes a tool's result only after a call, and by the call's id. So calls get ids, and a
result without a call before it is a user's message: there the calls are text, too.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from courtside.chat.messages import message_tree
from courtside.types import Message

CONTINUE = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
"""Of vLLM: the reply begins with the last message, so that one can see that it was continued."""


def make_request_fields(messages: Sequence[Message]) -> dict[str, Any]:
    """`messages`, the tools that they offer, and how a last message of the assistant goes on."""
    tools = next((json.loads(message.tools) for message in messages if message.tools), None)
    return {
        "messages": format_conversation(messages),
        **({} if tools is None else {"tools": tools}),
        **(CONTINUE if messages[-1].role == "assistant" else {}),
    }


def format_conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    trees: list[dict[str, Any]] = []
    open_ids: deque[str] = deque()
    """Of calls without a result."""
    for number, message in enumerate(messages):
        tree = message_tree(message)
        tree.pop("reasoning_content", None)  # no part of the protocol
        if calls := tree.get("tool_calls"):
            tree["tool_calls"] = [
                _name_call(call, f"call_{number}_{i}") for i, call in enumerate(calls)
            ]
            open_ids = deque(call["id"] for call in tree["tool_calls"])
        elif message.role == "tool" and (id := tree.get("tool_call_id")) in open_ids:
            open_ids.remove(str(id))
        elif message.role == "tool" and open_ids:
            tree["tool_call_id"] = open_ids.popleft()
        elif message.role == "tool":
            tree = {"role": "user", "content": message.content}
        if tree["role"] == "user" and trees and trees[-1]["role"] == "user":
            trees[-1]["content"] += f"\n\n{tree['content']}"  # some templates take no two in a row
        else:
            trees.append(tree)
    return trees


def _name_call(call: dict[str, Any], id: str) -> dict[str, Any]:
    """With an id, and with its arguments as the text that the protocol wants."""
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": id, **call, "function": function}
