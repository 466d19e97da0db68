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

from courtside.assemble.offline import named_by_hints, recorded_rollout
from courtside.chat.chat_logs import recorded
from courtside.chat.incremental import Turns
from courtside.chat.template import Renderer
from courtside.engines.cpu.malloc import keep_freed_memory
from courtside.engines.cpu.threads import bound_threads
from courtside.engines.int8 import quantise
from courtside.engines.loading import load_model, load_tokenizer
from courtside.engines.local import TransformersEngine
from courtside.engines.precision import arithmetic
from courtside.environments.base import Environment
from courtside.environments.loading import environment_of
from courtside.errors import ModelError, RecipeError
from courtside.reader.base import Reader, Reading
from courtside.reader.loading import reader_for
from courtside.reader.model.student_client import own_ask
from courtside.recipe import (
    ModelTeacher,
    Recipe,
    RoutedTeacher,
    SelfTeacher,
    tasks_with,
    teachers_of,
)
from courtside.rollout.chat_logs import RecordedRollout
from courtside.rollout.episodes import AgentRollout, goes_well
from courtside.rollout.mixing import sampling_of
from courtside.rollout.replay import StoredRollout
from courtside.rollout.single_turn import SingleTurnRollout
from courtside.runtime import Parts
from courtside.tasks.base import TaskSource
from courtside.tasks.graders import grade
from courtside.tasks.loading import Room, task_source
from courtside.teacher.context import task_context
from courtside.teacher.hint_scoring import HintScorer, Trial
from courtside.teacher.routing import RoutedTeachers
from courtside.teacher.stage import Scoring
from courtside.teacher.teacher import Teacher
from courtside.training.hint_branches import why_before
from courtside.training.memory.checkpointing_auto import FreeBytes, choose_activations, free_bytes
from courtside.training.memory.kv_budget import batch_tokens, device_bytes
from courtside.training.student import Student
from courtside.training.weights import MovingAverage, StudentWeights
from courtside.types import Task, Trajectory


