"""The toolbox as an environment."""

from __future__ import annotations

import json
from itertools import count

from courtside.environments.seeded_random import SeededRandom
from courtside.environments.toolbox.episode import ToolboxEpisode
from courtside.environments.toolbox.plan import Plan, make_plan, split_of_index
from courtside.environments.toolbox.prompt import FORMATS, first_messages, signature
from courtside.environments.toolbox.reminders import make_reminder
from courtside.environments.toolbox.tools.names import NAMES
from courtside.errors import TaskError
from courtside.hashing import task_id
from courtside.recipe import ToolboxTasks
from courtside.types import Message, Split, Task


class Toolbox:
    size = 10**12
    """Numbers; episodes with few turns and tools may repeat, under the same id."""

    def __init__(self, config: ToolboxTasks) -> None:
        self.config = config

    def split(self, index: int) -> Split:
        """Of a number, without making its task."""
        return split_of_index(index)

    def task(self, index: int) -> Task:
        config, plan = self.config, make_plan(self.config, index)
        listed = plan.tools.values()
        return Task(
            id=task_id("toolbox", _identity(config, plan)),
            split=plan.split,
            messages=first_messages(plan, config.tool_call_format, tool_role=config.tool_role),
            privileged={
                "tools": ", ".join(listed),
                "signatures": "\n".join(
                    signature(capability, name, config.tool_call_format)
                    for capability, name in plan.tools.items()
                ),
                "format": FORMATS[config.tool_call_format],
            },
            tags=("toolbox", config.tool_call_format, _names_tag(plan)),
            grader_args={"number": index},
        )

    def start(self, task: Task) -> ToolboxEpisode:
        number = task.grader_args.get("number")
        # The settings are the recipe's; another recipe's task would be another episode.
        if not isinstance(number, int) or self.task(number).id != task.id:
            raise TaskError(
                f"task {task.id} is not one of this toolbox. Start it with the [tasks] section "
                "that it was made with"
            )
        return ToolboxEpisode(make_plan(self.config, number), self.config)

    def demonstrate(
        self,
        task: Task,
        habit_fraction: float | None = None,
        reminder_fraction: float | None = None,
    ) -> list[Message]:
        """The whole conversation of an expert with the habit and the reminders of the recipe, or
        with these."""
        habits = self.config.habit_fraction if habit_fraction is None else habit_fraction
        reminders = (
            self.config.reminder_fraction if reminder_fraction is None else reminder_fraction
        )
        episode = self.start(task)
        conversation = list(task.messages)
        for turn in count():
            is_reminded = SeededRandom(f"reminder {task.id} {turn}").bernoulli(reminders)
            if is_reminded:
                conversation.append(make_reminder(task, turn))
            by_habit = not is_reminded and SeededRandom(f"habit {task.id} {turn}").bernoulli(habits)
            reply = episode.habitual_call() if by_habit else episode.expert_call()
            conversation.append(Message(role="assistant", content=reply))
            observation = episode.step(reply)
            if observation.done:
                break
            conversation += observation.messages
        return conversation


def _identity(config: ToolboxTasks, plan: Plan) -> str:
    return json.dumps(
        [
            [config.tool_call_format, config.tool_role, config.retries, config.reward],
            config.max_result_chars,
            list(plan.tools.items()),
            plan.notes,
            [[r.capability, r.text, r.arguments] for r in plan.requests],
        ]
    )


def _names_tag(plan: Plan) -> str:
    kinds = {
        "seen"
        if name in NAMES[capability].seen_names
        else "held-out"
        if name in NAMES[capability].held_out
        else "made-up"
        for capability, name in plan.tools.items()
    }
    return f"{kinds.pop() if len(kinds) == 1 else 'mixed'} names"
