"""A teacher: an engine, the context that it alone sees, and the weights it speaks with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal, cast

import torch

from courtside.chat.template import ChatTemplate
from courtside.engines.base import (
    Engine,
    InProcessEngine,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Want,
)
from courtside.engines.lm_head import LMHead
from courtside.errors import TaskError
from courtside.recipe import Context
from courtside.teacher.context import choose_contexts, privileged_messages, task_context
from courtside.teacher.hint_scoring import HintedTurns, HintScorer, concat_scores
from courtside.types import Hint, HintOutcome, Sample, Scored, Target, Task, Trajectory, Update


class Teacher:
    def __init__(
        self,
        *,
        name: str,
        engine: Engine,
        renderer: ChatTemplate,
        context: Context | None = None,
        context_length: int,
        overlong: Literal["error", "drop"] = "error",
        want: Want,
        top_k: int = 0,
        hints: HintScorer | None = None,
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
        follow: Callable[[], None] = lambda: None,
    ):
        self.name = name
        self.engine = engine
        self.renderer = renderer
        self.context = context
        self.context_length = context_length
        self.overlong = overlong
        self.want, self.top_k = want, top_k
        """What the losses need of its distributions."""
        self.hints = hints
        """With a reader: it speaks on hinted turns only."""
        self.weights = weights
        """Puts this teacher's weights in place while it speaks (adapter off, moving average)."""
        self.follow = follow
        """Called after every optimiser step: a moving average moves, other teachers stay."""

    def score(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Target]:
        """By trajectory id; one without its context, or too long with it, has no target."""
        texts = choose_contexts(self.context, trajectories)
        requests: dict[str, ScoreRequest] = {}
        extra: dict[str, int] = {}
        for trajectory in trajectories:
            if self.context is not None and texts[trajectory.id] is None:
                continue
            request, num_extra = self._request(trajectory, texts[trajectory.id])
            if not self._fits(trajectory, len(request.token_ids)):
                continue
            requests[trajectory.id], extra[trajectory.id] = request, num_extra
        with self.weights():
            scores = self.engine.score(list(requests.values()), want=self.want, top_k=self.top_k)
            head = self._head()
        return {
            id: Target(
                teacher=self.name,
                context=texts[id],
                logp_T=score.logp_T,
                hidden_TD=score.hidden_TD,
                top_ids_TK=score.top_ids_TK,
                top_logp_TK=score.top_logp_TK,
                head=head,
                num_context_tokens=extra[id],
            )
            for id, score in zip(requests, scores, strict=True)
        }

    def score_hints(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint]
    ) -> tuple[Mapping[str, Target], Mapping[str, tuple[HintOutcome, ...]]]:
        """By trajectory id: what it says of the turns whose hints train, and of every hint."""
        assert self.hints is not None
        with self.weights():
            found = self.hints(trajectories, hints, want=self.want, top_k=self.top_k)
            head = self._head()
        targets = {
            t.id: self._hinted_target(t, found[t.id], head)
            for t in trajectories
            if t.id in found and (found[t.id].spoken or found[t.id].unread)
        }
        return targets, {id: one.hint_outcomes for id, one in found.items()}

    def _head(self) -> LMHead | None:
        """Of the targets, where a loss needs whole distributions. They are looked at in the update,
        when these weights are no longer in place: what of them is in the head is taken along."""
        if self.want != "hidden":
            return None
        head = cast(InProcessEngine, self.engine).head
        return head if self.weights is nullcontext else head.with_current_adapter()

    def _hinted_target(
        self, trajectory: Trajectory, hinted: HintedTurns, head: LMHead | None
    ) -> Target:
        if hinted.unread:
            return self._unread_target(trajectory, hinted, head)
        turns = sorted(hinted.spoken)
        parts = [hinted.spoken[turn].hinted for turn in turns]
        scores = concat_scores(parts)
        return Target(
            teacher=self.name,
            context=_texts(hinted),
            token_indices=_chosen_in(trajectory, turns),
            logp_T=scores.logp_T,
            hidden_TD=scores.hidden_TD,
            top_ids_TK=scores.top_ids_TK,
            top_logp_TK=scores.top_logp_TK,
            head=head,
            num_context_tokens=sum(hinted.spoken[turn].num_tokens for turn in turns),
        )

    def _unread_target(
        self, trajectory: Trajectory, hinted: HintedTurns, head: LMHead | None
    ) -> Target:
        """Everything but what the update will find."""
        indices = _chosen_in(trajectory, [one.turn for one in hinted.unread])
        return Target(
            teacher=self.name,
            context=_texts(hinted),
            token_indices=indices,
            logp_T=torch.full((len(indices),), torch.nan),
            head=head,
            num_context_tokens=sum(len(one.token_ids) for one in hinted.unread),
            branches=hinted.unread,
        )

    def measured(self, scored: Scored, update: Update) -> Scored:
        """With what the update found where it read the branches of this target itself."""
        id, target = scored.trajectory.id, scored.target
        if target is None or id not in update.teacher_logp:
            return scored
        assert self.hints is not None
        student_logp, teacher_logp = update.student_logp[id], update.teacher_logp[id]
        return replace(
            scored,
            target=replace(target, logp_T=torch.tensor(teacher_logp)),
            hints=self.hints.measured(scored, student_logp, teacher_logp),
        )

    def write(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        """Answers of the teacher itself, with what it knows before anything was written."""
        requests = []
        for task, seed in zip(tasks, seeds, strict=True):
            text = task_context(self.context, task) if self.context else None
            messages = privileged_messages(self.context, task, text)
            requests.append(SampleRequest(prompt_ids=self.renderer.prompt_ids(messages), seed=seed))
        with self.weights():
            return self.engine.sample(requests, sampling)

    def _request(self, trajectory: Trajectory, text: str | None) -> tuple[ScoreRequest, int]:
        prompt, *rest = trajectory.turns
        assert prompt.role == "prompt"
        messages = privileged_messages(self.context, trajectory.task, text)
        prompt_ids = self.renderer.prompt_ids(messages)
        ids = prompt_ids + tuple(i for turn in rest for i in turn.token_ids)
        chosen = (False,) * len(prompt_ids) + tuple(c for turn in rest for c in turn.chosen)
        request = ScoreRequest(token_ids=ids, scored=chosen, temperature=trajectory.temperature)
        return request, len(prompt_ids) - len(prompt.token_ids)

    def _fits(self, trajectory: Trajectory, length: int) -> bool:
        if length <= self.context_length:
            return True
        if self.overlong == "drop":
            return False
        raise TaskError(
            f"task {trajectory.task.id}: with its privileged context the sequence has {length} "
            f"tokens and {self.name} takes {self.context_length}. Shorten the context, or set "
            "tasks.overlong_prompts = 'drop' to leave such trajectories out and count them"
        )


def _texts(hinted: HintedTurns) -> str:
    return "\n\n".join(j.hint.text for j in hinted.hint_outcomes if j.dropped is None)


def _chosen_in(trajectory: Trajectory, turns: Sequence[int]) -> tuple[int, ...]:
    """Which of the chosen tokens stand in these turns."""
    return tuple(i for i, turn in enumerate(trajectory.turn_of) if turn in turns)