def assemble(recipe: Recipe, *, free: FreeBytes = free_bytes) -> Parts:
    bound_threads()
    keep_freed_memory()
    weights = StudentWeights(recipe.student, seed=recipe.seed)
    name = recipe.student.model
    tokenizer = load_tokenizer(name, trust_remote_code=recipe.student.trust_remote_code)
    others = _load_teachers(recipe, weights.device)
    num_words = _common_words(name, weights.model, tokenizer, others)
    _check_top_k(recipe, num_words)
    models, total = [model for model, _ in others.values()], device_bytes(weights.device)
    max_batch_tokens = batch_tokens(recipe, weights, models, total=total)

    def engine_for(model: Any, label: str, autocast: torch.dtype | None) -> TransformersEngine:
        return TransformersEngine(
            model,
            tokenizer,
            name=label,
            num_words=num_words,
            autocast=autocast,
            max_batch_tokens=max_batch_tokens,
        )

    engine = engine_for(weights.model, name, weights.autocast)
    renderer = Renderer(tokenizer, name=name, eos_ids=engine.eos_ids)
    student = Student(weights, engine.head, recipe, pad_id=engine.pad_id)
    recomputed = choose_activations(student, free, context_length=engine.context_length)
    new = 0 if recipe.tasks.is_recorded else recipe.rollout.max_new_tokens
    room = Room(
        length=lambda task: _length(task, renderer, new, data=recipe.trains_on_data),
        max_tokens=engine.context_length - new,
    )
    environment = environment_of(recipe.tasks)
    named = named_by_hints(recipe)
    tasks = task_source(recipe.tasks, recipe.seed, room, environment, named)
    turns = Turns(renderer)

    averages: dict[str, MovingAverage] = {}
    sizes: dict[str, int] = {}
    notes: list[str] = [] if recomputed is None else [recomputed]
    hidden = any(
        loss.kind == "divergence" or (loss.kind == "policy_gradient" and loss.baseline)
        for loss in recipe.losses
    )

    scored_before = None
    if recipe.reader is not None:
        with engine.casting():
            problem = student.passes.problem or engine.branching_problem
            scored_before = why_before(recipe, engine.model, problem)

    def teacher_of(config: SelfTeacher | ModelTeacher, label: str) -> Teacher:
        spoken = renderer
        lent: Callable[[], AbstractContextManager[None]] = nullcontext
        follow: Callable[[], None] = _stay
        if isinstance(config, ModelTeacher):
            model, own_tokenizer = others[_weights_of(config)]
            its = engine_for(model, config.model, None)
            spoken = Renderer(own_tokenizer, name=config.model, eos_ids=its.eos_ids)
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
            its, lent, follow = engine, lambda: weights.lent(shadow), average.update
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
            context=config.context,
            context_length=its.context_length,
            overlong=recipe.tasks.overlong,
            hidden=hidden,
            hints=None
            if recipe.reader is None
            else HintScorer(
                its,
                turns,
                recipe.hints,
                context_length=its.context_length,
                trial=_trial(recipe, environment),
                in_update=scored_before is None,
            ),
            weights=lent,
            follow=follow,
        )

    teacher: Teacher | RoutedTeachers | None = None
    if isinstance(recipe.teacher, RoutedTeacher):
        routes = {
            tag: teacher_of(t, f"{tag}:{_label(t)}") for tag, t in recipe.teacher.routes.items()
        }
        teacher = RoutedTeachers(routes, recipe.teacher.default)
    elif recipe.teacher is not None:
        teacher = teacher_of(recipe.teacher, _label(recipe.teacher))
    teacher_sizes = dict(sizes)
    reference = None
    if recipe.needs_reference:
        reference = teacher_of(SelfTeacher(kind="self", weights="frozen"), "reference")

    for t in teachers_of(recipe):
        if t.context is not None:
            for task in tasks.batch(0, recipe.train.prompts):
                task_context(t.context, task)  # a field that the tasks lack is told now
    if tasks.num_dropped:
        notes.append(f"{tasks.num_dropped} prompts do not fit the context and were left out")
    rollout: SingleTurnRollout | AgentRollout | RecordedRollout | StoredRollout
    if recipe.tasks.is_recorded:
        rollout, said = recorded_rollout(recipe, tasks, engine, turns)
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
    if engine.passes.problem is not None:
        notes.append(f"{name}: passes are padded ({engine.passes.problem})")
    elif engine.passes.unshared is not None:
        notes.append(f"{name}: every sample reads its own prompt ({engine.passes.unshared})")
    if engine.device.type == "cuda" and not engine.in_slots:
        notes.append(f"{name}: samples token by token, without a graph ({engine.rereads})")
    if recipe.reader is not None and engine.branching_problem is not None:
        notes.append(f"{name}: each hint takes a pass of its own ({engine.branching_problem})")
    if scored_before is not None and "self:live" in teacher_sizes:
        notes.append(
            f"hints are scored before the update, which reads trajectories again ({scored_before})"
        )
    return Parts(
        recipe=recipe,
        tasks=tasks,
        environment=environment,
        suites=_suites(recipe, room),
        rollout=rollout,
        reader=_reader(recipe, engine, renderer),
        teacher=Scoring(teacher, reference, hinted=recipe.reader is not None),
        student=student,
        engine=engine,
        renderer=renderer,
        averages=averages,
        teacher_sizes=teacher_sizes,
        notes=tuple(notes),
    )


def _trial(recipe: Recipe, environment: Environment | None) -> Trial | None:
    if not recipe.hints.resamples or environment is None:
        return None
    return Trial(
        sampling=sampling_of(recipe.rollout),
        passes=partial(goes_well, environment.start, seconds=recipe.rollout.limits.step_seconds),
        seed=recipe.seed,
    )


