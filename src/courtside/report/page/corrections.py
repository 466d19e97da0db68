"""The report's corrected drafts: counts of draft stages and take-overs, and examples side by
side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.metrics import DRAFTS, TAKEOVER
from courtside.report.page.samples import first_per_task, render_prompt
from courtside.report.page.tables import render_table
from courtside.report.page.token_gaps import (
    Decode,
    compute_token_gaps,
    render_legend,
    render_text,
    render_turn_text,
)
from courtside.report.page.transcript import (
    Conversation,
    describe_episode,
    pluralize,
    readable_name,
    render_grade,
)
from courtside.types import Correction, Trajectory, Turn

NUM_EXAMPLES = 3
"""Of each kind."""
MAX_COLUMN_TURNS = 12
"""Of one side of an example, from the fork on."""

TITLES: Mapping[Correction, str] = {
    "rewrite": "Repairs",
    "takeover": "Take-overs",
    "choose": "Chosen against rejected",
}
LABELS: Mapping[Correction, tuple[str, str]] = {
    "rewrite": ("draft", "repair"),
    "takeover": ("draft", "take-over"),
    "choose": ("rejected", "chosen"),
}
NAMES = {
    "drafts": "selected drafts",
    "limited": "ended by a limit",
    "played": "continued by the teacher",
}
"""Of counts whose key alone does not say what is counted."""
REASONS = {
    "budget": "more drafts of a prompt than max_per_prompt",
    "draft_ended": "the draft is shorter than takeover.at",
    "empty": "the reply has no text",
    "fault": "a bug in the environment",
    "length": "samples that differ also differ in length by more than length_control",
    "long_critique": "more than max_chars characters",
    "no_answer": "the server gave no answer after its retries",
    "no_better": "graded no better than the draft",
    "no_event": "the environment reported no error to repair",
    "no_text": "the fork is inside a character, or after a token that is no text",
    "not_better": "graded no better than the draft",
    "not_continued": "the server began an answer anew",
    "not_graded": "no grade to decide by",
    "not_located": "no turn to take over at",
    "not_passed": "the continuation did not pass",
    "not_passing": "the environment reports an error in the repair, or failed itself",
    "not_rendered": "the student's chat template cannot say it",
    "passed": "the draft passes",
    "replay": "the environment answered otherwise than to the student",
    "single": "fewer than two samples that can be compared",
    "tie": "samples that do not differ by more than min_gap",
    "too_long": "does not fit the teacher's context",
    "too_long_for_student": "longer than the student's context or max_new_tokens",
    "truncated": "the reply was cut off at max_new_tokens",
    "unchanged": "the draft again",
    "unparsed": "the reply is not in the form that was asked for",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    draft: StoredTrajectory
    correction: StoredTrajectory


def render_corrections(
    metrics: Sequence[Mapping[str, Any]],
    ends: Sequence[Sequence[StoredTrajectory]],
    decode: Decode | None,
) -> str:
    """The body of the section; empty for a run without draft stages and take-overs. `ends`:
    trajectories of the last and the first stored step."""
    parts = [render_counts(metrics)]
    examples = [example for step in ends for example in find_examples(step)]
    rendered = {id(stored) for e in examples for stored in (e.draft, e.correction)}
    criticized = [
        stored
        for step in ends
        for stored in step
        if stored.trajectory.critique
        and id(stored) not in rendered
        and not stored.trajectory.is_pair_copy
    ]
    if examples or criticized:
        caption = "Examples are from the last and the first stored step."
        parts.append(f'<p class="caption">{caption}</p>')
        parts.append(render_legend() if decode is not None else "")
    for kind, title in TITLES.items():
        group = [e for e in examples if e.correction.trajectory.correction == kind]
        cards = "".join(_render_example(example, decode) for example in _first_per_task(group))
        if cards:
            parts.append(f"<h3>{title}</h3>{cards}")
    cards = "".join(_render_criticized(s, decode) for s in first_per_task(criticized, NUM_EXAMPLES))
    if cards:
        parts.append(f"<h3>Criticized drafts</h3>{cards}")
    return "".join(parts)


def find_examples(step: Sequence[StoredTrajectory]) -> list[Example]:
    """Corrections of one step with their drafts; copies for preference pairs are left out."""
    by_id = {stored.trajectory.id: stored for stored in step}
    return [
        Example(draft=by_id[trajectory.draft], correction=stored)
        for stored in step
        if (trajectory := stored.trajectory).draft in by_id and not trajectory.is_pair_copy
    ]


def _first_per_task(examples: Iterable[Example]) -> list[Example]:
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(example.draft.trajectory.task.id, example)
    return list(first.values())[:NUM_EXAMPLES]


# ── counts ───────────────────────────────────────────────────────────────────────────────────────


def render_counts(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Over all steps, with the reasons of what was dropped."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in metrics:
        for name, count in row.items():
            if name.startswith(DRAFTS):
                stage, _, count_name = name.removeprefix(DRAFTS).partition("/")
            elif name.startswith(TAKEOVER) and isinstance(count, int):  # not the pass rate
                stage, count_name = "take-over", name.removeprefix(TAKEOVER)
            else:
                continue
            counts[stage, count_name] += count or 0
    if not counts:
        return ""
    stages = list(dict.fromkeys(stage for stage, _ in counts))
    ordered = sorted(counts.items(), key=lambda item: stages.index(item[0][0]))
    lines = (
        f"<tr><th>{escape(stage)}: {_describe_count(name)}</th><td>{count:,}</td></tr>"
        for (stage, name), count in ordered
    )
    return render_table(["stage: count", f"in {pluralize(len(metrics), 'step')}"], lines)


def _describe_count(name: str) -> str:
    """`dropped: tie`, with what the reason means."""
    kind, _, reason = name.partition("/")
    if not reason:
        return escape(NAMES.get(kind, readable_name(kind)))
    meaning = f" <small>{escape(REASONS[reason])}</small>" if reason in REASONS else ""
    return f"{escape(kind)}: {escape(readable_name(reason))}{meaning}"


# ── cards ────────────────────────────────────────────────────────────────────────────────────────


def _render_example(example: Example, decode: Decode | None) -> str:
    correction = example.correction.trajectory
    assert correction.correction is not None
    labels = LABELS[correction.correction]
    fork, num_tokens = find_fork(correction)
    facts = [f"step {example.correction.step}", f"{correction.correction} of {correction.draft}"]
    if example.correction.teacher is not None:
        facts.append(f"teacher {example.correction.teacher}")
    trunk = ""
    if fork > 1:
        conversation = Conversation(trajectory=correction)
        turns = "".join(conversation.render_turn(number) for number in range(1, fork))
        summary = f"{pluralize(fork - 1, 'turn')} before turn {fork}, shared by both"
        trunk = (
            f'<details class="whole"><summary>{summary}</summary>'
            f'<div class="turns">{turns}</div></details>'
        )
    columns = "".join(
        _render_side(stored, label, fork, num_tokens, decode)
        for stored, label in zip((example.draft, example.correction), labels, strict=True)
    )
    return (
        f'<article class="sample"><header><span>{escape(" · ".join(facts))}</span></header>'
        f'{render_prompt(correction)}{trunk}<div class="pair">{columns}</div></article>'
    )


def find_fork(correction: Trajectory) -> tuple[int, int]:
    """Index of the first turn that differs from the draft's, and how many of its first tokens are
    still the student's."""
    for number, turn in enumerate(correction.turns):
        if turn.role == "assistant" and any(turn.completion_mask):
            is_takeover = correction.correction == "takeover"
            return number, turn.completion_mask.index(True) if is_takeover else 0
    return 1, 0


