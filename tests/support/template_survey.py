"""What each family's chat template takes, found by rendering, for docs/chat-templates.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.chat_templates import FAMILIES, family_template

from courtside.chat.hint_splicing import HintRole, splice_hint
from courtside.chat.history_probes import HistoryChange
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.chat.template_variables import (
    RENDERER_VARIABLES,
    find_variables,
    template_sources,
    writes_date,
)
from courtside.errors import ModelError
from courtside.types import Hint, Message, Sample, Task, Trajectory

PAGE = Path(__file__).resolve().parents[2] / "docs/chat-templates.md"
BEGIN, END = "<!-- families: scripts/template_table.py -->", "<!-- /families -->"
COLUMNS = (
    "models", "history renders", "hint's own message as", "tools", "thinking", "switches",
    "refused",
)  # fmt: skip
HISTORY = {
    "answers": "other tokens",
    "answers with thoughts": "other tokens",
    "calls": "other tokens, with tools",
}
WITH_NAME: dict[str, Any] = {"name": "add"}
WITH_ID: dict[str, Any] = {"tool_call_id": "abcdefghi"}
SIGNS = (
    ("lacks it. Give the message a name", "needs a name"),
    ("lacks it. Give the message a tool_call_id", "needs an id"),
    ("begins an answer", "answers begin otherwise after it"),
    ("as an assistant's", "taken for an answer"),
    ("template moves", "would be moved"),
    ("does not render", "is left out"),
    ("holds no end token", "no end before it"),
    ("refuses messages", "the template raises"),
)


def play(template: IncrementalTemplate, *between: Message) -> Trajectory:
    """A question, an answer, what comes between, an answer."""
    task = Task(id="t", split="train", messages=(Message(role="user", content="Is it?"),))
    ids = (
        template.renderer.tokenize("It is.", "\ufdd0") + template.renderer.boundary.end_of_turn_ids
    )
    answer = template.assistant_turn(Sample(token_ids=ids, logp=(), stop="eos", text="It is."))
    turns = (
        template.prompt_turn(task),
        answer,
        template.environment_turn(between, add_end_of_turn=False, prompt=task.messages),
        answer,
    )
    return Trajectory(
        id="e", task=task, turns=turns, source="student", policy_version=0, temperature=1.0,
        stop="done",
    )  # fmt: skip


def tool_message(**keys: str) -> Message:
    return Message(role="tool", content="42", extra=json.dumps(keys) if keys else "")


def find_hint_problem(template: IncrementalTemplate, role: HintRole) -> str | None:
    """Why a hint's own message of that role has no place before an answer to a question."""
    trajectory = play(template, Message(role="user", content="Was it?"))
    try:
        for turn in (1, 3):
            hint = Hint(trajectory="e", turn=turn, text="Look it up.", source="human")
            splice_hint(trajectory, hint, template, place="before_turn", role=role, max_tokens=999)
    except ModelError as error:
        return describe(error)
    return None


def find_result_keys(template: IncrementalTemplate) -> tuple[dict[str, str] | None, str]:
    """What a tool's message must have; None, and why: it has no place."""
    problem = ""
    for keys in ({}, WITH_NAME, WITH_ID, WITH_NAME | WITH_ID):
        try:
            template.render_continuation([tool_message(**keys)])
        except ModelError as error:
            problem = problem or describe(error)
        else:
            return keys, ""
    return None, problem


def describe(error: ModelError) -> str:
    return next(short for sign, short in SIGNS if sign in str(error))


def switches_of(renderer: ChatTemplate) -> list[str]:
    names = frozenset[str]().union(*map(find_variables, template_sources(renderer.tokenizer)))
    return sorted(n for n in names - RENDERER_VARIABLES if not n.endswith("_token"))


def generation_prompt(template: IncrementalTemplate) -> str:
    span = template.render_prompt([Message(role="user", content="Is it?")])
    num = span.num_generation_prompt_tokens
    ids = span.token_ids[len(span.token_ids) - num :]
    return str(template.renderer.tokenizer.decode(ids))


def describe_thinking(name: str) -> str:
    switches = switches_of(family_template(name).renderer)
    switch = next((s for s in ("enable_thinking", "thinking") if s in switches), None)
    states = [_thinking_state(generation_prompt(family_template(name)))]
    if switch is not None:
        for value, word in ((True, "true"), (False, "false")):
            state = _thinking_state(generation_prompt(family_template(name, **{switch: value})))
            if state != states[0]:
                states.append(f"`{switch} = {word}`: {state}")
    if states == ["free"] and FAMILIES[name].thinking is None:
        return "–"
    return "; ".join(states)


def _thinking_state(prompt: str) -> str:
    for opening, closing in (("<think>", "</think>"), ("<|channel>thought", "<channel|>")):
        if closing in prompt:
            return "closed"
        if opening in prompt:
            return "opened"
    return "free"


def survey(name: str) -> tuple[str, ...]:
    template = family_template(name)
    roles: dict[HintRole, str | None] = {
        role: find_hint_problem(template, role) for role in ("user", "system", "tool")
    }
    problems = {problem: [r for r in roles if roles[r] == problem] for problem in roles.values()}
    refused = [f"{', '.join(r)} hint: {problem}" for problem, r in problems.items() if problem]
    if not template.renderer.takes_system:
        refused.append("system message")
    keys, problem = find_result_keys(template)
    tools = [
        *(["schemas"] if template.renderer.takes_tools else []),
        *(["calls"] if template.renderer.renders_tool_calls else []),
    ]
    if keys is None:
        refused.append(f"results: {problem}")
    else:
        with_keys = " and ".join(f"`{key}`" for key in keys)
        tools.append(f"results with {with_keys}" if keys else "results")
    switches = [f"`{switch}`" for switch in switches_of(template.renderer)]
    if writes_date(template.renderer.tokenizer):
        switches.append("date")
    return (
        FAMILIES[name].models,
        _describe_history(template.history_change),
        ", ".join(role for role, problem in roles.items() if problem is None) or "none",
        ", ".join(tools) or "–",
        describe_thinking(name),
        ", ".join(switches) or "–",
        "; ".join(refused) or "–",
    )


def _describe_history(change: HistoryChange | None) -> str:
    if change is None:
        return "as it grew"
    return "earlier thoughts dropped" if change.drops_thoughts else HISTORY[change.answers]


def family_table() -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(survey, FAMILIES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page_with_table(page: str) -> str:
    before, _, remainder = page.partition(BEGIN)
    after = remainder.partition(END)[2]
    return f"{before}{BEGIN}\n\n{family_table()}\n\n{END}{after}"
