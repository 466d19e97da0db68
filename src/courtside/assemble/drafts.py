"""Makes the draft stages: each way with the model, grader and template that it needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.reply_failures import FailureMonitor
from courtside.chat.template import ChatTemplate
from courtside.drafts.base import DraftStage, DraftStages, keep_drafts
from courtside.drafts.choose import Chooser, JudgeRanking, Rank, TeacherRanking, rank_by_reward
from courtside.drafts.criticize import Critic
from courtside.drafts.prompts import find_reference, parse_score, parse_tagged, parse_whole
from courtside.drafts.queries import Client, EndpointClient, Interview, TeacherClient, Writer
from courtside.drafts.rewrite import CheckReply, ReplyCheck, Rewriter
from courtside.engines.base import Sampling
from courtside.environments.base import HostedEnvironment
from courtside.errors import RecipeError
from courtside.progress import ProgressMeter
from courtside.recipe import Recipe
from courtside.recipe.drafts import (
    ChooseConfig,
    CriticizeConfig,
    DraftConfig,
    ModelQuestion,
    NotedQuestion,
    RewriteConfig,
)
from courtside.rollout.off_policy import Grader
from courtside.rollout.replies import replay_with_reply
from courtside.tasks.base import TaskSource
from courtside.teacher.teacher import ScoringTeacher
from courtside.types import Task, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFactory:
    recipe: Recipe
    teacher: ScoringTeacher | None
    template: IncrementalTemplate
    context_length: int
    """The student's."""
    grade: Grader
    environment: HostedEnvironment | None
    progress: ProgressMeter
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """See `DraftStages`."""

    def make_stages(self) -> DraftStage:
        if not self.recipe.drafts:
            return keep_drafts
        configs = enumerate(self.recipe.drafts)
        stages: dict[str, DraftStage] = {c.kind: self._make(c, i) for i, c in configs}
        return DraftStages(stages=stages, together=self.together)

    def _make(self, config: DraftConfig, index: int) -> DraftStage:
        match config:
            case ChooseConfig():
                return Chooser(config=config, rank=self._make_ranking(config, index))
            case RewriteConfig():
                return Rewriter(
                    config=config,
                    ask=self._make_interview(config, index, _choose_parser(config, "answer")),
                    template=self.template,
                    check=self._make_check(),
                    context_length=self.context_length,
                )
            case CriticizeConfig():
                parse = _choose_parser(config, "critique")
                return Critic(config=config, ask=self._make_interview(config, index, parse))

    def _make_ranking(self, config: ChooseConfig, index: int) -> Rank:
        if config.by == "reward":
            return rank_by_reward
        if config.by == "judge":
            return JudgeRanking(ask=self._make_interview(config, index, parse_score), config=config)
        assert self.teacher is not None, "the recipe was checked"
        return TeacherRanking(score=self.teacher.score, config=config)

    def _make_interview(
        self, config: ChooseConfig | RewriteConfig | CriticizeConfig, index: int,
        parse: Callable[[str], T | None],
    ) -> Interview[T]:  # fmt: skip
        return Interview(
            client=self._make_client(config, config.kind, index),
            parse=parse,
            monitor=FailureMonitor(
                name=f"drafts[{index}] ({config.kind})", max_fraction=config.max_failure_fraction
            ),
        )

    def _make_client(self, config: ModelQuestion, kind: str, index: int) -> Client:
        if config.endpoint is not None:
            from courtside.chat.openai_client import OpenAIClient

            return EndpointClient(
                client=OpenAIClient(
                    config.endpoint,
                    field=f"drafts[{index}].endpoint",
                    max_new_tokens=config.max_new_tokens,
                    temperature=config.temperature,
                    shorten=f"shorten the tasks, or lower drafts[{index}].max_new_tokens",
                ),
                progress=self.progress,
            )
        return TeacherClient(
            teacher=cast(Writer, self.teacher),  # the recipe was checked: it is a model
            sampling=Sampling(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
            purpose=kind,
            seed=self.recipe.seed,
            progress=self.progress,
        )

    def _make_check(self) -> CheckReply:
        if self.environment is None:
            return partial(_check_answer, self.grade)
        return partial(_check_in_episode, self.environment)


def _choose_parser(config: NotedQuestion, tag: str) -> Callable[[str], str | None]:
    return parse_whole if config.reply == "whole" else partial(parse_tagged, tag=tag)


def _check_answer(grade: Grader, draft: Trajectory, turn: int, reply: str) -> ReplyCheck:
    return ReplyCheck(grade=grade(draft.task, reply))


def _check_in_episode(
    environment: HostedEnvironment, draft: Trajectory, turn: int, reply: str
) -> ReplyCheck:
    events, grade = replay_with_reply(environment.start, draft, turn, reply)
    return ReplyCheck(events=events, grade=grade)


# ── before any model is loaded ───────────────────────────────────────────────────────────────────


def check_drafts(recipe: Recipe, tasks: TaskSource, template: ChatTemplate) -> None:
    """What the tasks or the template lack is an error now, not at the first step."""
    if not recipe.drafts:
        return
    batch = tasks.batch(0, recipe.train.prompts_per_step)
    for index, config in enumerate(recipe.drafts):
        for task in batch:
            if problem := _find_task_problem(recipe, config, task):
                raise RecipeError(f"drafts[{index}].{problem}")
        if isinstance(config, RewriteConfig):
            # A template that renders the prompt of an answered task differently raises here.
            template.completion_ids(batch[0].messages, "It is.")


def _find_task_problem(recipe: Recipe, config: DraftConfig, task: Task) -> str | None:
    if isinstance(config, ChooseConfig):
        if config.by == "reward" and task.grader is None and not recipe.tasks.is_environment:
            return (
                f"by = 'reward': task {task.id} has no grader. Name one on the tasks, or use by = "
                "'teacher_logp' or 'judge'"
            )
    elif config.kind == "rewrite" and task.messages[-1].role == "assistant":
        return (
            f"kind = 'rewrite': the prompt of task {task.id} ends with the beginning of the answer "
            "(a response prefix), which a repair would repeat. Put it into the last user message"
        )
    elif config.reference is not None and not find_reference(task, config.reference):
        names = ", ".join([*sorted(task.privileged), *(["answer"] if task.answer else [])])
        return (
            f"reference = {config.reference!r}: task {task.id} has no such field (it has: "
            f"{names or 'none'}). Name one of those, or remove it"
        )
    return None
