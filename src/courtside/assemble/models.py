"""Loads the models of a recipe, and checks that they share a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from courtside.assemble.sharded import QUANTIZED, shards_model
from courtside.engines.loading import load_model, load_tokenizer
from courtside.engines.local import LocalEngine
from courtside.engines.precision import quantize_linear_layers, resolve_dtype
from courtside.engines.sharded import ForwardTurns, ShardedEngine
from courtside.errors import ModelError
from courtside.progress import ProgressMeter
from courtside.ranks import ALONE, Ranks
from courtside.recipe import Recipe
from courtside.recipe.teacher import ModelTeacherConfig
from courtside.training.kv_budget import device_bytes, kv_cache_tokens
from courtside.training.student import Student
from courtside.training.weights import StudentWeights

OTHER_VOCABULARY = "Token ids of one mean nothing to the other: choose a teacher of the same family"
ModelKey = tuple[str, Path | None, str]
"""What makes two teachers the same model: name, adapter and dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    name: str
    """The student's."""
    weights: StudentWeights
    """Those that sample and score, whole."""
    trainer: StudentWeights
    """Those that train: the same, or shards of them."""
    tokenizer: Any
    teachers: Mapping[ModelKey, tuple[Any, Any]]
    """Model and tokenizer of each teacher that is a model, loaded once for all of its routes."""
    vocab_size: int
    context_length: int | None
    """As asked for the student's."""
    kv_cache_tokens: int
    progress: ProgressMeter
    """Counts what every engine samples."""
    turns: ForwardTurns
    """Of the ranks, with the models that are in shards."""

    @property
    def together(self) -> Callable[[], AbstractContextManager[None]]:
        """Around all that teachers do in a step, where ranks take turns with models in shards."""
        return self.turns.open if self.turns.ranks.is_sharded else nullcontext

    def make_student_engine(self, weights: StudentWeights, name: str) -> LocalEngine:
        return self.make_engine(
            weights.model, name, context_length=self.context_length, autocast=weights.autocast
        )

    def make_engine(
        self,
        model: Any,
        name: str,
        *,
        context_length: int | None,
        autocast: torch.dtype | None = None,
    ) -> LocalEngine:
        is_sharded = hasattr(model, "unshard")  # as `fully_shard` gives it
        make = partial(ShardedEngine, turns=self.turns) if is_sharded else LocalEngine
        return make(
            model,
            self.tokenizer,
            name=name,
            vocab_size=self.vocab_size,
            context_length=context_length,
            autocast=autocast,
            max_batch_tokens=self.kv_cache_tokens,
            progress=self.progress,
        )


def load_models(
    recipe: Recipe, tokenizer: Any, progress: ProgressMeter, ranks: Ranks = ALONE
) -> Models:
    """`tokenizer`: the student's."""
    name = recipe.student.model
    weights = StudentWeights(recipe.student, seed=recipe.seed)
    teachers: dict[ModelKey, tuple[Any, Any]] = {}
    for config in recipe.model_teachers:
        if isinstance(config, ModelTeacherConfig) and key_of(config) not in teachers:
            teachers[key_of(config)] = _load_teacher(config, weights.device, recipe, ranks)
    vocab_size = _common_vocab_size(name, weights.model, tokenizer, teachers)
    teacher_models = [model for model, _ in teachers.values()]
    total = device_bytes(weights.device)
    trainer = weights
    if ranks.is_sharded:
        from courtside.training.sharding import ShardedWeights, make_mesh, shard_for_scoring

        ranks.exchange(None)  # all have loaded: from here on they wait for each other's tensors
        with ranks.work_apart():
            mesh = make_mesh(ranks, weights.device)
            trainer = ShardedWeights(weights, mesh, zero_stage=recipe.sharding.zero_stage)
            for key, (model, _) in teachers.items():
                if _is_in_shards(key, model, recipe, ranks):
                    shard_for_scoring(model, mesh, None)
    return Models(
        name=name,
        weights=weights,
        trainer=trainer,
        tokenizer=tokenizer,
        teachers=teachers,
        vocab_size=vocab_size,
        context_length=recipe.student.context_length,
        kv_cache_tokens=kv_cache_tokens(recipe, weights, teacher_models, total=total),
        progress=progress,
        turns=ForwardTurns(ranks),
    )


