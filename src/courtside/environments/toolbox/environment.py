"""The toolbox environment: an episode is planned from its number alone.

Each decision (which tools, which names, the n-th request) has a random stream of its own, so the
same number with other `names` is the same episode with other names: a pair to compare. Tool lists
are short, for small models with short contexts.
"""

from __future__ import annotations

import json
from itertools import count

from courtside.environments.tool_calls import CallFormat
from courtside.environments.toolbox.episode import Plan, ToolboxEpisode
from courtside.environments.toolbox.tools import TOOLS
from courtside.environments.toolbox.tools.base import Request, RequestDraft, ToolState
from courtside.environments.toolbox.tools.names import INVENTED_NAMES, NAMES
from courtside.environments.toolbox.tools.notes import NOTE_TOOLS
from courtside.errors import TaskError
from courtside.hashing import SeededRandom, split_of, task_id
from courtside.recipe.tasks import ToolboxTasks
from courtside.types import Message, Split, Task

NUM_FIRST_NOTES = 2
"""Initial notes, so that episodes without a writing tool can read some."""
MAX_DRAWS = 10_000
FORMATS = {
    "json": '<tool_call>{"name": "…", "arguments": {…}}</tool_call>',
    "plain": 'name(argument="value")',
}
REMINDERS = (
    "Only these tools exist: {tools}.",
    "Look at the list again. It has {tools}.",
    "Note that the tools are called {tools} in this conversation.",
    "Use one of {tools}, under exactly that name.",
    "Careful, other names will not be found. Listed are {tools}.",
    "You can call {tools} and nothing else.",
)
"""Reminders in demonstrations, phrased like hints. No reader uses these texts: a student
warm-started on them has not seen the hints of training."""


class Toolbox:
    size = 10**12
    """Numbers; episodes with few turns and tools may repeat, under the same id."""

    def __init__(self, config: ToolboxTasks) -> None:
        self.config = config

    @staticmethod
    def split(index: int) -> Split:
        """Of a number, without making its task."""
        return split_of(f"toolbox {index}")

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
                conversation.append(_make_reminder(task, turn))
            by_habit = not is_reminded and SeededRandom(f"habit {task.id} {turn}").bernoulli(habits)
            reply = episode.habitual_call() if by_habit else episode.expert_call()
            conversation.append(Message(role="assistant", content=reply))
            observation = episode.step(reply)
            if observation.done:
                break
            conversation += observation.messages
        return conversation


def _identity(config: ToolboxTasks, plan: Plan) -> str:
    """A reward changes no episode, so arms of a study that differ in it share their tasks: every
    reward has the id of "share"."""
    return json.dumps(
        [
            [config.tool_call_format, config.tool_role, config.retries, "share"],
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


def _make_reminder(task: Task, turn: int) -> Message:
    """The one for the call of this turn; a message as `hints.position = "before_turn"` makes it."""
    template = SeededRandom(f"words {task.id} {turn}").choice(REMINDERS)
    return Message(role="user", content=template.format(tools=task.privileged["tools"]))


# ── plans ────────────────────────────────────────────────────────────────────────────────────────


def make_plan(config: ToolboxTasks, number: int) -> Plan:
    split = Toolbox.split(number)
    key = f"toolbox {number}"
    capabilities = _choose_tools(config, SeededRandom(f"{key} tools"))
    num_turns = SeededRandom(f"{key} turns").randint(*config.turn_range)
    state = ToolState()
    if NOTE_TOOLS.keys() & capabilities:
        state.notes.update(_first_notes(split, SeededRandom(f"{key} notes")))
    return Plan(
        split=split,
        tools=_names(config, capabilities, key),
        notes=dict(state.notes),
        requests=tuple(
            _request(capabilities, split, SeededRandom(f"{key} request {turn}"), state)
            for turn in range(num_turns)
        ),
    )


def _choose_tools(config: ToolboxTasks, rng: SeededRandom) -> list[str]:
    capabilities: list[str] = list(dict.fromkeys(config.capabilities))
    listed_tools = rng.choose_distinct(capabilities, config.num_tools)
    if "delete_note" in listed_tools and "write_note" not in listed_tools:
        candidates = [index for index, name in enumerate(listed_tools) if name != "delete_note"]
        listed_tools[rng.choice(candidates)] = "write_note"
    return listed_tools


def _names(config: ToolboxTasks, capabilities: list[str], key: str) -> dict[str, str]:
    invented = iter(
        SeededRandom(f"{key} made-up names").choose_distinct(INVENTED_NAMES, len(capabilities))
    )
    return {
        name: next(invented)
        if SeededRandom(f"{key} made-up name of {name}").bernoulli(config.random_name_fraction)
        else _name(config, name, SeededRandom(f"{key} name of {name}"))
        for name in capabilities
    }


def _name(config: ToolboxTasks, capability: str, rng: SeededRandom) -> str:
    names = NAMES[capability]
    pool = {
        "seen": names.seen_names,
        "held_out": names.held_out,
        "all": (*names.seen_names, *names.held_out),
    }[config.names]
    if config.common_name_fraction is None or names.common not in pool:
        return rng.choice(pool)
    if rng.bernoulli(config.common_name_fraction):
        return names.common
    return rng.choice([name for name in pool if name != names.common])


def _first_notes(split: Split, rng: SeededRandom) -> dict[str, str]:
    first_notes: dict[str, str] = {}
    while len(first_notes) < NUM_FIRST_NOTES:
        arguments = _draft_of_split("write_note", split, rng, ToolState()).arguments
        first_notes[arguments["title"]] = arguments["text"]
    return first_notes


def _request(capabilities: list[str], split: Split, rng: SeededRandom, state: ToolState) -> Request:
    """A request that makes sense in `state`, which its solution then changes."""
    possible = [name for name in capabilities if state.notes or not TOOLS[name].needs_notes]
    capability = rng.choice(possible)
    draft = _draft_of_split(capability, split, rng, state)
    text = rng.choice(TOOLS[capability].phrases).format(**draft.arguments)
    TOOLS[capability].run(state, draft.arguments)
    return Request(capability=capability, text=text, arguments=draft.arguments)


def _draft_of_split(
    capability: str, split: Split, rng: SeededRandom, state: ToolState
) -> RequestDraft:
    """A request about a topic that no other split has for this tool."""
    for _ in range(MAX_DRAWS):
        draft = TOOLS[capability].draft_request(rng, state)
        if draft.topic is None or split_of(f"{capability} {draft.topic}") == split:
            return draft
    raise AssertionError(f"{capability} has no topics in {split}")


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


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
