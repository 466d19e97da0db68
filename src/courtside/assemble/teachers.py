"""Makes the teacher stage: each teacher's engine, weights, template and hint scoring."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from courtside.assemble.chat_templates import make_teacher_template
from courtside.assemble.models import Models, key_of
from courtside.assemble.servers import QUESTION, Servers, make_served_teacher
from courtside.assemble.sharded import note_shards, shards_model
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine, ScoreRequest, Want
from courtside.engines.local import LocalEngine
from courtside.engines.score_store import ScoreStore
from courtside.engines.sharded import ShardedEngine
from courtside.engines.stored_scores import StoredScoresEngine
from courtside.environments.base import HostedEnvironment
from courtside.errors import RecipeError
from courtside.recipe import Recipe
from courtside.recipe.score_store import ScoreStoreConfig
from courtside.recipe.teacher import (
    CustomTeacherConfig,
    ModelTeacherConfig,
    RoutedTeacherConfig,
    ScoringTeacherConfig,
    SelfTeacherConfig,
    ServerTeacherConfig,
)
from courtside.rollout.replies import reply_passes
from courtside.rollout.single_turn import make_sampling
from courtside.teacher.custom import CustomTeacher, Need
from courtside.teacher.hint_scoring import HintScorer, HintTrial
from courtside.teacher.routing import RoutedTeachers
from courtside.teacher.teacher import ScoringTeacher, Teacher, TeacherStage
from courtside.training.hint_branches import find_deferral_problem
from courtside.training.shards import GatheredTensors, copy_whole, gather_whole
from courtside.training.student import Student
from courtside.training.weights import MovingAverage, fingerprint_weights
from courtside.types import Trajectory

Serve = Callable[[LocalEngine], Engine]
"""Puts another engine in the place of an in-process one, with the same weights."""


MAX_DIFFERENCE = 0.05
"""Nats a token by which a served teacher's log-probs may differ from those of its stored scores:
rounding in bfloat16 gives about 0.01 to 0.03."""

SwapWeights = Callable[[], AbstractContextManager[None]]
"""Puts a teacher's weights in place of the student's, in one model."""


@dataclass(kw_only=True)
class TeacherFactory:
    recipe: Recipe
    models: Models
    servers: Servers
    local: LocalEngine
    """The student's."""
    serve: Serve
    template: IncrementalTemplate
    trial: HintTrial | None
    defers_hints: bool
    averages: dict[str, MovingAverage] = field(default_factory=dict)
    """By the teacher's name: part of every checkpoint."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Parameters of each teacher, by its name."""
    notes: list[str] = field(default_factory=list)

    def make_stage(self) -> TeacherStage:
        teacher: ScoringTeacher | None = None
        config = self.recipe.teacher
        if isinstance(config, CustomTeacherConfig):
            teacher = custom = CustomTeacher(config, list(find_needs(self.recipe)))
            self.sizes[custom.name] = custom.num_parameters
        elif isinstance(config, RoutedTeacherConfig):
            routes = {tag: self._make(t, f"{tag}:{_label(t)}") for tag, t in config.routes.items()}
            teacher = RoutedTeachers(routes, config.default)
        elif config is not None:
            teacher = self._make(config, _label(config))
        reference = None
        if self.recipe.needs_reference:
            frozen = SelfTeacherConfig(kind="self", weights="frozen")
            reference = self._make(frozen, "reference")
            del self.sizes["reference"]  # as large as the student
        return TeacherStage(
            teacher,
            reference,
            scores=self.recipe.scores_with_teacher,
            hinted=self.recipe.reader is not None,
            together=self.models.together,
        )

    def _make(self, config: ScoringTeacherConfig, label: str) -> Teacher:
        template = self.template.renderer
        engine: Engine
        swap: SwapWeights = nullcontext
        if isinstance(config, ModelTeacherConfig):
            engine, template = self._model_teacher(config)
        elif isinstance(config, ServerTeacherConfig):
            engine, template = self._served_teacher(config)
        else:
            engine, swap = self._self_teacher(config, label)
            template = self._make_template(config, self.models.tokenizer, template.eos_ids)
        self.sizes[label] = engine.num_parameters
        if config.store is not None:
            engine = self._store_scores(engine, config, config.store)
        score_needs = choose_want(self.recipe, engine)
        hints = HintScorer(engine, self.template, self.recipe.hints, trial=self.trial)
        return Teacher(
            name=label,
            engine=engine,
            renderer=template,
            shares_prompts=template is self.template.renderer,
            context=config.context,
            overlong=self.recipe.tasks.overlong_prompts,
            want=score_needs.want,
            top_k=score_needs.top_k,
            likely_ids=(
                partial(
                    find_likely_ids,
                    self.local,
                    score_needs.given_k,
                    replays=self.recipe.student.router_replay,
                )
                if score_needs.given_k
                else None
            ),
            hints=hints if self.recipe.reader is not None else None,
            defers_hints=self.defers_hints,
            weights=swap,
        )

    def _model_teacher(self, config: ModelTeacherConfig) -> tuple[Engine, ChatTemplate]:
        model, tokenizer = self.models.teachers[key_of(config)]
        local = self.models.make_engine(model, config.model, context_length=config.context_length)
        if isinstance(local, ShardedEngine):
            self.notes.append(note_shards(config.model))
        return self.serve(local), self._make_template(config, tokenizer, local.eos_ids)

    def _served_teacher(self, config: ServerTeacherConfig) -> tuple[Engine, ChatTemplate]:
        served = self.servers.teachers[config]
        engine = make_served_teacher(config, served.connection, self.models, self.local)
        self.notes += [*engine.notes(), *([] if served.note is None else [served.note])]
        student = self.template.renderer
        if served.tokenizer is None:
            return engine, self._make_template(config, student.tokenizer, student.eos_ids)
        return engine, self._make_template(config, served.tokenizer, engine.eos_ids)

    def _store_scores(
        self, engine: Engine, config: ScoringTeacherConfig, store: ScoreStoreConfig
    ) -> StoredScoresEngine:
        device = self.local.device
        teacher = f"served/{config.model}" if isinstance(config, ServerTeacherConfig) else ""
        if isinstance(engine, LocalEngine):
            # An adapter that trains is not part of the teacher, which is frozen.
            trained = {n for n, p in engine.model.named_parameters() if p.requires_grad}
            tensors = sorted(engine.model.state_dict().items())
            fingerprint = fingerprint_weights(
                gather_whole(t) for name, t in tensors if name not in trained
            )
            settings = (engine.autocast, engine.context_length, device.type)
            kind = type(engine.model).__name__.removeprefix("FSDP")  # a store serves shards, too
            teacher = f"{kind}/{settings}/{fingerprint}"
        assert teacher, "other engines have no store"
        scores = ScoreStore(
            store.folder,
            teacher=teacher,
            max_bytes=int(store.max_gb * 1e9),
            field="teacher.store",
        )
        stored = StoredScoresEngine(engine, scores, device=device)
        if isinstance(config, ServerTeacherConfig):
            ids = self.template.renderer.prompt_ids(QUESTION)
            probe = ScoreRequest(token_ids=ids, scored=(False,) + (True,) * (len(ids) - 1))
            (probed,) = engine.score([probe])
            scores.check_teacher(probed.logp_T.tolist(), max_difference=MAX_DIFFERENCE)
        self.notes += stored.notes()
        return stored

    def _make_template(
        self, config: ScoringTeacherConfig, tokenizer: Any, eos_ids: Collection[int]
    ) -> ChatTemplate:
        """The student's, unless the teacher's makes other ids of the same messages."""
        if (
            not isinstance(config, SelfTeacherConfig)
            and tokenizer.chat_template != self.models.tokenizer.chat_template
        ):
            self.notes.append(
                f"{config.model} has another chat template than {self.models.name}: each renders "
                "the prompt with its own, and the same answer tokens are scored"
            )
        return make_teacher_template(
            config, self.recipe, self.template.renderer, tokenizer, eos_ids
        )

    def _self_teacher(
        self, config: SelfTeacherConfig, label: str
    ) -> tuple[LocalEngine, SwapWeights]:
        weights = self.models.weights
        if config.weights == "live":
            return self.local, nullcontext
        if weights.adapter is None:
            if config.weights == "frozen":
                return self._make_copy(self._copy_student(), label), nullcontext
            average, model = self._average_model(config.ema_decay)
            self.averages[label] = average
            return self._make_copy(model, label), nullcontext
        if config.weights == "frozen":
            return self.local, weights.without_adapter
        trained = self.models.trainer.trained
        shadow = {name: p.detach().clone() for name, p in trained.items()}
        self.averages[label] = MovingAverage(config.ema_decay, trained, shadow)
        if not self.models.turns.ranks.is_sharded:
            return self.local, partial(weights.swap_in, shadow)
        gathered = GatheredTensors(shadow)
        self.models.turns.weights.append(gathered)
        return self.local, lambda: weights.swap_in(gathered.whole)

    def _copy_student(self) -> Any:
        """A frozen model with the student's weights of this moment."""
        models = self.models
        is_in_shards = shards_model(self.recipe, models.turns.ranks, models.weights.model)
        return (models.trainer if is_in_shards else models.weights).copy()

    def _average_model(self, decay: float) -> tuple[MovingAverage, Any]:
        """A moving average of all weights, and the model that scores with it."""
        weights, trainer, ranks = self.models.weights, self.models.trainer, self.models.turns.ranks
        if not ranks.is_sharded or shards_model(self.recipe, ranks, weights.model):
            model, shadow = trainer.copy_trained()
            # What is gathered of shards is older than they are; the next passes gather it again.
            free = getattr(model, "reshard", None)
            return MovingAverage(decay, trainer.trained, shadow, publish=free), model
        model = weights.copy()
        copies = {n: p.data for n, p in model.named_parameters() if n in trainer.trained}
        shadow = {name: p.detach().clone() for name, p in trainer.trained.items()}

        def publish() -> None:
            with ranks.work_apart():
                copy_whole(shadow, copies)

        return MovingAverage(decay, trainer.trained, shadow, publish=publish), model

    def _make_copy(self, model: Any, label: str) -> LocalEngine:
        engine = self.models.make_engine(
            model,
            label,
            context_length=self.models.context_length,
            autocast=self.models.weights.autocast,
        )
        if isinstance(engine, ShardedEngine):
            self.notes.append(note_shards(label))
        return engine


