"""From a recipe to its parts: the only place that picks implementations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from courtside.assemble.empty_updates import check_trained
from courtside.assemble.offline import ids_named_by_hints, make_offline_rollout
from courtside.chat.chat_log_rendering import trajectory_from_chat_log
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.cpu.threads import limit_threads
from courtside.engines.int8 import quantize_linear_layers
from courtside.engines.loading import load_model, load_tokenizer
from courtside.engines.local import LocalEngine
from courtside.engines.precision import resolve_dtype
from courtside.environments.base import Environment
from courtside.environments.loading import make_environment
from courtside.errors import ModelError, RecipeError
from courtside.reader.base import Reader, ReaderOutput
from courtside.reader.loading import make_reader
from courtside.reader.model.student_client import make_student_client
from courtside.recipe import (
    ModelTeacherConfig,
    Recipe,
    RoutedTeacherConfig,
    SelfTeacherConfig,
    tasks_with,
    teachers_of,
)
from courtside.rollout.episodes import EpisodeRollout, reply_passes
from courtside.rollout.mixing import make_sampling
from courtside.rollout.offline import ChatLogRollout, ReplayRollout
from courtside.rollout.single_turn import SingleTurnRollout
from courtside.runtime import Runtime
from courtside.tasks.base import TaskSource
from courtside.tasks.graders import grade
from courtside.tasks.loading import PromptLimit, make_task_source
from courtside.teacher.context import task_context
from courtside.teacher.hint_scoring import HintScorer, HintTrial
from courtside.teacher.routing import RoutedTeachers
from courtside.teacher.stage import TeacherStage
from courtside.teacher.teacher import Teacher
from courtside.training.hint_branches import find_deferral_problem
from courtside.training.memory.checkpointing_auto import (
    FreeBytes,
    choose_gradient_checkpointing,
    free_bytes,
)
from courtside.training.memory.kv_budget import device_bytes, kv_cache_tokens
from courtside.training.student import Student
from courtside.training.weights import MovingAverage, StudentWeights
from courtside.types import Task, Trajectory


def assemble(recipe: Recipe, *, free: FreeBytes = free_bytes) -> Runtime:
    limit_threads()
    weights = StudentWeights(recipe.student, seed=recipe.seed)
    name = recipe.student.model
    tokenizer = load_tokenizer(name, trust_remote_code=recipe.student.trust_remote_code)
    others = _load_teachers(recipe, weights.device)
    vocab_size = _common_words(name, weights.model, tokenizer, others)
    _check_top_k(recipe, vocab_size)
    models, total = [model for model, _ in others.values()], device_bytes(weights.device)
    max_batch_tokens = kv_cache_tokens(recipe, weights, models, total=total)

    def engine_for(model: Any, label: str, autocast: torch.dtype | None) -> LocalEngine:
        return LocalEngine(
            model,
            tokenizer,
            name=label,
            vocab_size=vocab_size,
            autocast=autocast,
            max_batch_tokens=max_batch_tokens,
        )

    engine = engine_for(weights.model, name, weights.autocast)
    renderer = ChatTemplate(tokenizer, name=name, eos_ids=engine.eos_ids)
    student = Student(weights, recipe, vocab_size=vocab_size, pad_id=engine.pad_id)
    recomputed = choose_gradient_checkpointing(student, free, context_length=engine.context_length)
    new = 0 if recipe.tasks.is_recorded else recipe.rollout.max_new_tokens
    room = PromptLimit(
        length=lambda task: _length(task, renderer, new, data=recipe.trains_on_data),
        max_tokens=engine.context_length - new,
    )
    environment = make_environment(recipe.tasks)
    named = ids_named_by_hints(recipe)
    tasks = make_task_source(recipe.tasks, recipe.seed, room, environment, named)
    turns = IncrementalTemplate(renderer)

    averages: dict[str, MovingAverage] = {}
    sizes: dict[str, int] = {}
    notes: list[str] = [] if recomputed is None else [recomputed]
    hidden = any(
        loss.kind == "divergence" or (loss.kind == "policy_gradient" and loss.baseline)
        for loss in recipe.losses
    )

    reason_to_score_first = None
    if recipe.reader is not None:
        with engine.autocast_context():
            reason_to_score_first = (
                find_reason_to_score_first(recipe)
                or student.passes.padding_reason
                or engine.branching_problem
                or find_deferral_problem(engine.model)
            )

    def teacher_of(config: SelfTeacherConfig | ModelTeacherConfig, label: str) -> Teacher:
        spoken = renderer
        lent: Callable[[], AbstractContextManager[None]] = nullcontext
        follow: Callable[[], None] = _stay
        if isinstance(config, ModelTeacherConfig):
            model, own_tokenizer = others[_weights_of(config)]
            its = engine_for(model, config.model, None)
            spoken = ChatTemplate(own_tokenizer, name=config.model, eos_ids=its.eos_ids)
            if own_tokenizer.chat_template != tokenizer.chat_template:
                notes.append(
                    f"{config.model} has another chat template than {name}: each reads the prompt "
                    "in its own, and scores the same answer tokens"
                )
        elif config.weights == "live":
            its = engine
        elif weights.adapter is not None and config.weights == "frozen":
            its, lent = engine, weights.without_adapter
        elif weights.adapter is not None:
            shadow = {n: p.detach().clone() for n, p in weights.trained().items()}
            average = MovingAverage(config.ema_decay, weights.trained(), shadow)
            averages[label] = average
            its, lent, follow = engine, lambda: weights.swap_in(shadow), average.update
        else:
            twin = weights.copy()
            its = engine_for(twin, label, weights.autocast)
            if config.weights == "ema":
                average = MovingAverage(
                    config.ema_decay, weights.trained(), dict(_named(twin, weights))
                )
                averages[label] = average
                follow = average.update
        sizes[label] = its.num_parameters
        return Teacher(
            name=label,
            engine=its,
            renderer=spoken,
            shares_prompts=spoken is renderer,
            context=config.context,
            overlong=recipe.tasks.overlong_prompts,
            want="hidden" if hidden else "logp",
            hints=None
            if recipe.reader is None
            else HintScorer(
                its,
                turns,
                recipe.hints,
                trial=_trial(recipe, environment),
            ),
            defers_hints=recipe.reader is not None and reason_to_score_first is None,
            weights=lent,
            follow=follow,
        )

    teacher: Teacher | RoutedTeachers | None = None
    if isinstance(recipe.teacher, RoutedTeacherConfig):
        routes = {
            tag: teacher_of(t, f"{tag}:{_label(t)}") for tag, t in recipe.teacher.routes.items()
        }
        teacher = RoutedTeachers(routes, recipe.teacher.default)
    elif recipe.teacher is not None:
        teacher = teacher_of(recipe.teacher, _label(recipe.teacher))
    teacher_sizes = dict(sizes)
    reference = None
    if recipe.needs_reference:
        reference = teacher_of(SelfTeacherConfig(kind="self", weights="frozen"), "reference")

    for t in teachers_of(recipe):
        if t.context is not None:
            for task in tasks.batch(0, recipe.train.prompts_per_step):
                task_context(t.context, task)  # a field that the tasks lack is told now
    if tasks.num_dropped:
        notes.append(f"{tasks.num_dropped} prompts do not fit the context and were left out")
    rollout: SingleTurnRollout | EpisodeRollout | ChatLogRollout | ReplayRollout
    if recipe.tasks.is_recorded:
        rollout, said = make_offline_rollout(recipe, tasks, engine, turns)
        notes += said
    elif environment is None:
        rollout = SingleTurnRollout(
            engine=engine,
            renderer=renderer,
            config=recipe.rollout,
            grade=grade,
            teacher_writes=teacher.write if teacher else None,
            seed=recipe.seed,
            pairs=any(loss.kind == "preference" for loss in recipe.losses),
        )
    else:
        rollout = _agent(recipe, environment, engine, turns)
        if turns.note is not None:
            notes.append(turns.note)
    notes += engine.notes()
    if recipe.reader is not None and engine.branching_problem is not None:
        notes.append(f"{name}: each hint takes a pass of its own ({engine.branching_problem})")
    if reason_to_score_first is not None and "self:live" in teacher_sizes:
        notes.append(
            "hints are scored before the update, which takes a second pass over the trajectories "
            f"({reason_to_score_first})"
        )
    return Runtime(
        recipe=recipe,
        tasks=tasks,
        environment=environment,
        suites=_suites(recipe, room),
        rollout=rollout,
        reader=_reader(recipe, engine, renderer),
        check_update=partial(check_trained, recipe),
        teacher=TeacherStage(teacher, reference, hinted=recipe.reader is not None),
        student=student,
        engine=engine,
        renderer=renderer,
        averages=averages,
        teacher_sizes=teacher_sizes,
        notes=tuple(notes),
    )


def find_reason_to_score_first(recipe: Recipe) -> str | None:
    """Why the recipe needs hints scored before the update; None: the update may score them."""
    teacher, hints = recipe.teacher, recipe.hints
    if not isinstance(teacher, SelfTeacherConfig) or teacher.weights != "live":
        return "the teacher is not the live student"
    if hints.min_shift is not None:
        return "hints.min_shift drops some by what they do"
    if hints.resamples:
        return "hints.resamples tries them first"
    if hints.cumulative:
        return "hints.cumulative changes the context of later turns"
    if hints.position == "system":
        return "hints.position = 'system' changes the trajectory from its beginning"
    return None


def _trial(recipe: Recipe, environment: Environment | None) -> HintTrial | None:
    if not recipe.hints.resamples or environment is None:
        return None
    return HintTrial(
        sampling=make_sampling(recipe.rollout),
        passes=partial(reply_passes, environment.start, seconds=recipe.rollout.limits.step_seconds),
        num_replies=recipe.hints.resamples,
        seed=recipe.seed,
    )


def _agent(
    recipe: Recipe, environment: Environment, engine: LocalEngine, turns: IncrementalTemplate
) -> EpisodeRollout:
    expert: Any = getattr(environment, "demonstrate", None)
    if expert is None and recipe.trains_on_data:
        raise RecipeError(
            "rollout.student_fraction < 1 with off_policy_source = 'dataset' needs "
            "demonstrations, and this "
            "environment has no method demonstrate(task). Add one that returns the messages of a "
            "whole episode, or set student_fraction = 1"
        )

    def demonstrate(task: Task, id: str) -> Trajectory:
        messages = expert(task)
        # Something may stand above the first reply that the task itself does not begin with.
        begun = tuple(takewhile(lambda message: message.role != "assistant", messages))
        task = replace(task, messages=begun)
        spoken = [{"role": m.role, "content": m.content} for m in messages]
        return trajectory_from_chat_log(
            task, spoken, turns, id=id, temperature=recipe.rollout.temperature
        )

    return EpisodeRollout(
        engine=engine,
        turns=turns,
        config=recipe.rollout,
        begin=environment.start,
        demonstrate=None if expert is None else demonstrate,
        context_length=engine.context_length,
        seed=recipe.seed,
    )


def _reader(recipe: Recipe, engine: LocalEngine, renderer: ChatTemplate) -> Reader:
    if recipe.reader is None:
        return lambda trajectories: ReaderOutput(hints=(), counts={})
    asking = make_student_client(
        engine, renderer, context_length=engine.context_length, seed=recipe.seed
    )
    return make_reader(recipe.reader, ask_self=asking, seed=recipe.seed)


def _suites(recipe: Recipe, room: PromptLimit) -> dict[str, tuple[TaskSource, Environment | None]]:
    found = {}
    for name, different in recipe.evaluate.suites.items():
        config = tasks_with(recipe.tasks, different)
        world = make_environment(config)
        found[name] = make_task_source(config, recipe.seed, room, world), world
    return found


def _length(task: Task, renderer: ChatTemplate, new: int, *, data: bool) -> int:
    """Tokens of the prompt, and of what a given answer takes beyond `rollout.max_new_tokens`."""
    texts = [text for text in (task.completion, task.rejected) if data and text is not None]
    answers = [len(renderer.completion_ids(task.messages, text)) for text in texts]
    return len(renderer.prompt_ids(task.messages)) + max(0, max(answers, default=0) - new)


def _stay() -> None:
    """A teacher that does not move."""


def _label(teacher: SelfTeacherConfig | ModelTeacherConfig) -> str:
    return f"self:{teacher.weights}" if isinstance(teacher, SelfTeacherConfig) else teacher.model


def _named(twin: Any, weights: StudentWeights) -> dict[str, torch.Tensor]:
    names = weights.trained().keys()
    return {name: p.data for name, p in twin.named_parameters() if name in names}


Weights = tuple[str, Path | None, str]
"""What makes two teachers the same model: its name, adapter and dtype."""


def _weights_of(config: ModelTeacherConfig) -> Weights:
    return config.model, config.adapter, config.dtype


def _load_teachers(recipe: Recipe, device: torch.device) -> dict[Weights, tuple[Any, Any]]:
    """Each model once, however many routes lead to it."""
    loaded: dict[Weights, tuple[Any, Any]] = {}
    for config in teachers_of(recipe):
        if isinstance(config, ModelTeacherConfig) and _weights_of(config) not in loaded:
            loaded[_weights_of(config)] = _load_teacher(config, device)
    return loaded


def _load_teacher(config: ModelTeacherConfig, device: torch.device) -> tuple[Any, Any]:
    model: Any = load_model(
        config.model,
        dtype=resolve_dtype(config.dtype, device),
        device=device,
        adapter=config.adapter,
        trust_remote_code=config.trust_remote_code,
    )
    if config.dtype == "int8":
        model = quantize_linear_layers(model)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    return model.requires_grad_(False), tokenizer


def _common_words(
    name: str, model: Any, tokenizer: Any, others: dict[Weights, tuple[Any, Any]]
) -> int:
    """The vocabulary that all models share. Heads padded to another size are cut to it."""
    vocabulary = tokenizer.get_vocab()
    sizes: dict[str, int] = {name: model.get_output_embeddings().weight.shape[0]}
    for (other, _, _), (teacher, its_tokenizer) in others.items():
        theirs = its_tokenizer.get_vocab()
        if theirs != vocabulary:
            words = sorted(set(vocabulary.items()) ^ set(theirs.items()))
            raise ModelError(
                f"teacher.model = {other!r} has another vocabulary than the student {name!r} "
                f"({len(theirs)} and {len(vocabulary)} words; {len(words)} entries differ, such as "
                f"{words[0][0]!r}). Token ids of one mean nothing to the other: choose a teacher "
                "of the same family"
            )
        sizes[other] = teacher.get_output_embeddings().weight.shape[0]
    smallest = min(sizes.values())
    if max(vocabulary.values()) >= smallest:
        raise ModelError(
            f"the tokenizer of {name!r} has ids up to {max(vocabulary.values())}, but a head has "
            f"only {smallest} rows ({sizes}). The model and its tokenizer do not belong together"
        )
    return smallest


def _check_top_k(recipe: Recipe, vocab_size: int) -> None:
    for index, loss in enumerate(recipe.losses):
        if loss.kind != "divergence" or loss.support.kind != "top_k":
            continue
        if loss.support.k > vocab_size:
            raise RecipeError(
                f"losses[{index}].support.k = {loss.support.k}: the vocabulary has {vocab_size} "
                "words. Use a smaller k (20 to 100 is common), or support = { kind = 'full' }"
            )
