"""One episode: requests, tool calls and their outcomes.

A request is solved when the needed tool returned the result, and left the note, of a faultless
episode at this point. Only the effects of calls count, never the student's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from courtside.environments.tool_calls import CallError, ToolCall, format_call, parse_call
from courtside.environments.toolbox.tools import TOOLS
from courtside.environments.toolbox.tools.base import (
    Arguments,
    Request,
    ToolFailure,
    ToolState,
    invalid_arguments,
)
from courtside.environments.toolbox.tools.names import NAMES
from courtside.recipe.tasks import ToolboxTasks
from courtside.types import Event, Grade, Message, Observation, Split

SELF_EXPLANATORY = frozenset(
    {"no_call", "unparsable_call", "tool_not_found", "invalid_arguments", "tool_error"}
)
"""Mistakes that the tool's result explains; for the others the user asks again."""


EVENT_KINDS = frozenset({
    "tool_not_found", "invalid_arguments", "unparsable_call", "no_call", "tool_error",
    "earlier_failure", "wrong_result", "wrong_tool", "repeated_call", "extra_calls",
})  # fmt: skip
EVENT_DETAILS = frozenset({
    "message", "request", "capability", "listed", "common", "tools", "correct", "tool", "arguments",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    split: Split
    tools: Mapping[str, str]
    """Capability → the name it is listed under, in the order of the list."""
    notes: Mapping[str, str]
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOutcome:
    """The outcome of one reply."""

    result: str
    """The tool's result, or an error message."""
    wrong: str | None
    """Kind of the event; None: the request is solved."""
    call: ToolCall | None = None


class ToolboxEpisode:
    def __init__(self, plan: Plan, config: ToolboxTasks) -> None:
        self._plan = plan
        self._config = config
        self._capability_of = {name: capability for capability, name in plan.tools.items()}
        self._state = ToolState(notes=dict(plan.notes))
        self._faultless = ToolState(notes=dict(plan.notes))
        """The state if all requests so far had been solved."""
        self._solved: list[bool] = []
        self._num_tries = 0
        self._last_call: tuple[str, str] | None = None

    # ── the Episode protocol ─────────────────────────────────────────────────────────────────────

    def step(self, reply: str) -> Observation:
        if self.done:
            return Observation(messages=(), done=True)
        request = self.request
        outcome = self._judge_reply(reply, request)
        events = tuple(self._events(outcome, request))
        self._num_tries += 1
        request_text: str | None = None
        if outcome.wrong is None or self._num_tries > self._config.retries:
            self._close(request, solved=outcome.wrong is None)
            request_text = None if self.done else self.request.text
        elif outcome.wrong not in SELF_EXPLANATORY:
            request_text = f"That is not what I asked for. {request.text}"
        result_text = self._cut(outcome.result)
        if outcome.call is not None and outcome.call.num_ignored:
            result_text += f"\n(Only the first of {outcome.call.num_ignored + 1} calls was run.)"
        messages = answer_messages(result_text, request_text, tool_role=self._config.tool_role)
        return Observation(messages=messages, done=self.done, events=events)

    def grade(self) -> Grade:
        num_requests, num_solved = len(self._plan.requests), sum(self._solved)
        all_solved = num_solved == num_requests
        untouched = self._state.notes == self._faultless.notes
        passed = all_solved and untouched
        sentences = [f"{num_solved} of {num_requests} requests were solved."]
        if wrong := [str(i) for i, solved in enumerate(self._solved, start=1) if not solved]:
            sentences.append(f"Not solved: request {', '.join(wrong)}.")
        if len(self._solved) < num_requests:
            sentences.append(f"Not reached: {num_requests - len(self._solved)}.")
        if all_solved and not untouched:
            sentences.append("The notes are not as they should be.")
        share = num_solved / num_requests
        return Grade(
            score=share if self._config.reward == "share" else float(passed),
            passed=passed,
            feedback="" if passed else " ".join(sentences),
        )

    # ── requests and expert calls ────────────────────────────────────────────────────────────────

    @property
    def done(self) -> bool:
        return len(self._solved) == len(self._plan.requests)

    @property
    def request(self) -> Request:
        """The current request; only before the end."""
        return self._plan.requests[len(self._solved)]

    def expert_call(self) -> str:
        """The right call for the current request."""
        return self._format_call_as(self._plan.tools[self.request.capability])

    def habitual_call(self) -> str:
        """The same call under the tool's common name, whatever the list says."""
        return self._format_call_as(NAMES[self.request.capability].common)

    def _format_call_as(self, name: str) -> str:
        return format_call(name, self.request.arguments, self._config.tool_call_format)

    # ── outcome of a reply ───────────────────────────────────────────────────────────────────────

    def _judge_reply(self, reply: str, request: Request) -> ReplyOutcome:
        call = parse_call(reply, self._config.tool_call_format)
        if isinstance(call, CallError):
            return ReplyOutcome(result=call.message, wrong=call.kind)
        capability = self._capability_of.get(call.name)
        if capability is None:
            result = f"Tool not found: {call.name}"
            return ReplyOutcome(result=result, wrong="tool_not_found", call=call)
        if problem := invalid_arguments(TOOLS[capability], call.arguments):
            result = f"Invalid arguments for {call.name}: {problem}"
            return ReplyOutcome(result=result, wrong="invalid_arguments", call=call)
        return self._judge_call(call, capability, request)

    def _judge_call(self, call: ToolCall, capability: str, request: Request) -> ReplyOutcome:
        due_state, faultless = self._state.copy(), self._faultless.copy()
        due_result = _run_tool(due_state, request.capability, request.arguments)
        faultless_result = _run_tool(faultless, request.capability, request.arguments)
        result, failed = actual_result = _run_tool(self._state, capability, call.arguments)
        title = request.arguments.get("title", "")
        is_needed = capability == request.capability
        same_note = self._state.notes.get(title) == faultless.notes.get(title)
        wrong: str | None
        if is_needed and actual_result == faultless_result and same_note:
            wrong = None
        elif is_needed and actual_result == due_result and self._state.notes == due_state.notes:
            wrong = "earlier_failure"  # The right call, in a state that an earlier call spoiled.
        elif failed:
            wrong = "tool_error"
        else:
            wrong = "wrong_result" if is_needed else "wrong_tool"
        if failed:
            result = f"Error: {result}"
        return ReplyOutcome(result=result, wrong=wrong, call=call)

    def _close(self, request: Request, *, solved: bool) -> None:
        _run_tool(self._faultless, request.capability, request.arguments)
        self._solved.append(solved)
        self._num_tries = 0

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def _events(self, outcome: ReplyOutcome, request: Request) -> Iterator[Event]:
        call = outcome.call
        this_call = None if call is None else (call.name, _format_arguments(call.arguments))
        details = {
            "message": self._cut(outcome.result),
            "request": request.text,
            "capability": request.capability,
            "listed": self._plan.tools[request.capability],
            "common": NAMES[request.capability].common,
            "tools": ", ".join(self._plan.tools.values()),
            "correct": self.expert_call(),
        }
        if this_call is not None:
            details |= {"tool": self._cut(this_call[0]), "arguments": self._cut(this_call[1])}
        if outcome.wrong is not None:
            yield Event(kind=outcome.wrong, details=details)
        if outcome.wrong is not None and this_call is not None and this_call == self._last_call:
            yield Event(kind="repeated_call", details=details)
        if call is not None and call.num_ignored:
            yield Event(kind="extra_calls", details=details)
        self._last_call = this_call

    def _cut(self, text: str) -> str:
        limit = self._config.max_result_chars
        return text if len(text) <= limit else f"{text[:limit]}… [{len(text)} characters in all]"


def _run_tool(state: ToolState, capability: str, arguments: Arguments) -> tuple[str, bool]:
    """(result, whether the tool failed)."""
    try:
        return TOOLS[capability].run(state, arguments), False
    except ToolFailure as failure:
        return str(failure), True


def _format_arguments(arguments: Arguments) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False, sort_keys=True)


def answer_messages(result: str, request: str | None, *, tool_role: bool) -> tuple[Message, ...]:
    """A tool's result and the user's next request, if there is one."""
    if tool_role:
        user_messages = () if request is None else (Message(role="user", content=request),)
        return (Message(role="tool", content=result), *user_messages)
    content = f"Result: {result}" if request is None else f"Result: {result}\n\n{request}"
    return (Message(role="user", content=content),)
