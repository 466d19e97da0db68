"""The switchboard environment: tasks, episodes and demonstrations with planted habits."""

from __future__ import annotations

import json

from courtside.environments.switchboard.episode import (
    SwitchboardEpisode,
    habitual_reply,
    right_reply,
)
from courtside.environments.switchboard.plan import (
    FAULTS,
    NUM_STRATA,
    Plan,
    Request,
    make_plan,
    split_of_number,
    stratum_of,
)
from courtside.environments.switchboard.wording import REMINDERS, SURE, TRAINING_DESKS
from courtside.errors import TaskError
from courtside.hashing import SeededRandom, task_id
from courtside.recipe.tasks import SwitchboardTasks
from courtside.types import Message, Split, Task


class Switchboard:
    size = 10**12
    """Numbers of episodes."""
    num_strata = NUM_STRATA

    def __init__(self, config: SwitchboardTasks) -> None:
        self.config = config

    @staticmethod
    def split(index: int) -> Split:
        """Of a number, without making its task."""
        return split_of_number(index)

    @staticmethod
    def stratum(index: int) -> int:
        """As many held-out tasks of each make a set with equally many decisions of each kind."""
        return stratum_of(index)

    def task(self, index: int) -> Task:
        plan = make_plan(self.config, index)
        return Task(
            id=task_id("switchboard", _identity(plan)),
            split=plan.split,
            messages=(
                Message(role="system", content=plan.system),
                Message(role="user", content=plan.requests[0].text),
            ),
            tags=("switchboard", self.config.cues),
            grader_args={"number": index},
        )

    def start(self, task: Task) -> SwitchboardEpisode:
        return SwitchboardEpisode(self.plan(task), self.config)

    def plan(self, task: Task) -> Plan:
        number = task.grader_args.get("number")
        # The settings are the recipe's; another recipe's task would be another episode.
        if not isinstance(number, int) or self.task(number).id != task.id:
            raise TaskError(
                f"task {task.id} is not one of this switchboard. Start it with the [tasks] section "
                "that it was made with"
            )
        return make_plan(self.config, number)

    def demonstrate(self, task: Task) -> list[Message]:
        """The whole conversation of an expert with the habits and the reminders of the recipe."""
        plan = self.plan(task)
        conversation = [Message(role="system", content=plan.system)]
        for turn, request in enumerate(plan.requests):
            conversation.append(Message(role="user", content=request.text))
            is_heeded = False
            if request.fault is not None:
                rng = SeededRandom(f"reminder {task.id} {turn}")
                is_heeded = rng.bernoulli(self.config.reminder_fraction)
                # Of all critical calls, so a larger fraction of those without a heeded reminder.
                unheeded = 1 - self.config.reminder_fraction
                is_other = not is_heeded and rng.bernoulli(
                    self.config.wrong_reminder_fraction / unheeded
                )
                if is_heeded or is_other:
                    text = _make_reminder(request, rng, is_other=is_other)
                    conversation.append(Message(role="user", content=text))
            habit = SeededRandom(f"habit {task.id} {turn}").bernoulli(self.config.habit_fraction)
            reply = habitual_reply(request) if habit and not is_heeded else right_reply(request)
            conversation.append(Message(role="assistant", content=reply))
        return conversation


def _identity(plan: Plan) -> str:
    """The episode's content; rewards and demonstrations make no other task of it."""
    return json.dumps(
        [plan.system, [[r.text, r.opening, r.tool, dict(r.arguments)] for r in plan.requests]]
    )


def _make_reminder(request: Request, rng: SeededRandom, *, is_other: bool) -> str:
    """A message as `hints.position = "before_turn"` makes it: of this request, or of another kind
    with details that some other request could have."""
    if not is_other:
        assert request.fault is not None
        return rng.choice(REMINDERS[request.fault]).format(**request.details)
    kind = rng.choice([fault for fault in FAULTS if fault != request.fault])
    details = {
        "date": f"{rng.randint(10, 28)}.{rng.randint(10, 12)}.{rng.randint(2024, 2027)}",
        "desk": rng.choice(TRAINING_DESKS),
        "confirm": rng.choice(("yes", "no")),
        "opening": rng.choice(("the call", SURE.strip())),
    }
    return rng.choice(REMINDERS[kind]).format(**details)
