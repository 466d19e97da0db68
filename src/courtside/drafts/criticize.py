"""Criticize: a teacher or a server writes about a draft, for the teacher's context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from courtside.drafts.base import DraftOutcome, is_draft
from courtside.drafts.prompts import (
    CRITICIZE,
    find_reference,
    make_prompt,
    show_draft,
    show_events,
    show_task,
)
from courtside.drafts.queries import Interview, Query
from courtside.recipe.drafts import CriticizeConfig
from courtside.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    config: CriticizeConfig
    ask: Interview[str]

    def __call__(self, trajectories: Sequence[Trajectory]) -> DraftOutcome:
        counts: Counter[str] = Counter()
        drafts: list[Trajectory] = []
        for draft in filter(is_draft, trajectories):
            if self.config.skip_passed and draft.grade is not None and draft.grade.passed:
                counts["skipped/passed"] += 1
            else:
                drafts.append(draft)
        replies = self.ask([self._make_query(draft) for draft in drafts])
        counts += replies.counts
        critiques: dict[str, str] = {}
        for id, text in replies.answers.items():
            if len(text) > self.config.max_chars:
                counts["dropped/long_critique"] += 1
            else:
                critiques[id] = text
        counts["critiques"] = len(critiques)
        return DraftOutcome(
            trajectories=[
                replace(t, critique=critiques[t.id]) if t.id in critiques else t
                for t in trajectories
            ],
            counts=counts,
            usage=replies.usage,
        )

    def _make_query(self, draft: Trajectory) -> Query:
        feedback = ""
        if self.config.feedback:
            events = "\n".join(filter(None, map(show_events, draft.turns)))
            grade = "" if draft.grade is None else draft.grade.feedback
            feedback = "\n".join(filter(None, (events, grade)))
        notes = {
            "A check of the draft said": feedback,
            "For reference": find_reference(draft.task, self.config.reference),
        }
        template = self.config.prompt or CRITICIZE
        prompt = make_prompt(template, show_task(draft.task), show_draft(draft), notes)
        return Query(draft=draft, prompt=prompt)
