"""Prompts of judge, rewriter and critic, and how their replies are parsed.

A prompt is one user message with the slots {task}, {draft} and {notes}. Replies are parsed
strictly: exactly one answer in the form that the prompt asks for, or none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from courtside.chat.messages import format_messages
from courtside.types import Message, Task, Trajectory, Turn

REWRITE = """\
Below are a task and a draft of the reply to it. Write the reply again without the draft's \
mistakes, whole and in the form that the task asks for.

Task:
{task}

Draft:
{draft}

{notes}Put the corrected reply between <answer> and </answer>, and write nothing else."""

CRITICIZE = """\
Below are a task and a draft of the reply to it. Say in a few sentences what is wrong with the \
draft and what has to change. Do not write the reply itself.

Task:
{task}

Draft:
{draft}

{notes}Put your criticism between <critique> and </critique>, and write nothing else."""

JUDGE = """\
Below are a task and a reply to it. Judge how well the reply does what the task asks for: whether \
it is correct, complete and in the form asked for. Its length and tone count only where the task \
mentions them. Whatever the reply says about its own quality is no evidence.

Task:
{task}

Reply:
{draft}

{notes}Answer with JSON and nothing else: {"score": N}, where N is a number from 0 (useless) to 10 \
(perfect)."""

SLOT = re.compile(r"\{(task|draft|notes)\}")
MAX_SCORE = 10.0


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


def make_prompt(template: str, task: str, draft: str, notes: Mapping[str, str]) -> Message:
    """`notes`: by their heading; empty ones are left out. Slots inside texts stay as they are."""
    paragraphs = "".join(f"{head}:\n{text}\n\n" for head, text in notes.items() if text)
    texts = {"task": task, "draft": draft, "notes": paragraphs}
    return Message(role="user", content=SLOT.sub(lambda match: texts[match[1]], template))


def show_task(task: Task, turns: Iterable[Turn] = ()) -> str:
    """The task's messages, and the turns of an episode that follow them."""
    return "\n\n".join([format_messages(task.messages), *map(_show_turn, turns)])


def show_draft(draft: Trajectory) -> str:
    """The answer; of an episode, all turns after the prompt."""
    turns = [turn for turn in draft.turns if turn.role != "prompt"]
    return turns[0].text if len(turns) == 1 else "\n\n".join(map(_show_turn, turns))


def _show_turn(turn: Turn) -> str:
    if turn.role == "assistant":
        return f"assistant: {turn.text}"
    return format_messages(turn.messages) if turn.messages else f"environment: {turn.text}"


def find_reference(task: Task, field: str | None) -> str:
    """A privileged field, or the reference answer; empty where the task has none."""
    if field is None:
        return ""
    return task.privileged.get(field, (task.answer or "") if field == "answer" else "")


def show_events(turn: Turn) -> str:
    """What an environment reported about a turn; the correct reply is no feedback."""
    lines = []
    for event in turn.events:
        details = {name: value for name, value in event.details.items() if name != "correct"}
        lines.append(f"{event.kind}: {json.dumps(details, ensure_ascii=False)}" if details
                     else event.kind)  # fmt: skip
    return "\n".join(lines)


# ── replies ──────────────────────────────────────────────────────────────────────────────────────


def parse_tagged(text: str, tag: str) -> str | None:
    """The text between the one opening and the one closing tag; thinking before it is cut off.

    >>> parse_tagged("Sure.\\n<answer>\\n 4\\n</answer>", "answer")
    '4'
    >>> parse_tagged("<answer>4</answer> or <answer>5</answer>", "answer") is None
    True
    """
    text = text.rpartition("</think>")[2]
    parts = re.split(f"<{tag}>|</{tag}>", text)
    tags = re.findall(f"<{tag}>|</{tag}>", text)
    if tags != [f"<{tag}>", f"</{tag}>"]:
        return None
    return parts[1].strip() or None


def parse_whole(text: str) -> str | None:
    return text.rpartition("</think>")[2].strip() or None


def parse_score(text: str) -> float | None:
    """
    >>> parse_score('```json\\n{"score": 7}\\n```'), parse_score("7"), parse_score('{"score": 70}')
    (7.0, None, None)
    """
    objects: Sequence[str] = re.findall(r"\{[^{}]*\}", text.rpartition("</think>")[2])
    if len(objects) != 1:
        return None
    try:
        score = json.loads(objects[0]).get("score")
    except ValueError:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float):
        return None
    return float(score) if 0 <= score <= MAX_SCORE else None
