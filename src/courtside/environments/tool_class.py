"""Classes whose public methods are tools, by TRL's convention, as environments.

`reset(**row)` starts an episode and may return text for the end of the prompt; public methods with
type hints and docstrings are the tools; the reward is `get_reward()`, an attribute or method
`reward`, or that of a function called with `environments`. A reply without a call ends the episode,
and so does `done`. Calls that come to nothing are events, so that hints work.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from courtside.chat.api_messages import attach_tools, parse_messages, parse_tools
from courtside.environments.base import Environment
from courtside.environments.tool_calls import CallError, CallFormat, format_call, parse_call
from courtside.environments.tool_rows import read_rows
from courtside.environments.tool_schemas import describe_tool, find_argument_problem, find_tools
from courtside.environments.validation import InvalidValue, plain_text
from courtside.errors import TaskError
from courtside.hashing import split_of, task_id
from courtside.plugins import load_plugin
from courtside.recipe.tasks import EnvironmentTasks
from courtside.types import Event, Grade, Message, Observation, Role, Task


def is_tool_class(user_class: Any) -> bool:
    return callable(getattr(user_class, "reset", None)) and not hasattr(user_class, "start")


def make_tool_environment(
    user_class: Any, config: EnvironmentTasks, *, tools_in_template: bool
) -> Environment:
    """`tools_in_template`: the chat template lists the tools, no message."""
    where, name = f"tasks.path = {config.path!r}", user_class.__name__
    parameters = inspect.signature(user_class.reset).parameters
    if hasattr(user_class, "step") and "seed" in parameters:
        raise TaskError(
            f"{where}: {name} is a Gymnasium environment, whose actions are no text. Wrap it as "
            "docs/environments.md shows (examples/environments/text_game.py)"
        )
    if config.rows is None:
        raise TaskError(
            f"{where}: {name} has reset(**row), so its tasks are rows of a file; name it in "
            "tasks.rows. (An environment of courtside has task(index) and start(task))"
        )
    rows = read_rows(config.rows)
    try:
        inspect.signature(user_class).bind(**config.settings)
        inspect.signature(user_class.reset).bind(None, **rows[0])
        tools = {tool: describe_tool(method) for tool, method in find_tools(user_class).items()}
    except (TypeError, ValueError, NameError) as problem:  # also a type hint without its import
        raise TaskError(f"{where}: {name}: {problem}") from None
    if not tools:
        raise TaskError(
            f"{where}: {name} has no tools; its public methods are those, but `reset` and `reward`"
        )
    reward = None
    if config.reward is not None:
        reward = load_plugin(config.reward, "function", field="tasks.reward", error=TaskError)
    return ToolEnvironment(
        user_class,
        config,
        rows=rows,
        tools=tools,
        reward=reward,
        tools_in_template=tools_in_template,
    )


class ToolEnvironment:
    def __init__(
        self,
        user_class: Callable[..., Any],
        config: EnvironmentTasks,
        *,
        rows: list[dict[str, Any]],
        tools: Mapping[str, dict[str, Any]],
        reward: Callable[..., Any] | None,
        tools_in_template: bool,
    ) -> None:
        self.user_class, self.settings = user_class, dict(config.settings)
        self.rows, self.tools, self.reward = rows, tools, reward
        self.size = len(rows)
        self.call_format: CallFormat = config.tool_call_format or "json"
        self.reward_range = config.reward_range or (0.0, 1.0)
        self.has_tool_role = config.tool_role is not False
        self.tools_in_template = tools_in_template

    def task(self, index: int) -> Task:
        row = self.rows[index]
        prompt = row["prompt"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = list(parse_messages(prompt, f"tasks.rows, row {index}: prompt"))
        added = self._make().reset(**row)
        if added is not None:
            text = plain_text(added, "what reset returned")
            last = messages[-1]
            messages[-1] = replace(last, content=f"{last.content}{text}")
        content = json.dumps(row, sort_keys=True)
        facts = {
            k: v for k, v in row.items() if isinstance(v, str) and k not in ("prompt", "split")
        }
        return Task(
            id=task_id("row", content),
            split=row.get("split") or split_of(content),
            messages=self._offer_tools(messages),
            privileged={**facts, "tools": ", ".join(self.tools)},
            grader_args={"row": row},
        )

    def start(self, task: Task) -> ToolEpisode:
        row = task.grader_args["row"]
        instance = self._make()
        instance.reset(**row)
        return ToolEpisode(self, instance, row)

    def example_replies(self, task: Task) -> list[str]:
        """Each tool with arguments of the right types, for `courtside check-env`."""
        facts = [v for k, v in task.privileged.items() if k != "tools"] or ["x"]
        examples = {"string": facts[0], "integer": 1, "number": 0.5, "boolean": True, "array": [],
                    "object": {}}  # fmt: skip
        return [
            format_call(
                name,
                {
                    argument: details.get("enum", [examples.get(details.get("type"), "x")])[0]
                    for argument, details in schema["parameters"]["properties"].items()
                },
                self.call_format,
            )
            for name, schema in self.tools.items()
        ]

    def _make(self) -> Any:
        return self.user_class(**self.settings)

    def _offer_tools(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        if self.tools_in_template:
            return attach_tools(messages, parse_tools(list(self.tools.values()), "the tools"))
        tools, first = self._describe_tools(), messages[0]
        if self.has_tool_role and first.role != "system":
            return (Message(role="system", content=tools), *messages)
        return (replace(first, content=f"{tools}\n\n{first.content}"), *messages[1:])

    def _describe_tools(self) -> str:
        example = format_call("NAME", {"ARGUMENT": "VALUE"}, self.call_format)
        lines = [json.dumps(schema, ensure_ascii=False) for schema in self.tools.values()]
        return (
            f"Call one tool in a reply, in this format:\n{example}\nA reply without a call is your "
            "final answer. Tools:\n" + "\n".join(lines)
        )


class ToolEpisode:
    def __init__(self, environment: ToolEnvironment, instance: Any, row: dict[str, Any]) -> None:
        self.environment, self.instance, self.row = environment, instance, row
        self.replies: list[dict[str, str]] = []
        self.has_called = False

    def step(self, reply: str) -> Observation:
        self.replies.append({"role": "assistant", "content": reply})
        call = parse_call(reply, self.environment.call_format)
        if isinstance(call, CallError):
            if call.kind == "no_call":
                return self._finish(call.message)
            return self._answer(f"Error: {call.message}", Event(
                kind=call.kind, details={"message": call.message, "tools": self._tool_names()}
            ))  # fmt: skip
        self.has_called = True
        details = {
            "tool": call.name, "arguments": dict(call.arguments), "tools": self._tool_names(),
        }  # fmt: skip
        schema = self.environment.tools.get(call.name)
        if schema is None:
            return self._fail("tool_not_found", f"Tool not found: {call.name}", details)
        if problem := find_argument_problem(schema["parameters"], call.arguments):
            return self._fail("invalid_arguments", problem, details)
        try:
            result = getattr(self.instance, call.name)(**call.arguments)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except Exception as error:  # user code; a tool tells the student so by raising
            return self._fail("tool_error", f"{type(error).__name__}: {error}", details)
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        if call.num_ignored:
            text += f"\n(Only the first of {call.num_ignored + 1} calls was run.)"
            details["message"] = "only the first call of a reply is run"
            return self._answer(text, Event(kind="extra_calls", details=details))
        return self._answer(text)

    def _finish(self, message: str) -> Observation:
        """A final answer; without any call before it, it is a mistake."""
        details = {"message": message, "tools": self._tool_names()}
        events = () if self.has_called else (Event(kind="no_call", details=details),)
        return Observation(messages=(), done=True, events=events)

    def grade(self) -> Grade:
        low, high = self.environment.reward_range
        value = self._reward()
        try:
            reward = float(value)
        except (TypeError, ValueError):
            raise InvalidValue(f"took the reward {value!r}; return a number") from None
        if not low <= reward <= high:
            raise InvalidValue(
                f"took the reward {reward:g}, which is outside of tasks.reward_range = "
                f"[{low:g}, {high:g}]; set the range that the rewards have"
            )
        score = (reward - low) / (high - low)
        return Grade(score=score, passed=score == 1.0)

    def _reward(self) -> Any:
        if self.environment.reward is not None:
            columns = {name: [value] for name, value in self.row.items() if name != "prompt"}
            rewards = self.environment.reward(
                prompts=[self.row["prompt"]],
                completions=[self.replies],
                environments=[self.instance],
                **columns,
            )
            return rewards[0]
        reward = getattr(self.instance, "get_reward", getattr(self.instance, "reward", None))
        if reward is None:
            raise InvalidValue(
                "found neither get_reward() nor `reward` on the object; add one, or name a "
                "function in tasks.reward"
            )
        return reward() if callable(reward) else reward

    def _fail(self, kind: str, message: str, details: dict[str, Any]) -> Observation:
        return self._answer(f"Error: {message}", Event(
            kind=kind, details={**details, "message": message}
        ))  # fmt: skip

    def _answer(self, text: str, *events: Event) -> Observation:
        done = bool(getattr(self.instance, "done", False))
        role: Role = "tool" if self.environment.has_tool_role else "user"
        return Observation(messages=(Message(role=role, content=text),), done=done, events=events)

    def _tool_names(self) -> str:
        return ", ".join(self.environment.tools)