def make_student(
    recipe: Recipe, models: Models, ranks: Ranks, *, pad_id: int, progress: ProgressMeter
) -> Student:
    options: dict[str, Any] = {
        "vocab_size": models.vocab_size, "pad_id": pad_id, "progress": progress,
    }  # fmt: skip
    if not ranks.is_sharded:
        return Student(models.trainer, recipe, **options)
    from courtside.training.sharded_student import ShardedStudent
    from courtside.training.sharding import ShardedWeights

    assert isinstance(models.trainer, ShardedWeights)
    return ShardedStudent(models.trainer, recipe, ranks=ranks, **options)


def load_untrained_student(recipe: Recipe, models: Models) -> LocalEngine:
    weights = StudentWeights(recipe.student, seed=recipe.seed)
    weights.model.eval().requires_grad_(False)
    return models.make_student_engine(weights, "untrained")


def key_of(config: ModelTeacherConfig) -> ModelKey:
    return config.model, config.adapter, config.dtype


def _load_teacher(
    config: ModelTeacherConfig, device: torch.device, recipe: Recipe, ranks: Ranks
) -> tuple[Any, Any]:
    """One that will be sharded stays in host memory."""
    on_host = ranks.is_sharded and config.dtype not in QUANTIZED
    model: Any = load_model(
        config.model,
        dtype=resolve_dtype(config.dtype, device),
        device=torch.device("cpu") if on_host else device,
        adapter=config.adapter,
        trust_remote_code=config.trust_remote_code,
        in_4_bits=config.dtype == "nf4",
    )
    if config.dtype == "int8":
        model = quantize_linear_layers(model)
    if not _is_in_shards(key_of(config), model, recipe, ranks):
        model = model.to(device)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    return model.requires_grad_(False), tokenizer


def _is_in_shards(key: ModelKey, model: Any, recipe: Recipe, ranks: Ranks) -> bool:
    return key[2] not in QUANTIZED and shards_model(recipe, ranks, model)


def _common_vocab_size(
    name: str, model: Any, tokenizer: Any, teachers: Mapping[ModelKey, tuple[Any, Any]]
) -> int:
    """The vocabulary that all models share; LM heads padded to another size are cut to it."""
    vocabulary = tokenizer.get_vocab()
    sizes: dict[str, int] = {name: model.get_output_embeddings().weight.shape[0]}
    for (teacher_name, _, _), (teacher, teacher_tokenizer) in teachers.items():
        field = f"teacher.model = {teacher_name!r}"
        check_same_vocabulary(field, teacher_tokenizer.get_vocab(), name, vocabulary)
        sizes[teacher_name] = teacher.get_output_embeddings().weight.shape[0]
    smallest = min(sizes.values())
    if max(vocabulary.values()) >= smallest:
        raise ModelError(
            f"the tokenizer of {name!r} has ids up to {max(vocabulary.values())}, but a head has "
            f"only {smallest} rows ({sizes}). The model and its tokenizer do not belong together"
        )
    return smallest


def check_same_vocabulary(
    field: str, vocabulary: Mapping[str, int], student: str, student_vocabulary: Mapping[str, int]
) -> None:
    """`field`: the recipe's with the teacher's name, for the message."""
    if vocabulary == student_vocabulary:
        return
    different = sorted(set(student_vocabulary.items()) ^ set(vocabulary.items()))
    raise ModelError(
        f"{field} has another vocabulary than the student {student!r} ({len(vocabulary)} and "
        f"{len(student_vocabulary)} tokens; {len(different)} entries differ, such as "
        f"{different[0][0]!r}). {OTHER_VOCABULARY}"
    )