def find_reason_to_score_first(
    recipe: Recipe, student: Student, local: LocalEngine, *, is_sharded: bool = False
) -> str | None:
    """Why hints are scored before the update; None: the update scores them in its own pass."""
    teacher, hints = recipe.teacher, recipe.hints
    if is_sharded:
        return "the student is sharded over processes"
    if not isinstance(teacher, SelfTeacherConfig) or teacher.weights != "live":
        return "the teacher is not the live student"
    if hints.min_shift is not None:
        return "hints.min_shift drops some by what they do"
    if hints.resamples:
        return "hints.resamples tries them first"
    if hints.contrast is not None:
        return "hints.contrast scores each turn twice"
    if hints.cumulative:
        return "hints.cumulative changes the context of later turns"
    if hints.position == "system":
        return "hints.position = 'system' changes the trajectory from its beginning"
    with local.autocast_context():
        return find_deferral_problem(student.passes)


def make_hint_trial(recipe: Recipe, environment: HostedEnvironment | None) -> HintTrial | None:
    if not recipe.hints.resamples or environment is None:
        return None
    return HintTrial(
        sampling=make_sampling(recipe.rollout),
        passes=partial(reply_passes, environment.start),
        num_replies=recipe.hints.resamples,
        seed=recipe.seed,
    )


