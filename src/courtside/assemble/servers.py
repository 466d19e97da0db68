"""Connects to the servers of a recipe and checks what they serve, before any model is loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from courtside.assemble.inputs import Inputs
from courtside.assemble.models import OTHER_VOCABULARY, Models, check_same_vocabulary
from courtside.engines.base import Sampling, ScoreRequest
from courtside.engines.loading import load_tokenizer
from courtside.engines.local import LocalEngine
from courtside.engines.served.adapters import AdapterTransport
from courtside.engines.served.engine import ServedEngine
from courtside.engines.served.full_weights import SWITCH, FolderCarrier, FullWeightsTransport
from courtside.engines.served.nccl_transfer import NcclCarrier, refuse_nccl
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.probe import ServerFacts, probe_servers
from courtside.engines.served.shared_folder import SharedFolder
from courtside.engines.served.student import ServedStudent
from courtside.engines.served.vocabulary import find_difference, render_prompt
from courtside.engines.served.weight_sync import Transport, WeightSync
from courtside.errors import ModelError, RecipeError
from courtside.progress import ReplicaCounts
from courtside.recipe import Recipe
from courtside.recipe.server import RolloutServerConfig, ServerConfig
from courtside.recipe.teacher import RoutedTeacherConfig, ServerTeacherConfig
from courtside.rollout.single_turn import make_sampling
from courtside.training.weights import StudentWeights, fingerprint_weights, save_all_weights
from courtside.types import Message

NUM_PROBES = 4
PROBE_TOKENS = 256
"""Prompts, and tokens of each, whose log-probs show that new weights arrived."""
QUESTION = (Message(role="user", content="What is 3 + 4?"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    pool: ReplicaPool
    facts: ServerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeacher:
    connection: Connection
    tokenizer: Any
    """Of `teacher.tokenizer`; None: the student's, which the servers have confirmed."""
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    rollout: Connection | None
    """None: the training process samples."""
    teachers: Mapping[ServerTeacherConfig, ServedTeacher]

    @property
    def replicas(self) -> Sequence[ReplicaCounts]:
        connections = [teacher.connection for teacher in self.teachers.values()]
        if self.rollout is not None:
            connections.insert(0, self.rollout)
        return [replica for connection in connections for replica in connection.pool.replicas]


def connect_servers(recipe: Recipe, inputs: Inputs) -> Servers:
    rollout = None
    if recipe.rollout.server is not None:
        if recipe.rollout.server.weight_transfer == "nccl":
            refuse_nccl("rollout.server")
        rollout = _connect(recipe.rollout.server, "rollout.server", inputs)
        _check_vocabulary(rollout.pool, inputs.tokenizer, recipe.student.model)
        _check_context(recipe, rollout, inputs)
        _check_weight_routes(recipe, rollout)
    return Servers(
        rollout=rollout,
        teachers={
            config: _connect_teacher(recipe, config, field, inputs)
            for field, config in _teacher_fields(recipe)
        },
    )


def _teacher_fields(recipe: Recipe) -> Iterator[tuple[str, ServerTeacherConfig]]:
    teacher = recipe.teacher
    if isinstance(teacher, ServerTeacherConfig):
        yield "teacher", teacher
    elif isinstance(teacher, RoutedTeacherConfig):
        for tag, config in teacher.routes.items():
            if isinstance(config, ServerTeacherConfig):
                yield f"teacher.routes.{tag}", config


def _connect(config: ServerConfig, field: str, inputs: Inputs) -> Connection:
    pool = ReplicaPool(config, field=field)
    facts = probe_servers(pool, probe_ids=inputs.template.prompt_ids(QUESTION))
    return Connection(pool=pool, facts=facts)