def _render_side(
    stored: StoredTrajectory, label: str, fork: int, num_tokens: int, decode: Decode | None
) -> str:
    trajectory = stored.trajectory
    is_takeover = label == "take-over"
    facts = escape(" · ".join([label, trajectory.source, *describe_episode(trajectory)]))
    if num_tokens and decode is not None:
        mark = "the teacher takes over" if is_takeover else "the fork"
        body = _render_forked_turn(stored, fork, num_tokens, mark, decode)
    else:
        note = f"after {pluralize(num_tokens, 'token')} of the student" if num_tokens else ""
        mark = f"the teacher takes over {note}".strip() if is_takeover else ""
        body = (f'<p class="fork">{mark}</p>' if mark else "") + _render_turns(stored, fork, decode)
    return (
        f"<div><header>{render_grade(trajectory.grade)}<span>{facts}</span></header>"
        f"{body}{_render_critique(trajectory)}</div>"
    )


def _render_turns(stored: StoredTrajectory, start: int, decode: Decode | None) -> str:
    conversation = Conversation.of(stored, decode)
    numbers = range(start, len(stored.trajectory.turns))
    turns = "".join(conversation.render_turn(number) for number in numbers[:MAX_COLUMN_TURNS])
    num_omitted = len(numbers) - MAX_COLUMN_TURNS
    more = f'<p class="omitted">… {pluralize(num_omitted, "more turn")}</p>'
    return f'<div class="turns">{turns}</div>{more if num_omitted > 0 else ""}'


def _render_forked_turn(
    stored: StoredTrajectory, number: int, num_tokens: int, mark: str, decode: Decode
) -> str:
    """An answer with a mark after its first `num_tokens` tokens."""
    turn = stored.trajectory.turns[number]
    gaps = compute_token_gaps(stored)[number]
    num_before = sum(turn.completion_mask[:num_tokens])
    before, after = _cut_turn(turn, slice(num_tokens), decode), slice(num_tokens, None)
    return (
        f'<div class="text assistant"><span class="given">{render_text(before.text)}</span>'
        f'<span class="fork">{mark}</span>'
        f"{render_turn_text(_cut_turn(turn, after, decode), gaps[num_before:], decode)}</div>"
    )


def _cut_turn(turn: Turn, part: slice, decode: Decode) -> Turn:
    return replace(
        turn,
        text="".join(decode(turn.token_ids)[part]),
        token_ids=turn.token_ids[part],
        completion_mask=turn.completion_mask[part],
        sampler_logp=None,
        num_generation_prompt_tokens=0,
        policy_versions=(),
    )


def _render_critique(trajectory: Trajectory) -> str:
    if not trajectory.critique:
        return ""
    return (
        '<div class="entry hint critique"><b>critique</b>'
        f'<div class="text">{render_text(trajectory.critique)}</div></div>'
    )


def _render_criticized(stored: StoredTrajectory, decode: Decode | None) -> str:
    trajectory = stored.trajectory
    facts = escape(" · ".join([f"step {stored.step}", *describe_episode(trajectory)]))
    return (
        f'<article class="sample"><header>{render_grade(trajectory.grade)}<span>{facts}</span>'
        f'</header>{render_prompt(trajectory)}<div class="pair">'
        f"<div>{_render_turns(stored, 1, decode)}</div>"
        f"<div>{_render_critique(trajectory)}</div></div></article>"
    )
