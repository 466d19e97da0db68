"""The teacher stage of the loop: trajectories in, scored trajectories out.

A teacher is an engine, its privileged context, and the weights it scores with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from courtside.chat.privileged_context import (
    choose_contexts,
    insert_context_text,
    task_context,
)
from courtside.chat.template import ChatTemplate
from courtside.engines.base import (
    Engine,
    InProcessEngine,
    PromptSize,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    Want,
)
from courtside.engines.lm_head import LMHead
from courtside.errors import TaskError
from courtside.recipe.context import Context
from courtside.teacher.hint_scoring import HintScorer
from courtside.types import (
    DeferredTarget,
    Hint,
    HintOutcome,
    Sample,
    Scored,
    TakeoverOutcome,
    Target,
    Task,
    Trajectory,
)


class ScoringTeacher(Protocol):
    name: str

    def score(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Target]:
        """By trajectory id; one without a target is left out."""

    def score_hints(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint]
    ) -> Mapping[str, Scored]:
        """By trajectory id; those without a hint are left out."""

    def write(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        """Samples of the teacher itself."""


TakeOver = Callable[
    [Sequence[Trajectory], Sequence[Hint]], tuple[list[Trajectory], Mapping[str, TakeoverOutcome]]
]
"""Drafts to what the teacher made of them, and the outcome of each selected draft by its id."""


@dataclass
class TeacherStage:
    teacher: ScoringTeacher | None
    reference: ScoringTeacher | None
    """The student before training, where a loss compares with it."""
    scores: bool = True
    """Whether a loss compares with the teacher; else it only writes."""
    hinted: bool = False
    """With a reader, only hinted turns and take-overs get targets."""
    take_over: TakeOver | None = None
    """Lets the teacher play on from the student's drafts before it scores; None: it only scores."""
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around all that teachers do in a step, where their weights are in shards over the ranks."""

    def __call__(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint] = ()
    ) -> list[Scored]:
        with self.together():
            return self._take_over_and_score(trajectories, hints)

    def _take_over_and_score(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint]
    ) -> list[Scored]:
        if self.take_over is None:
            return self.score(trajectories, hints)
        takeovers, outcomes = self.take_over(trajectories, hints)
        scored = self.score(sorted([*trajectories, *takeovers], key=lambda t: t.id), hints)
        return [replace(s, takeover=outcomes.get(s.trajectory.id)) for s in scored]

    def score(self, trajectories: Sequence[Trajectory], hints: Sequence[Hint] = ()) -> list[Scored]:
        scored = {t.id: Scored(trajectory=t, target=None) for t in trajectories}
        if self.teacher and self.scores:
            # Copies in pairs compare with the reference alone.
            whole = [t for t in trajectories if not t.is_pair_copy]
            if self.hinted:
                drafts = [t for t in whole if t.correction != "takeover"]
                scored |= self.teacher.score_hints(drafts, hints)
                whole = [t for t in whole if t.correction == "takeover"]
            for id, target in self.teacher.score(whole).items() if whole else ():
                scored[id] = replace(scored[id], target=target)
        if self.reference:
            for id, target in self.reference.score(trajectories).items():
                scored[id] = replace(scored[id], reference=target)
        return list(scored.values())


@dataclass(kw_only=True)
class Teacher:
    name: str
    engine: Engine
    renderer: ChatTemplate
    shares_prompts: bool = False
    """Whether its template renders prompts as the student's does."""
    context: Context | None = None
    overlong: Literal["error", "drop"] = "error"
    want: Want
    top_k: int = 0
    """What the losses need of its distributions."""
    likely_ids: Callable[[Sequence[Trajectory]], Mapping[str, Tensor]] | None = None
    """By trajectory id: tokens [T, K] of the student whose log-probs the losses need, too."""
    hints: HintScorer | None = None
    """With a reader: only hinted turns get targets."""
    defers_hints: bool = False
    """Whether the update scores the hints, as this teacher is the live student."""
    weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Puts this teacher's weights in place (adapter off, moving average)."""

    def score(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Target]:
        """By trajectory id; one without its context, or too long with it, has no target."""
        texts = choose_contexts(self.context, trajectories) if self.context else {}
        requests: dict[str, ScoreRequest] = {}
        for trajectory in trajectories:
            text = texts.get(trajectory.id)
            if self.context is not None and text is None:
                continue
            request = self._request(trajectory, text)
            if self._fits(trajectory, len(request.token_ids)):
                requests[trajectory.id] = request
        likely = self._find_likely_ids([t for t in trajectories if t.id in requests])
        for id, ids_TK in likely.items():
            given_ids = tuple(map(tuple, ids_TK.tolist()))
            requests[id] = replace(requests[id], given_ids=given_ids)
        with self.weights():
            scores = self.engine.score(list(requests.values()), want=self.want, top_k=self.top_k)
            head = self._head()
        plain = {
            t.id: ScoreRequest(token_ids=t.token_ids, scored=t.completion_mask)
            for t in trajectories
        }
        return {
            id: self._target(
                _append_given(score, likely.get(id)),
                head,
                context=texts.get(id),
                num_tokens=len(requests[id].token_ids) - len(plain[id].token_ids),
            )
            for id, score in zip(requests, scores, strict=True)
        }

    def score_hints(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint]
    ) -> Mapping[str, Scored]:
        assert self.hints is not None
        if self.defers_hints:
            return self._defer(trajectories, hints, self.hints)
        with self.weights():
            results = self.hints.score(trajectories, hints, want=self.want, top_k=self.top_k)
            head = self._head()
        scored = {}
        for trajectory in trajectories:
            if (result := results.get(trajectory.id)) is None:
                continue
            s = Scored(trajectory=trajectory, hints=result.outcomes, target=None)
            if result.scores is not None:
                indices = _indices_of_turns(trajectory, result.turns)
                target = self._target(
                    result.scores, head, context=s.hint_context,
                    num_tokens=result.num_tokens, token_indices=indices,
                )  # fmt: skip
                if (wrong := result.wrong_scores) is not None:
                    target = replace(
                        target, wrong_logp_T=wrong.logp_T, wrong_hidden_TD=wrong.hidden_TD
                    )
                s = replace(s, target=target)
            scored[trajectory.id] = s
        return scored

    def write(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        """Samples of the teacher itself, with the context that is known before any answer."""
        requests = [
            SampleRequest(prompt_ids=self.prompt_ids(task), seed=seed)
            for task, seed in zip(tasks, seeds, strict=True)
        ]
        with self.weights():
            return self.engine.sample(requests, sampling) if requests else []

    def measure_prompt(self, task: Task) -> PromptSize:
        """Of what `write` samples after."""
        return PromptSize(
            model=self.name,
            num_tokens=len(self.prompt_ids(task)),
            context_length=self.engine.context_length,
        )

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """The prompt of this teacher, with the context that is known before any answer."""
        messages = task.messages
        if self.context and (text := task_context(self.context, task)) is not None:
            messages = insert_context_text(self.context, task, text)
        return self.renderer.prompt_ids(messages)

    def choose(self, task: Task) -> Teacher:
        """The teacher of a task: this one, of all."""
        return self

    def _defer(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint], scorer: HintScorer
    ) -> dict[str, Scored]:
        spliced = scorer.splice(trajectories, hints)
        results = {}
        for trajectory in trajectories:
            if trajectory.id not in spliced:
                continue
            inserted = spliced[trajectory.id].branches
            waiting = [HintOutcome(hint=hint, shift=None) for hint, _ in inserted.values()]
            outcomes = (*spliced[trajectory.id].dropped, *waiting)
            outcomes = tuple(sorted(outcomes, key=lambda outcome: outcome.hint.turn))
            # A turn without a completion token trains nothing, and the update may end before it.
            branches = tuple(branch for _, branch in inserted.values() if any(branch.scored))
            turns = [branch.turn for branch in branches]
            deferred = DeferredTarget(
                teacher=self.name,
                branches=branches,
                token_indices=_indices_of_turns(trajectory, turns),
                bad_tokens={t: scorer.bad_tokens(trajectory, inserted[t][0]) for t in turns},
                num_context_tokens=sum(len(branch.token_ids) for branch in branches),
                needs_hidden=self.want == "hidden",
            )
            results[trajectory.id] = Scored(
                trajectory=trajectory,
                target=None,
                deferred=deferred if branches else None,
                hints=outcomes,
            )
        return results

    def _find_likely_ids(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Tensor]:
        return {} if self.likely_ids is None else self.likely_ids(trajectories)

    def _head(self) -> LMHead | None:
        """For the logits of the targets, which the update computes: by then these weights are no
        longer in place, so the head keeps its adapter of this moment."""
        if self.want != "hidden":
            return None
        head = cast(InProcessEngine, self.engine).head
        return head if self.weights is nullcontext else head.with_current_adapter()

    def _target(
        self,
        scores: Scores,
        head: LMHead | None,
        *,
        context: str | None,
        num_tokens: int,
        token_indices: tuple[int, ...] | None = None,
    ) -> Target:
        return Target(
            teacher=self.name,
            context=context,
            logp_T=scores.logp_T,
            hidden_TD=scores.hidden_TD,
            head=head,
            top_ids_TK=scores.top_ids_TK,
            top_logp_TK=scores.top_logp_TK,
            num_student_ids=0 if scores.given_logp_TK is None else scores.given_logp_TK.shape[-1],
            num_context_tokens=num_tokens,
            token_indices=token_indices,
        )

    def _request(self, trajectory: Trajectory, text: str | None) -> ScoreRequest:
        prompt, *turns = trajectory.turns
        assert prompt.role == "prompt"
        prompt_ids = prompt.token_ids
        if self.context and text is not None:
            messages = insert_context_text(self.context, trajectory.task, text)
            prompt_ids = self.renderer.prompt_ids(messages)
        elif not self.shares_prompts:
            prompt_ids = self.renderer.prompt_ids(trajectory.task.messages)
        return ScoreRequest(
            token_ids=prompt_ids + tuple(i for turn in turns for i in turn.token_ids),
            scored=(False,) * len(prompt_ids)
            + tuple(c for turn in turns for c in turn.completion_mask),
            temperature=trajectory.temperature,
        )

    def _fits(self, trajectory: Trajectory, length: int) -> bool:
        if length <= self.engine.context_length:
            return True
        if self.overlong == "drop":
            return False
        raise TaskError(
            f"task {trajectory.task.id}: with its privileged context the sequence has {length} "
            f"tokens and {self.name} takes {self.engine.context_length}. Shorten the context, or "
            "set tasks.overlong_prompts = 'drop' to leave such trajectories out and count them"
        )


def _append_given(scores: Scores, ids_TK: Tensor | None) -> Scores:
    """The teacher's tokens, then the given ones, which are the student's."""
    if ids_TK is None or scores.given_logp_TK is None:
        return scores
    ids_TK = ids_TK.to(scores.given_logp_TK.device)
    ids = [ids_TK] if scores.top_ids_TK is None else [scores.top_ids_TK, ids_TK]
    logps = [t for t in (scores.top_logp_TK, scores.given_logp_TK) if t is not None]
    return replace(scores, top_ids_TK=torch.cat(ids, dim=-1), top_logp_TK=torch.cat(logps, dim=-1))


def _indices_of_turns(trajectory: Trajectory, turns: Sequence[int]) -> tuple[int, ...]:
    """Which of the completion tokens are in these turns."""
    return tuple(i for i, turn in enumerate(trajectory.turn_of) if turn in turns)
