"""From a recipe to its parts: the only place that picks implementations."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from courtside.assemble.drafts import DraftFactory
from courtside.assemble.inputs import load_inputs
from courtside.assemble.models import load_models, load_untrained_student, make_student
from courtside.assemble.overlap import RolloutThread, make_rollout_thread
from courtside.assemble.rollouts import (
    make_episode_rollout,
    make_episodes,
    make_offline_rollout,
    make_single_turn_rollout,
)
from courtside.assemble.routing import check_routing
from courtside.assemble.servers import connect_servers, make_served_student
from courtside.assemble.sharded import note_idle_ranks, refuse_sharded
from courtside.assemble.takeovers import make_takeover
from courtside.assemble.teachers import (
    Serve,
    TeacherFactory,
    find_reason_to_score_first,
    make_hint_trial,
)
from courtside.engines.base import Engine
from courtside.engines.compatibility import describe_new_versions
from courtside.engines.cpu.threads import choose_threads
from courtside.engines.local import LocalEngine
from courtside.errors import RecipeError
from courtside.evaluate.evaluator import Evaluator, TaskSuite
from courtside.progress import ProgressMeter
from courtside.ranks import ALONE, Ranks
from courtside.reader.base import Reader, propose_no_hints
from courtside.reader.loading import make_reader
from courtside.reader.model.client import StudentClient
from courtside.recipe import Recipe
from courtside.recipe.reader import CombinedReaderConfig, ModelReaderConfig
from courtside.rollout.episodes import EpisodeRollout
from courtside.rollout.rewarded import RewardedRollout
from courtside.rollout.shares import SharedRollout
from courtside.runtime import Rollout, Runtime
from courtside.tasks.graders import make_grader


def in_process(engine: LocalEngine) -> Engine:
    return engine


def nothing_ahead() -> None:
    """Closes no rollout: each step has waited for its own."""


def assemble(
    recipe: Recipe,
    *,
    trains: bool = False,
    serve: Serve = in_process,
    num_threads: int | None = None,
    ranks: Ranks = ALONE,
) -> Runtime:
    """`trains`: whether hints must be able to train, which an evaluation does not need. `serve`
    may put another engine in the place of those that sample and of model teachers. `num_threads`:
    how many a resumed run had. `ranks`: the processes that train it together."""
    if ranks.is_sharded:
        refuse_sharded(recipe, ranks)
    thread_note = choose_threads(num_threads)
    notes = [] if thread_note is None else [thread_note]
    notes += describe_new_versions()

    inputs = load_inputs(recipe, trains=trains)
    notes += inputs.notes
    tasks, environment = inputs.tasks, inputs.environment
    template, incremental = inputs.template, inputs.incremental

    servers = connect_servers(recipe, inputs)
    progress = ProgressMeter(replicas=servers.replicas)
    models = load_models(recipe, inputs.tokenizer, progress, ranks)
    local = models.make_student_engine(models.weights, models.name)
    engine: Engine
    thread: RolloutThread | None = None
    if servers.rollout is None:
        engine = serve(local)
    else:
        engine = served = make_served_student(recipe, inputs, servers.rollout, models, local)
        if trains and recipe.max_staleness:
            thread = make_rollout_thread(recipe, inputs, served, progress=progress, ranks=ranks)
    if not engine.capabilities.weight_updates:
        raise RecipeError(
            f"rollout: {engine.name} cannot load new weights, so its samples would not be the "
            "student's after the first step. Use an engine with weight updates"
        )
    student = make_student(recipe, models, ranks, pad_id=local.pad_id, progress=progress)

    check_routing(recipe, local, student)
    score_first_reason = None
    if recipe.reader is not None:
        score_first_reason = find_reason_to_score_first(
            recipe, student, local, is_sharded=ranks.is_sharded
        )
    teachers = TeacherFactory(
        recipe=recipe,
        models=models,
        servers=servers,
        local=local,
        serve=serve,
        template=incremental,
        trial=make_hint_trial(recipe, environment),
        defers_hints=recipe.reader is not None and score_first_reason is None,
    )
    teacher = teachers.make_stage()
    notes += teachers.notes

    rollout: Rollout
    episodes: EpisodeRollout | None = None
    if recipe.tasks.is_recorded:
        rollout, offline_notes = make_offline_rollout(recipe, tasks, local, incremental)
        notes += offline_notes
    elif environment is None:
        rollout = make_single_turn_rollout(
            recipe, engine, template, teacher.teacher, progress=progress, thread=thread
        )
    else:
        episodes, rollout = make_episode_rollout(
            recipe, environment, engine, incremental, teacher.teacher, progress=progress,
            thread=thread,
        )  # fmt: skip
        notes += [] if incremental.note is None else [incremental.note]
    if recipe.takeover is not None:
        teacher.take_over = make_takeover(
            recipe, recipe.takeover, teacher=teacher.teacher, episodes=episodes,
            template=incremental, engine=engine, progress=progress,
        )  # fmt: skip
    if inputs.rewards:
        rollout = RewardedRollout(rollout=rollout, rewards=inputs.rewards)
    if ranks.is_sharded:
        config = recipe.rollout
        asks_teacher = config.off_policy == "teacher" or config.mixed_sampling is not None
        together = models.together if asks_teacher else nullcontext
        rollout = SharedRollout(rollout=rollout, ranks=ranks, together=together)
        idle_note = note_idle_ranks(recipe, ranks)
        notes += [] if idle_note is None else [idle_note]
    worlds = [s.environment for s in inputs.suites.values() if s.environment is not None]
    if episodes is None and worlds:
        episodes = make_episodes(recipe, worlds[0], engine, incremental, progress=progress)
    if tasks.num_dropped:
        notes.append(f"{tasks.num_dropped} prompts do not fit the context and were left out")
    notes += engine.notes()
    if recipe.reader is not None and local.separate_branches_reason is not None:
        reason = local.separate_branches_reason
        notes.append(f"{local.name}: each hint takes a pass of its own ({reason})")
    if score_first_reason is not None and "self:live" in teachers.sizes:
        notes.append(
            "hints are scored before the update, which takes a second pass over the trajectories "
            f"({score_first_reason})"
        )
    drafts = DraftFactory(
        recipe=recipe,
        teacher=teacher.teacher,
        template=incremental,
        context_length=engine.context_length,
        grade=make_grader(recipe.tasks),
        environment=environment,
        progress=progress,
        together=models.together,
    )
    reader: Reader = propose_no_hints
    if recipe.reader is not None:
        ask_self = partial(StudentClient, engine=engine, template=template, seed=recipe.seed)
        reader = make_reader(
            recipe.reader,
            ask_self=ask_self,
            seed=recipe.seed,
            contrast=recipe.hints.contrast,
            ranks=ranks,
        )
    return Runtime(
        recipe=recipe,
        tasks=tasks,
        rollout=rollout,
        drafts=drafts.make_stages(),
        reader=reader,
        teacher=teacher,
        student=student,
        engine=engine,
        evaluator=Evaluator(
            recipe,
            tasks=TaskSuite(tasks, environment, make_grader(recipe.tasks)),
            suites=inputs.suites,
            engine=engine,
            renderer=template,
            teacher=teacher.teacher,
            run_episodes=None if episodes is None else episodes.run_episodes,
            progress=progress,
            ranks=ranks,
            together=models.together,
        ),
        ranks=ranks,
        progress=progress,
        renderer=template,
        local_engine=local,
        load_untrained=partial(load_untrained_student, recipe, models),
        averages=teachers.averages,
        teacher_sizes=teachers.sizes,
        reader_is_student=_student_reads(recipe),
        close_rollouts=nothing_ahead if thread is None else thread.close,
        notes=tuple(notes),
    )


def _student_reads(recipe: Recipe) -> bool:
    reader = recipe.reader
    readers = reader.readers if isinstance(reader, CombinedReaderConfig) else [reader]
    return any(isinstance(r, ModelReaderConfig) and r.endpoint is None for r in readers)
