"""Makes rollouts: single turns, episodes of an environment, or recorded trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from courtside.assemble.overlap import RolloutThread
from courtside.assemble.recordings import make_chat_log_rollout, make_document_rollout
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine, Sampling
from courtside.engines.local import LocalEngine
from courtside.engines.mixed_sampling import MixedRequest, MixedSample, MixedSampler
from courtside.environments.base import HostedEnvironment
from courtside.errors import RecipeError
from courtside.evaluate.surprise import surprise
from courtside.progress import ProgressMeter
from courtside.recipe import Recipe
from courtside.recipe.rollout import MixedSamplingConfig
from courtside.recipe.tasks import ConversationTasks
from courtside.rollout.continuations import SamplingTeacher
from courtside.rollout.episodes import EpisodeRollout
from courtside.rollout.mixed_sampling import MixedSamplingRollout
from courtside.rollout.off_policy import (
    CorrectedRollout,
    DatasetCompletions,
    Demonstrations,
    MixedRollout,
    Source,
    StudentRollout,
    TeacherCompletions,
)
from courtside.rollout.offline import ReplayRollout, describe_prompt_difference
from courtside.rollout.single_turn import SingleTurnRollout
from courtside.rollout.teacher_episodes import TeacherEpisodes
from courtside.runtime import Rollout
from courtside.tasks.base import TaskSource
from courtside.tasks.documents import DocumentSource
from courtside.tasks.graders import make_grader
from courtside.tasks.stored_trajectories import ReplaySource
from courtside.teacher.routing import RoutedTeachers
from courtside.teacher.teacher import ScoringTeacher, Teacher

MAX_PROBED = 16
"""Trajectories whose surprise is measured before the first step."""


# ── the student samples ──────────────────────────────────────────────────────────────────────────


def make_single_turn_rollout(
    recipe: Recipe,
    engine: Engine,
    template: ChatTemplate,
    teacher: ScoringTeacher | None,
    *,
    progress: ProgressMeter,
    thread: RolloutThread | None = None,
) -> Rollout:
    """`thread`: where the student samples ahead of the update; None: each step waits for it."""
    config, seed, grade = recipe.rollout, recipe.seed, make_grader(recipe.tasks)
    student = SingleTurnRollout(
        engine=engine if thread is None else thread.engine,
        template=template if thread is None else thread.template.renderer,
        config=config,
        grade=grade,
        seed=seed,
        progress=progress if thread is None else thread.progress,
    )
    if thread is not None:
        return thread.overlap(student.generate, student.grade_answers)
    sampler: StudentRollout = student
    if config.mixed_sampling is not None:
        sampler = make_mixed_sampling(config.mixed_sampling, student, teacher)
    if config.student_fraction == 1.0:
        return sampler
    source: Source
    if config.off_policy_source == "dataset":
        pairs = any(loss.kind == "preference" for loss in recipe.losses)
        source = DatasetCompletions(
            template=template, grade=grade, temperature=config.temperature, pairs=pairs
        )
    else:
        assert teacher is not None, "the recipe was checked"
        source = TeacherCompletions(
            write=teacher.write,
            template=template,
            grade=grade,
            config=config,
            seed=seed,
            progress=progress,
        )
    return MixedRollout(student=sampler, source=source, config=config, seed=seed)


def make_mixed_sampling(
    config: MixedSamplingConfig, student: SingleTurnRollout, teacher: ScoringTeacher | None
) -> MixedSamplingRollout:
    assert isinstance(teacher, (Teacher, RoutedTeachers)), "the recipe was checked"
    members = teacher.routes.values() if isinstance(teacher, RoutedTeachers) else (teacher,)
    for engine in (student.engine, *(member.engine for member in members)):
        if not engine.capabilities.mixed_sampling:
            raise RecipeError(
                f"rollout.mixed_sampling: {engine.name} cannot decode token by token with another "
                "model. Use models in this process, or remove mixed_sampling"
            )
        if config.top_k > engine.capabilities.top_k:
            raise RecipeError(
                f"rollout.mixed_sampling.top_k = {config.top_k:,}: the vocabulary has "
                f"{engine.capabilities.top_k:,} tokens. Use fewer; 20 is common"
            )

    def sample_mixed(
        member: SamplingTeacher, requests: Sequence[MixedRequest], sampling: Sampling
    ) -> list[MixedSample]:
        sampler = MixedSampler(
            student=cast(LocalEngine, student.engine),
            teacher=cast(LocalEngine, member.engine),
            top_k=config.top_k,
            teacher_weights=member.weights,
        )
        return sampler.sample(requests, sampling)

    return MixedSamplingRollout(
        student=student, config=config, choose_teacher=teacher.choose, sample_mixed=sample_mixed
    )


def make_episodes(
    recipe: Recipe,
    environment: HostedEnvironment,
    engine: Engine,
    template: IncrementalTemplate,
    *,
    progress: ProgressMeter,
) -> EpisodeRollout:
    return EpisodeRollout(
        engine=engine,
        template=template,
        config=recipe.rollout,
        start=environment.start,
        context_length=engine.context_length,
        seed=recipe.seed,
        max_turns=find_max_turns(recipe),
        progress=progress,
    )


def make_episode_rollout(
    recipe: Recipe,
    environment: HostedEnvironment,
    engine: Engine,
    template: IncrementalTemplate,
    teacher: ScoringTeacher | None,
    *,
    progress: ProgressMeter,
    thread: RolloutThread | None = None,
) -> tuple[EpisodeRollout, Rollout]:
    """The student's episodes for evaluations, and those of training: with demonstrations, episodes
    of the teacher and corrections as the recipe says. `thread`: as for single turns."""
    config = recipe.rollout
    rollout: Rollout
    rollout = episodes = make_episodes(recipe, environment, engine, template, progress=progress)
    if thread is not None:
        in_thread = make_episodes(
            recipe, environment, thread.engine, thread.template, progress=thread.progress
        )
        rollout = thread.overlap(in_thread.sample, list)
    if recipe.trains_on_data:
        expert = environment.demonstrate
        assert expert is not None, "the inputs were checked"
        source = Demonstrations(expert=expert, template=template, temperature=config.temperature)
        rollout = MixedRollout(student=episodes, source=source, config=config, seed=recipe.seed)
    elif config.off_policy == "teacher":
        assert isinstance(teacher, (Teacher, RoutedTeachers)), "the recipe was checked"
        played = TeacherEpisodes(choose_teacher=teacher.choose, episodes=episodes)
        rollout = MixedRollout(student=episodes, source=played, config=config, seed=recipe.seed)
    if config.corrections:
        rollout = CorrectedRollout(rollout=rollout, template=template)
    return episodes, rollout


def find_max_turns(recipe: Recipe) -> int | None:
    """Of the longest episode, suites included; None: some environment does not tell."""
    suites = [recipe.suite_tasks(name) for name in recipe.evaluate.suites]
    environments = [config for config in (recipe.tasks, *suites) if config.is_environment]
    numbers = [config.max_turns for config in environments]
    return None if None in numbers else max(n for n in numbers if n is not None)


# ── nothing is sampled ───────────────────────────────────────────────────────────────────────────


def make_offline_rollout(
    recipe: Recipe, tasks: TaskSource, engine: LocalEngine, template: IncrementalTemplate
) -> tuple[Rollout, list[str]]:
    """The rollout, and notes for the user."""
    rollout: Rollout
    if isinstance(recipe.tasks, ConversationTasks):
        rollout = make_chat_log_rollout(recipe, template, engine.context_length)
    elif isinstance(tasks, DocumentSource):
        rollout = make_document_rollout(recipe, tasks, template)
    else:
        assert isinstance(tasks, ReplaySource)
        _check_authors(recipe, tasks)
        rollout = ReplayRollout(
            load=tasks.load, template=template, vocab_size=engine.head.vocab_size
        )
    what = f"recorded {recipe.tasks.kind}"
    sample = rollout(tasks.batch(0, min(recipe.train.prompts_per_step, MAX_PROBED)), 0)
    notes = []
    if isinstance(rollout, ReplayRollout):
        what = "stored trajectories"
        if difference := describe_prompt_difference(sample, template):
            notes.append(difference)
    surprise_note = (
        f"the {what} surprise the student by {surprise(sample, engine):.2f} nats a token more than "
        "its own samples would (0: as if it had sampled them itself)"
    )
    return rollout, [surprise_note, *notes]


def _check_authors(recipe: Recipe, tasks: ReplaySource) -> None:
    for index, loss in enumerate(recipe.losses):
        if loss.on in ("student", "teacher", "dataset") and loss.on not in tasks.sources:
            raise RecipeError(
                f"losses[{index}] ({loss.kind}): on = {loss.on!r}, but the stored trajectories "
                f"were written by the {' and the '.join(sorted(tasks.sources))}. Use on = 'all', "
                "or one of those"
            )