def _agent(
    recipe: Recipe, environment: Environment, engine: TransformersEngine, turns: Turns
) -> AgentRollout:
    expert: Any = getattr(environment, "demonstrate", None)
    if expert is None and recipe.trains_on_data:
        raise RecipeError(
            "rollout.student_share < 1 with rest = 'dataset' needs demonstrations, and this "
            "environment has no method demonstrate(task). Add one that returns the messages of a "
            "whole episode, or set student_share = 1"
        )

    def demonstrate(task: Task, id: str) -> Trajectory:
        messages = expert(task)
        # Something may stand above the first reply that the task itself does not begin with.
        begun = tuple(takewhile(lambda message: message.role != "assistant", messages))
        task = replace(task, messages=begun)
        spoken = [{"role": m.role, "content": m.content} for m in messages]
        return recorded(task, spoken, turns, id=id, temperature=recipe.rollout.temperature)

    return AgentRollout(
        engine=engine,
        turns=turns,
        config=recipe.rollout,
        begin=environment.start,
        demonstrate=None if expert is None else demonstrate,
        context_length=engine.context_length,
        seed=recipe.seed,
    )


def _reader(recipe: Recipe, engine: TransformersEngine, renderer: Renderer) -> Reader:
    if recipe.reader is None:
        return lambda trajectories: Reading(hints=(), counts={})
    asking = own_ask(engine, renderer, context_length=engine.context_length, seed=recipe.seed)
    return reader_for(recipe.reader, ask_self=asking, seed=recipe.seed)


def _suites(recipe: Recipe, room: Room) -> dict[str, tuple[TaskSource, Environment | None]]:
    found = {}
    for name, different in recipe.evaluate.suites.items():
        config = tasks_with(recipe.tasks, different)
        world = environment_of(config)
        found[name] = task_source(config, recipe.seed, room, world), world
    return found


def _length(task: Task, renderer: Renderer, new: int, *, data: bool) -> int:
    """Tokens of the prompt, and of what a given answer takes beyond `rollout.max_new_tokens`."""
    texts = [text for text in (task.completion, task.rejected) if data and text is not None]
    answers = [len(renderer.answer_ids(task.messages, text)) for text in texts]
    return len(renderer.prompt_ids(task.messages)) + max(0, max(answers, default=0) - new)


def _stay() -> None:
    """A teacher that does not move."""


def _label(teacher: SelfTeacher | ModelTeacher) -> str:
    return f"self:{teacher.weights}" if isinstance(teacher, SelfTeacher) else teacher.model


def _named(twin: Any, weights: StudentWeights) -> dict[str, torch.Tensor]:
    names = weights.trained().keys()
    return {name: p.data for name, p in twin.named_parameters() if name in names}


Weights = tuple[str, Path | None, str]
"""What makes two teachers the same model: its name, adapter and dtype."""


def _weights_of(config: ModelTeacher) -> Weights:
    return config.model, config.adapter, config.dtype


def _load_teachers(recipe: Recipe, device: torch.device) -> dict[Weights, tuple[Any, Any]]:
    """Each model once, however many routes lead to it."""
    loaded: dict[Weights, tuple[Any, Any]] = {}
    for config in teachers_of(recipe):
        if isinstance(config, ModelTeacher) and _weights_of(config) not in loaded:
            loaded[_weights_of(config)] = _load_teacher(config, device)
    return loaded


def _load_teacher(config: ModelTeacher, device: torch.device) -> tuple[Any, Any]:
    model: Any = load_model(
        config.model,
        dtype=arithmetic(config.dtype, device),
        device=device,
        adapter=config.adapter,
        trust_remote_code=config.trust_remote_code,
    )
    if config.dtype == "int8":
        model = quantise(model)
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


def _check_top_k(recipe: Recipe, num_words: int) -> None:
    for index, loss in enumerate(recipe.losses):
        if loss.kind != "divergence" or loss.support.kind != "top_k":
            continue
        if loss.support.k > num_words:
            raise RecipeError(
                f"losses[{index}].support.k = {loss.support.k}: the vocabulary has {num_words} "
                "words. Use a smaller k (20 to 100 is common), or support = { kind = 'full' }"
            )
