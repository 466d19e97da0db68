"""Tools behind an HTTP server: a session of the server is an episode."""

import json
import urllib.request
from typing import Any

from courtside.environments.tool_calls import CallError, parse_call
from courtside.hashing import split_of, task_id
from courtside.types import Event, Grade, Message, Observation, Task


class ToolServer:
    def __init__(self, url: str, num_tasks: int = 100) -> None:
        self.url, self.size = url, num_tasks

    def task(self, index: int) -> Task:
        task = post(self.url, "task", index=index)  # {"prompt": …, "tools": [names]}
        tools = ", ".join(task["tools"])
        system = (
            f'Reply with <tool_call>{{"name": …, "arguments": {{…}}}}</tool_call>. Tools: {tools}'
        )
        return Task(
            id=task_id("server", task["prompt"]),
            split=split_of(task["prompt"]),
            messages=(
                Message(role="system", content=system),
                Message(role="user", content=task["prompt"]),
            ),
            privileged={"tools": tools},
            grader_args={"index": index},
        )

    def start(self, task: Task) -> "Session":
        return Session(self.url, post(self.url, "start", **task.grader_args)["session"])


class Session:
    def __init__(self, url: str, id: str) -> None:
        self.url, self.id = url, id

    def step(self, reply: str) -> Observation:
        call = parse_call(reply, "json")
        if isinstance(call, CallError):
            return answer(call.message, Event(kind=call.kind, details={"message": call.message}))
        arguments = dict(call.arguments)
        result = post(self.url, "call", session=self.id, tool=call.name, arguments=arguments)
        if "error" in result:  # {"error": "tool_not_found", "message": …}
            details = {"tool": call.name, "arguments": arguments, "message": result["message"]}
            return answer(result["message"], Event(kind=result["error"], details=details))
        return answer(result["result"], done=result["done"])

    def grade(self) -> Grade:
        score = post(self.url, "grade", session=self.id)["score"]
        return Grade(score=score, passed=score == 1.0)


def answer(text: str, *events: Event, done: bool = False) -> Observation:
    return Observation(messages=(Message(role="tool", content=text),), done=done, events=events)


def post(url: str, method: str, **body: Any) -> Any:
    """What fails here is a fault of the environment, not a mistake of the student."""
    request = urllib.request.Request(f"{url}/{method}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)
