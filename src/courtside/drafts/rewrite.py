"""Rewrite: a teacher or a server repairs a draft; the repair is imitated, preferred or shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from courtside.chat.answer_boundary import PROBE_PROMPT
from courtside.chat.incremental import IncrementalTemplate
from courtside.drafts.base import DraftOutcome, is_draft
from courtside.drafts.prompts import (
    REWRITE,
    find_reference,
    make_prompt,
    show_events,
    show_task,
)
from courtside.drafts.queries import Interview, Query
from courtside.recipe.drafts import RewriteConfig
from courtside.seeds import sample_group
from courtside.types import Event, Grade, Sample, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyCheck:
    """A repaired reply, tried where the draft's was."""

    events: tuple[Event, ...] = ()
    """Errors that the environment reports of it."""
    grade: Grade | None = None
    """Of the answer, or of the episode where it ends with the reply; None: it cannot be graded."""


CheckReply = Callable[[Trajectory, int, str], ReplyCheck]
"""(draft, turn, reply) → what the grader or the environment says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriter:
    config: RewriteConfig
    ask: Interview[str]
    template: IncrementalTemplate
    check: CheckReply
    context_length: int
    """The student's."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> DraftOutcome:
        counts: Counter[str] = Counter()
        turns: dict[str, int] = {}
        for draft in filter(is_draft, trajectories):
            turn = self._find_turn(draft)
            if isinstance(turn, str):
                counts[f"skipped/{turn}"] += 1
            else:
                turns[draft.id] = turn
        drafts = self._within_budget([t for t in trajectories if t.id in turns], counts)
        replies = self.ask([self._make_query(draft, turns[draft.id]) for draft in drafts])
        counts += replies.counts
        counts["repairs"] = 0
        changed: dict[str, Trajectory] = {}
        for draft in drafts:
            if (text := replies.answers.get(draft.id)) is None:
                continue
            repair = self._make_repair(draft, turns[draft.id], text)
            if isinstance(repair, str):
                counts[f"dropped/{repair}"] += 1
                continue
            counts["repairs"] += 1
            changed[repair.id] = repair
            if self.config.pairs:
                worse = make_worse_member(draft, turns[draft.id])
                changed[worse.id] = worse
        result = {t.id: t for t in trajectories} | changed
        return DraftOutcome(
            trajectories=[result[id] for id in sorted(result)], counts=counts, usage=replies.usage
        )

    def _find_turn(self, draft: Trajectory) -> int | str:
        """The turn to repair, or why there is none."""
        turns = draft.hintable_turns
        if self.config.require_better and draft.grade is not None and draft.grade.passed:
            return "passed"
        if not is_episode(draft) or self.config.turn == "last":
            return turns[-1]
        with_event = [i for i in turns if draft.turns[i].events]
        return with_event[0] if with_event else "no_event"

    def _within_budget(
        self, drafts: Sequence[Trajectory], counts: Counter[str]
    ) -> list[Trajectory]:
        """The lowest graded ones of each prompt."""
        limit = self.config.max_per_prompt
        if limit is None:
            return list(drafts)
        groups: dict[str, list[Trajectory]] = {}
        for draft in drafts:
            groups.setdefault(sample_group(draft.id), []).append(draft)
        chosen = [t for group in groups.values() for t in sorted(group, key=_score)[:limit]]
        counts["skipped/budget"] += len(drafts) - len(chosen)
        return chosen

    def _make_query(self, draft: Trajectory, turn: int) -> Query:
        feedback = ""
        if self.config.feedback:
            events = show_events(draft.turns[turn])
            grade = "" if draft.grade is None else draft.grade.feedback
            feedback = "\n".join(filter(None, (events, grade, draft.critique)))
        notes = {
            "A check of the draft said": feedback,
            "For reference": find_reference(draft.task, self.config.reference),
        }
        task = show_task(draft.task, draft.turns[1:turn])
        prompt = make_prompt(self.config.prompt or REWRITE, task, draft.turns[turn].text, notes)
        return Query(draft=draft, prompt=prompt)

    def _make_repair(self, draft: Trajectory, turn: int, text: str) -> Trajectory | str:
        """The repair after the student's own context, or why it is dropped."""
        if text == draft.turns[turn].text.strip():
            return "unchanged"
        messages = draft.task.messages if turn == 1 else (PROBE_PROMPT,)
        ids = self.template.renderer.completion_ids(messages, text)
        context = tuple(t.as_context() for t in draft.turns[:turn])
        if sum(len(t.token_ids) for t in context) + len(ids) > self.context_length:
            return "too_long_for_student"
        grade = None
        if self.config.require_better:
            check = self.check(draft, turn, text)
            grade = check.grade
            if check.events:
                return "not_passing"
            if grade and draft.grade and grade.score <= draft.grade.score:
                return "no_better"
        reply = Sample(token_ids=ids, logp=(), stop="eos", text=text)
        return replace(
            draft,
            id=f"{draft.id}+rewrite",
            turns=(*context, self.template.assistant_turn(reply)),
            source="teacher",
            policy_version=None,
            stop="eos",
            grade=grade,
            preference="better" if self.config.pairs else None,
            pair=name_pair(draft) if self.config.pairs else None,
            draft=draft.id,
            correction="rewrite",
            critique=None,
        )


def make_worse_member(draft: Trajectory, turn: int) -> Trajectory:
    """The draft in a pair with its repair: itself, or of several turns the repaired one alone, as
    its pair must differ in that turn only."""
    if draft.hintable_turns == (turn,) and turn == len(draft.turns) - 1:
        return replace(draft, preference="worse", pair=name_pair(draft))
    context = tuple(t.as_context() for t in draft.turns[:turn])
    return replace(
        draft,
        id=f"{draft.id}+draft",
        turns=(*context, draft.turns[turn]),
        grade=None,
        preference="worse",
        pair=name_pair(draft),
        draft=draft.id,
        correction="rewrite",
    )


def name_pair(draft: Trajectory) -> str:
    return f"{draft.id}+rewrite"


def is_episode(trajectory: Trajectory) -> bool:
    """Whether an environment answered, or reported events."""
    turns: Iterable[Turn] = trajectory.turns[1:]
    return len(trajectory.turns) > 2 or any(turn.events for turn in turns)


def _score(trajectory: Trajectory) -> float:
    return 0.0 if trajectory.grade is None else trajectory.grade.score