def _connect_teacher(
    recipe: Recipe, config: ServerTeacherConfig, field: str, inputs: Inputs
) -> ServedTeacher:
    connection = _connect(config.server, f"{field}.server", inputs)
    _check_top_k(recipe, connection)
    pool, student = connection.pool, recipe.student.model
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
        vocabularies = tokenizer.get_vocab(), inputs.tokenizer.get_vocab()
        name = f"{field}.tokenizer = {config.tokenizer!r}"
        check_same_vocabulary(name, vocabularies[0], student, vocabularies[1])
        _check_vocabulary(pool, tokenizer, config.tokenizer)
        return ServedTeacher(connection=connection, tokenizer=tokenizer, note=None)
    _check_vocabulary(pool, inputs.tokenizer, student)
    ids = render_prompt(pool, [{"role": m.role, "content": m.content} for m in QUESTION])
    if ids is None:
        note = f"{config.model} has no chat template on its server: it gets the student's prompts"
        return ServedTeacher(connection=connection, tokenizer=None, note=note)
    if tuple(ids) != inputs.template.prompt_ids(QUESTION):
        raise RecipeError(
            f"{field}.server: {config.model!r} has another chat template than {student!r}. Name "
            f"the folder or hub id of its tokenizer in {field}.tokenizer, so that its prompts are "
            "rendered as it knows them"
        )
    return ServedTeacher(connection=connection, tokenizer=None, note=None)


def _check_context(recipe: Recipe, connection: Connection, inputs: Inputs) -> None:
    """Prompts were checked against the student's own context."""
    limit = connection.facts.context_length
    longest = max(recipe.rollout.max_new_tokens, recipe.evaluate.max_new_tokens or 0)
    tasks = () if recipe.tasks.is_recorded else inputs.tasks.batch(0, NUM_PROBES)
    prompt = max((len(inputs.template.prompt_ids(t.messages)) for t in tasks), default=0)
    if prompt + longest > limit:
        raise RecipeError(
            f"rollout.server: the servers take {limit:,} tokens, and a prompt of {prompt:,} with "
            f"max_new_tokens = {longest:,} has more. Start them with --max-model-len "
            f"{inputs.settings.context_length:,}, the student's, or lower max_new_tokens"
        )


def _check_weight_routes(recipe: Recipe, connection: Connection) -> None:
    if recipe.student.lora is None and not connection.facts.takes_weights:
        raise RecipeError(
            "rollout.server: without student.lora all weights travel to the servers, and these "
            f"take none (vLLM {connection.facts.version}). Start them with {SWITCH} and "
            "--enable-scale-out, as `courtside serve` does (0.32 has the routes), or set "
            "student.lora"
        )


def _check_top_k(recipe: Recipe, connection: Connection) -> None:
    limit = connection.facts.max_logprobs
    for index, loss in enumerate(recipe.losses):
        if loss.kind != "divergence" or loss.support.kind != "top_k" or not loss.needs_teacher:
            continue
        field, facts = connection.pool.field, connection.facts
        if loss.support.of != "teacher" and not facts.max_given_ids:
            raise RecipeError(
                f"losses[{index}].support.of = {loss.support.of!r}: {field} does not score ids "
                f"that a request names (vLLM {facts.version}). That takes 0.32 with its V2 model "
                "runner, on a GPU, and --enable-scale-out. Use of = 'teacher', or teacher.kind = "
                "'model'"
            )
        if loss.support.k + (loss.support.of == "student") > limit:
            raise RecipeError(
                f"losses[{index}].support.k = {loss.support.k}: {field} gives log-probs of "
                f"{limit} tokens a position. Restart it with --max-logprobs "
                f"{loss.support.k + (loss.support.of == 'student')}, or use a smaller k"
            )


def _check_vocabulary(pool: ReplicaPool, tokenizer: Any, name: str) -> None:
    if (difference := find_difference(pool, tokenizer)) is not None:
        raise ModelError(
            f"{pool.field}.model = {pool.config.model!r} has another vocabulary than {name!r}: "
            f"{difference}. {OTHER_VOCABULARY}"
        )


# ── engines, once models are loaded ──────────────────────────────────────────────────────────────