def find_needs(recipe: Recipe, *, of_teacher: bool = False) -> Iterator[Need]:
    """One for each loss that needs more than log-probs of the sampled tokens; `of_teacher`: without
    those that compare with the reference."""
    for index, loss in enumerate(recipe.losses):
        field = f"losses[{index}]"
        if of_teacher and not loss.needs_teacher:
            continue
        if loss.kind == "policy_gradient" and loss.baseline:
            yield Need(f"{field}.baseline = true", "hidden")
        elif loss.kind == "divergence" and loss.support.kind == "top_k":
            k, of = loss.support.k, loss.support.of
            if of != "student":
                yield Need(f"{field}.support.k = {k}", "top_k", k)
            if of != "teacher":
                yield Need(f"{field}.support.of = {of!r}", "hidden", k, given_k=k)
        elif loss.kind == "divergence":
            yield Need(f"{field}.support.kind = {loss.support.kind!r}", "hidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreNeeds:
    """What to ask of `score`."""

    want: Want
    top_k: int = 0
    given_k: int = 0
    """Ids at each position, of the student's likeliest tokens."""


def choose_want(recipe: Recipe, engine: Engine) -> ScoreNeeds:
    """Hidden states if there are any, else the log-probs of a few tokens where that is enough."""
    has = engine.capabilities
    # Hidden states are there for all losses at once; other engines give what is asked for.
    needs = list(find_needs(recipe, of_teacher=not has.hidden_states))
    for need in needs:
        can_name_ids = 0 < need.given_k <= has.given_ids
        if need.want == "hidden" and not has.hidden_states and not can_name_ids:
            raise RecipeError(
                f"{need.setting} needs the teacher's whole distributions, and {engine.name} gives "
                f"the {has.top_k} likeliest tokens a position. Use a divergence with "
                "support = { kind = 'top_k', of = 'teacher' }, or a teacher in this process"
            )
        if need.top_k > has.top_k:
            raise RecipeError(
                f"{need.setting}: {engine.name} gives at most the {has.top_k} likeliest tokens a "
                "position (its vocabulary, or its server's limit). Use a smaller k (20 to 100 is "
                "common), or support = { kind = 'full' } with a model in this process"
            )
    if not needs:
        return ScoreNeeds(want="logp")
    if has.hidden_states:
        return ScoreNeeds(want="hidden")
    return ScoreNeeds(
        want="top_k",
        top_k=max((need.top_k for need in needs if need.want == "top_k"), default=0),
        given_k=max(need.given_k for need in needs),
    )


def find_likely_ids(
    local: LocalEngine, k: int, trajectories: Sequence[Trajectory], *, replays: bool = False
) -> dict[str, Tensor]:
    """By trajectory id: the student's k likeliest tokens [T, k] where it sampled, most likely
    first. `replays`: through the experts that it selected when it sampled."""
    requests = [
        replace(ScoreRequest.of_trajectory(t), routed_experts=t.routed_experts if replays else ())
        for t in trajectories
    ]
    scores = local.score(requests, want="top_k", top_k=k)
    ids = {t.id: s.top_ids_TK for t, s in zip(trajectories, scores, strict=True)}
    return {id: ids_TK for id, ids_TK in ids.items() if ids_TK is not None}


def _label(teacher: ScoringTeacherConfig) -> str:
    return f"self:{teacher.weights}" if isinstance(teacher, SelfTeacherConfig) else teacher.model
