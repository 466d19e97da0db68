"""One episode: requests, one reply to each, and events for the mistakes.

Nothing answers a call, and the user goes on whatever came: a mistake leaves no trace that a later
turn could learn from. A request is solved by its right call; what is said before the call, which is
the fault `talk`, never counts for the grade.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from courtside.environments.switchboard.plan import FAULTS, Plan, Request
from courtside.environments.tool_calls import CallError, ToolCall, format_call, parse_call
from courtside.recipe.tasks import SwitchboardTasks
from courtside.types import Event, Grade, Message, Observation

EVENT_KINDS = frozenset({
    *FAULTS, *(f"{fault}_mirror" for fault in FAULTS),
    "wrong_call", "no_call", "unparsable_call", "extra_text",
})  # fmt: skip
EVENT_DETAILS = frozenset({
    "request", "correct", "date", "desk", "confirm", "opening",
})  # fmt: skip
BARE_CALL = re.compile(r"\w+\([^()]*\)")
"""A call and nothing else; no argument has parentheses."""


class SwitchboardEpisode:
    def __init__(self, plan: Plan, config: SwitchboardTasks) -> None:
        self._plan = plan
        self._config = config
        self._solved: list[bool] = []

    def step(self, reply: str) -> Observation:
        if self.done:
            return Observation(messages=(), done=True)
        request = self.request
        call = parse_call(reply, "plain")
        details = {
            "request": request.text, "correct": right_reply(request), **request.details
        }  # fmt: skip
        events = tuple(
            Event(kind=kind, details=details) for kind in find_mistakes(request, reply, call)
        )
        self._solved.append(_is_call(call, request, request.arguments))
        messages = () if self.done else (Message(role="user", content=self.request.text),)
        return Observation(
            messages=messages, done=self.done, events=events, decision=request.decision
        )

    def grade(self) -> Grade:
        num_requests, num_solved = len(self._plan.requests), sum(self._solved)
        passed = num_solved == num_requests
        score = float(passed) if self._config.reward == "all" else num_solved / num_requests
        feedback = "" if passed else f"{num_solved} of {num_requests} requests were solved."
        return Grade(score=score, passed=passed, feedback=feedback)

    @property
    def done(self) -> bool:
        return len(self._solved) == len(self._plan.requests)

    @property
    def request(self) -> Request:
        """The current request; only before the end."""
        return self._plan.requests[len(self._solved)]


def right_reply(request: Request) -> str:
    return request.opening + format_call(request.tool, request.arguments, "plain")


def habitual_reply(request: Request) -> str:
    call = format_call(request.tool, request.habitual_arguments, "plain")
    return request.habitual_opening + call


def find_mistakes(request: Request, reply: str, call: ToolCall | CallError) -> Iterator[str]:
    """Kinds of events: at most one of the call, and one of the text around it."""
    if isinstance(call, CallError):
        yield call.kind
        return
    if not _is_call(call, request, request.arguments):
        if request.habit_is_wrong and _is_call(call, request, request.habitual_arguments):
            yield str(request.fault)
        elif any(_is_call(call, request, cured) for cured in request.cured_arguments) and (
            not request.habit_is_wrong
        ):
            yield f"{request.fault}_mirror"
        else:
            yield "wrong_call"
    text, greeting = reply.strip(), request.opening.strip()
    is_greeted = bool(greeting) and text.startswith(greeting)
    if BARE_CALL.fullmatch(text.removeprefix(greeting).lstrip() if is_greeted else text):
        if greeting and not is_greeted:
            yield "talk_mirror"
    elif request.fault == "talk" and request.habit_is_wrong and not BARE_CALL.match(text):
        yield "talk"
    else:
        yield "extra_text"


def _is_call(call: ToolCall | CallError, request: Request, arguments: object) -> bool:
    return isinstance(call, ToolCall) and call.name == request.tool and call.arguments == arguments