def make_served_teacher(
    config: ServerTeacherConfig, connection: Connection, models: Models, local: LocalEngine
) -> ServedEngine:
    return ServedEngine(
        connection.pool,
        connection.facts,
        name=config.model,
        tokenizer=models.tokenizer,
        eos_ids=local.eos_ids,
        vocab_size=models.vocab_size,
        context_length=connection.facts.context_length,
        num_parameters=config.num_parameters or 0,
        device=local.device,
        progress=models.progress,
    )


def make_served_student(
    recipe: Recipe, inputs: Inputs, connection: Connection, models: Models, local: LocalEngine
) -> ServedStudent:
    """Brings the student's weights to the servers, and compares log-probs with `local`'s. All ranks
    call it."""
    config, weights = recipe.rollout.server, models.weights
    assert config is not None, "there are servers"
    pool = connection.pool
    probes = _make_probes(recipe, inputs)

    def score() -> tuple[float, ...]:
        return tuple(logp for s in local.score(probes) for logp in s.logp_T.tolist())

    sync = WeightSync(
        pool,
        connection.facts.route,
        _make_transport(recipe, config, pool, weights),
        max_difference=config.max_difference,
        max_staleness=config.max_staleness,
        score=score,
        probes=probes,
        ranks=models.turns.ranks,
    )
    engine = ServedStudent(
        connection.pool,
        connection.facts,
        local=local,
        sync=sync,
        name=local.name,
        tokenizer=models.tokenizer,
        eos_ids=local.eos_ids,
        vocab_size=models.vocab_size,
        context_length=local.context_length,
        num_parameters=local.num_parameters,
        progress=models.progress,
    )
    engine.check_sampling(make_sampling(recipe.rollout))
    engine.check_sampling(Sampling(max_new_tokens=1, temperature=recipe.evaluate.temperature))
    return engine


def _make_transport(
    recipe: Recipe, config: RolloutServerConfig, pool: ReplicaPool, weights: StudentWeights
) -> Transport:
    if config.weight_transfer == "nccl":
        fingerprint = partial(fingerprint_weights, weights.trained.values())
        return FullWeightsTransport(pool, NcclCarrier(pool, weights.model, fingerprint))
    folder = SharedFolder(config.sync_folder or _temporary_folder(), field=pool.field)
    if weights.adapter is None:
        save = partial(save_all_weights, weights)
        return FullWeightsTransport(pool, FolderCarrier(pool, folder, save))
    _check_head(recipe, weights)
    return AdapterTransport(pool, folder, partial(_save_adapter, weights))


def _check_head(recipe: Recipe, weights: StudentWeights) -> None:
    if hasattr(weights.model.get_output_embeddings(), "base_layer"):
        raise RecipeError(
            f"student.lora.target_modules = {recipe.student.lora!r} adapts the LM head, and vLLM "
            "leaves that out of its log-probs. Remove it, or remove rollout.server"
        )


def _save_adapter(weights: StudentWeights, folder: Path) -> None:
    weights.adapter.save_pretrained(
        folder, selected_adapters=["default"], save_embedding_layers=False
    )


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / "courtside-weights"


def _make_probes(recipe: Recipe, inputs: Inputs) -> list[ScoreRequest]:
    """Prompts of the run, all of whose tokens are scored but the first."""
    tasks = (
        next(suite.tasks.held_out("test", NUM_PROBES) for suite in inputs.suites.values())
        if recipe.tasks.is_recorded
        else inputs.tasks.batch(0, NUM_PROBES)
    )
    prompts = dict.fromkeys(inputs.template.prompt_ids(task.messages) for task in tasks)
    return [
        ScoreRequest(
            token_ids=ids[:PROBE_TOKENS],
            scored=(False,) + (True,) * (len(ids[:PROBE_TOKENS]) - 1),
        )
        for ids in islice(prompts, NUM_PROBES)
    ]
