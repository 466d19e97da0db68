"""Corrected drafts of a run as JSON lines, in the conversational formats of TRL and `datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from courtside.chat.messages import message_tree
from courtside.errors import UserError
from courtside.report.folder.files import encode_json, replace_file
from courtside.report.folder.folder import RunFolder
from courtside.types import Message, Trajectory, Turn

CorrectionFormat = Literal["pairs", "completions"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedCorrections:
    path: Path
    num_rows: int
    num_skipped: int
    """Corrections without a text, or with the text of their draft: other tokens, nothing to
    prefer."""
    steps: Sequence[int]
    """Stored steps that were read; `run.trajectories_every` decides which are."""


def write_corrections(
    folder: RunFolder, path: Path, *, format: CorrectionFormat
) -> ExportedCorrections:
    """`pairs`: prompt, chosen, rejected. `completions`: prompt and completion, of the better ones
    of pairs and of repairs."""
    if path.exists():
        raise UserError(f"{path}: exists already. Name another file, or remove it")
    steps = folder.trajectory_steps()
    rows: list[Row] = []
    num_skipped = 0
    for step in steps:
        stored = [item.trajectory for item in folder.trajectories(step)]
        make_rows = _pair_rows if format == "pairs" else _completion_rows
        for row in make_rows(stored, step):
            if row is None:
                num_skipped += 1
            else:
                rows.append(row)
    if not rows:
        raise UserError(
            f"{folder.path}: its {len(steps)} stored steps hold no {_NAMES[format]}. They come "
            f"from {_SOURCES[format]} in the recipe (metrics.jsonl counts what was dropped), and "
            "run.trajectories_every decides which steps are stored"
        )
    replace_file(path, b"".join(map(encode_json, rows)))
    return ExportedCorrections(
        path=path, num_rows=len(rows), num_skipped=num_skipped, steps=tuple(steps)
    )


_NAMES: Mapping[str, str] = {"pairs": "preference pairs", "completions": "corrections"}
_SOURCES: Mapping[str, str] = {
    "pairs": "[[drafts]] of kind 'choose', or 'rewrite' with pairs = true, or [takeover] with "
    "pair = true",
    "completions": "[[drafts]] of kind 'choose' or 'rewrite', or [takeover]",
}


def _pair_rows(trajectories: Sequence[Trajectory], step: int) -> Iterator[Row | None]:
    worse = {t.pair: t for t in trajectories if t.preference == "worse"}
    for chosen in trajectories:
        rejected = None if chosen.pair is None else worse.get(chosen.pair)
        if chosen.preference != "better" or rejected is None:
            continue
        prompt, better = split_conversation(chosen)
        _, other = split_conversation(rejected)
        if better == other or not _has_text(better):
            yield None
            continue
        yield {
            **_prompt_fields(prompt),
            "chosen": [message_tree(message) for message in better],
            "rejected": [message_tree(message) for message in other],
            "metadata": {
                "step": step,
                "task": chosen.task.id,
                "correction": chosen.correction,
                "chosen": chosen.id,
                "rejected": rejected.id,
            },
        }


def _completion_rows(trajectories: Sequence[Trajectory], step: int) -> Iterator[Row | None]:
    critiques = {t.id: t.critique for t in trajectories}
    for trajectory in _corrections(trajectories):
        prompt, completion = split_conversation(trajectory)
        if not _has_text(completion):
            yield None
            continue
        yield {
            **_prompt_fields(prompt),
            "completion": [message_tree(message) for message in completion],
            "metadata": {
                "step": step,
                "task": trajectory.task.id,
                "correction": trajectory.correction,
                "completion": trajectory.id,
                "draft": trajectory.draft,
                "critique": critiques.get(trajectory.draft or ""),
            },
        }


def _corrections(trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
    """Those that correct a draft, without copies in pairs."""
    return (t for t in trajectories if t.correction is not None and not t.is_pair_copy)


def split_conversation(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """The messages before the first turn that can train, and those up to the last assistant's."""
    first, last = trajectory.hintable_turns[0], trajectory.hintable_turns[-1]
    before = [m for turn in trajectory.turns[1:first] for m in _messages(turn)]
    after = [m for turn in trajectory.turns[first : last + 1] for m in _messages(turn)]
    return [*trajectory.task.messages, *before], after


def _messages(turn: Turn) -> Sequence[Message]:
    if turn.role == "assistant":
        return (Message(role="assistant", content=turn.text),)
    return turn.messages


def _prompt_fields(prompt: Sequence[Message]) -> Row:
    tools = next((json.loads(message.tools) for message in prompt if message.tools), None)
    fields: Row = {"prompt": [message_tree(message) for message in prompt]}
    return fields if tools is None else {**fields, "tools": tools}


def _has_text(messages: Sequence[Message]) -> bool:
    return bool(messages[-1].content.strip())
