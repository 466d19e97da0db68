"""The whole recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from courtside.recipe.base import Section
from courtside.recipe.drafts import DraftConfig
from courtside.recipe.evaluate import EvaluateConfig
from courtside.recipe.hints import HintsConfig
from courtside.recipe.losses import Loss
from courtside.recipe.reader import CombinedReaderConfig, HumanReaderConfig, ReaderConfig
from courtside.recipe.rewards import Reward
from courtside.recipe.rollout import RolloutConfig
from courtside.recipe.run import RunConfig
from courtside.recipe.sharding import ShardingConfig
from courtside.recipe.student import StudentConfig
from courtside.recipe.takeover import TakeoverConfig
from courtside.recipe.tasks import TasksConfig, override_tasks
from courtside.recipe.teacher import (
    CustomTeacherConfig,
    RoutedTeacherConfig,
    ScoringTeacherConfig,
    ServerTeacherConfig,
    TeacherConfig,
    choose_route,
)
from courtside.recipe.train import TrainConfig
from courtside.types import Split


class Recipe(Section):
    """All settings of a run."""

    student: StudentConfig
    tasks: TasksConfig
    rollout: RolloutConfig = RolloutConfig()
    drafts: tuple[DraftConfig, ...] = ()
    """Corrections of what the student sampled, in their order."""
    reader: ReaderConfig | None = None
    hints: HintsConfig = HintsConfig()
    teacher: TeacherConfig | None = None
    rewards: tuple[Reward, ...] = ()
    takeover: TakeoverConfig | None = None
    losses: Annotated[tuple[Loss, ...], Field(min_length=1)]
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    run: RunConfig = RunConfig()
    sharding: ShardingConfig = ShardingConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _check_combinations(self) -> Recipe:
        from courtside.recipe.validation import find_problems

        problems = list(find_problems(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def learning_rate(self) -> float:
        return self.train.learning_rate or (1e-4 if self.student.lora else 1e-5)

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then constant, linear or cosine to zero after the last step."""
        train = self.train
        if step < train.warmup_steps:
            return self.learning_rate * (step + 1) / train.warmup_steps
        done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
        factor = {
            "constant": 1.0,
            "linear": 1.0 - done,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        }[train.lr_schedule]
        return self.learning_rate * factor

    def due_evaluations(
        self, num_steps: int, *, is_last: bool
    ) -> list[tuple[tuple[str, ...], Split]]:
        """Policies and tasks that are evaluated after so many steps: test tasks before and after
        training, validation tasks in between; with `tasks.limit` also the prompts that train. Those
        that come together run together."""
        config, due = self.evaluate, list[tuple[tuple[str, ...], Split]]()
        if is_last or (num_steps == 0 and config.before):
            due.append((("student", *(f"student:{suite}" for suite in config.suites)), "test"))
        if due and self.tasks.limit is not None and not self.tasks.is_recorded:
            due.append((("student",), "train"))  # beside the held-out ones: is it memorized?
        if num_steps == 0 and config.teacher and self.teacher is not None:
            due.append((("teacher",), "test"))
        # A budget ends a run at any step; its last one is part of the curve, too.
        is_cut = is_last and num_steps < self.train.steps
        if config.every and (num_steps % config.every == 0 or is_cut):
            due.append((("student",), "validation"))
        return due

    def suite_tasks(self, name: str) -> TasksConfig:
        """The [tasks] section of one of `evaluate.suites`."""
        return override_tasks(self.tasks, self.evaluate.suites[name])

    @property
    def needs_reference(self) -> bool:
        """Whether a loss or reward compares with the student before training."""
        return any(
            loss.kind == "preference"
            or getattr(loss, "extrapolate", 1.0) != 1.0
            or getattr(loss, "against", "teacher") == "reference"
            for loss in self.losses
        ) or any(reward.kind == "reference_kl" for reward in self.rewards)

    @property
    def trains_on_data(self) -> bool:
        """Whether some trajectories are the tasks' own `completion`."""
        return self.rollout.off_policy == "dataset"

    @property
    def makes_pairs(self) -> bool:
        """Whether preference pairs are made from the student's samples."""
        takes_over = self.takeover is not None and self.takeover.pair
        return takes_over or any(config.makes_pairs for config in self.drafts)

    @property
    def teacher_adds_text(self) -> bool:
        """Whether repairs or take-overs are added, whose source is the teacher."""
        return self.takeover is not None or any(c.kind == "rewrite" for c in self.drafts)

    @property
    def scores_with_teacher(self) -> bool:
        """Whether a loss compares with the teacher; else it only writes."""
        return any(loss.needs_teacher for loss in self.losses)

    def loss_names(self) -> tuple[str, ...]:
        return tuple(loss.name or loss.kind for loss in self.losses)

    def route_of(self, tags: Sequence[str]) -> str | None:
        """The route of a task with these tags; None: the teacher has no routes."""
        if not isinstance(self.teacher, RoutedTeacherConfig):
            return None
        return choose_route(tags, self.teacher.routes, self.teacher.default)

    def reward_names(self) -> tuple[str, ...]:
        return tuple(reward.name or reward.kind for reward in self.rewards)

    @property
    def model_teachers(self) -> tuple[ScoringTeacherConfig, ...]:
        """The teachers that are models, here or behind servers, routed or not."""
        if self.teacher is None or isinstance(self.teacher, CustomTeacherConfig):
            return ()
        if isinstance(self.teacher, RoutedTeacherConfig):
            return tuple(self.teacher.routes.values())
        return (self.teacher,)

    @property
    def draft_contexts(self) -> tuple[str, ...]:
        """Kinds of its teachers' contexts that are about a draft, and not known before it."""
        contexts = (teacher.context for teacher in self.model_teachers)
        return tuple(
            context.kind
            for context in contexts
            if context is not None and context.kind not in ("system", "field")
        )

    @property
    def max_staleness(self) -> int:
        """Optimizer steps by which samples may be older than the weights that they train."""
        server = self.rollout.server
        return 0 if server is None else server.max_staleness

    @property
    def server_teachers(self) -> tuple[ServerTeacherConfig, ...]:
        return tuple(t for t in self.model_teachers if isinstance(t, ServerTeacherConfig))

    @property
    def human_readers(self) -> tuple[HumanReaderConfig, ...]:
        """The readers of kind `human`, alone or combined with others."""
        reader = self.reader
        readers = reader.readers if isinstance(reader, CombinedReaderConfig) else (reader,)
        return tuple(r for r in readers if isinstance(r, HumanReaderConfig))
