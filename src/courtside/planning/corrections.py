"""What corrections add to a step: questions about drafts, repairs, take-overs; which rows train.

How many drafts fail and how many repairs can be used is known when drafts are graded. `Rates` are
given, read from a run, or those that cost most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from courtside.errors import PlanError
from courtside.recipe.drafts import ChooseConfig, CriticizeConfig, DraftConfig, RewriteConfig

if TYPE_CHECKING:
    from courtside.planning.workload import Workload

TEMPLATE_TOKENS = 100
"""Of the text around task and draft in a question."""
MAX_RATE = 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the grades of a run decide. Fractions are 1 unless they are known: the most that a step
    can cost. None: follows from the lengths."""

    failed_fraction: float = 1.0
    """Of the drafts: those that fail, which are asked about or taken over."""
    pair_fraction: float = 1.0
    """Of the prompts: those whose samples differ enough for a chosen pair."""
    repair_fraction: float = 1.0
    """Of the drafts that a rewriter is asked about: those with a repair that is used."""
    critique_fraction: float = 1.0
    """Of the drafts that a critic is asked about: those with a critique that is used."""
    takeover_fraction: float = 1.0
    """Of the drafts that the teacher continues: those whose continuation trains."""
    question_tokens: float | None = None
    """Prompt of a question about a draft. None: task, draft and 100 more."""
    reply_tokens: float | None = None
    """Of a reply to it. None: the stage's max_new_tokens."""
    repair_tokens: float | None = None
    """Of a repaired answer or turn. None: as long as the student's."""
    prefix_tokens: float | None = None
    """Of a draft, kept before a take-over. None: by takeover.at; 0 where only the run tells."""
    takeover_tokens: float | None = None
    """Sampled by the teacher in a take-over. None: what the draft had after the prefix."""
    call_seconds: float | None = None
    """An endpoint's time for one call. None: the calls take no time."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            highest = 1.0 if field.name.endswith("_fraction") else MAX_RATE
            if value is not None and not 0 <= value <= highest:
                raise PlanError(
                    f"{field.name} = {value:g}: give a number from 0 to {highest:,.0f} (--assume)"
                )


# ── questions about drafts ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Of one draft stage in a step."""

    stage: str
    number: float
    input_tokens: float
    """Of each."""
    output_tokens: float
    num_concurrent: int | None
    """Calls at a time to an endpoint. None: the recipe's teacher is asked."""


def count_asked(work: Workload, config: DraftConfig) -> float:
    """Drafts that a stage asks a model about, in a step."""
    failed = work.rates.failed_fraction
    match config:
        case ChooseConfig():
            return work.num_student_rows if config.by == "judge" else 0.0
        case CriticizeConfig():
            return work.num_student_rows * (failed if config.skip_passed else 1.0)
        case RewriteConfig():
            number = work.num_student_rows * (failed if config.require_better else 1.0)
            if config.max_per_prompt is not None:
                number = min(number, work.num_sampled_prompts * config.max_per_prompt)
            return number


def list_questions(work: Workload) -> list[Questions]:
    rates, lengths = work.rates, work.lengths
    if (size := rates.question_tokens) is None:
        size = lengths.sequence + TEMPLATE_TOKENS
    return [
        Questions(
            stage=config.kind,
            number=count_asked(work, config),
            input_tokens=size,
            output_tokens=_first(rates.reply_tokens, config.max_new_tokens),
            num_concurrent=None if config.endpoint is None else config.endpoint.max_concurrency,
        )
        for config in work.recipe.drafts
        if not isinstance(config, ChooseConfig) or config.by == "judge"
    ]


def ranks_by_teacher(work: Workload) -> bool:
    """Whether a stage scores all drafts with the teacher."""
    return any(isinstance(c, ChooseConfig) and c.by == "teacher_logp" for c in work.recipe.drafts)


# ── take-overs ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeovers:
    """Of a step."""

    number: float
    """Drafts that the teacher continues."""
    prefix: float
    """Tokens of a draft that stay, after the prompt."""
    new: float
    """Tokens that the teacher samples for one."""
    observed: float
    """Of an environment, after the fork."""
    turns: float
    """Of the teacher in one."""
    num_concurrent: int | None
    """Take-overs at a time by an endpoint. None: the recipe's teacher plays."""

    @property
    def suffix(self) -> float:
        """Tokens after the prompt."""
        return self.prefix + self.new + self.observed


def count_takeovers(work: Workload) -> Takeovers | None:
    config, rates, lengths = work.recipe.takeover, work.rates, work.lengths
    if config is None:
        return None
    whole, turns = work.suffix_tokens, lengths.turns
    is_episode = work.recipe.tasks.is_environment
    if (prefix := rates.prefix_tokens) is None:
        if config.at == "random":
            prefix = whole * (turns - 1) / (2 * turns) if is_episode else (whole - 1) / 2
        elif isinstance(config.at, str):
            prefix = 0.0
        elif isinstance(config.at, float):
            prefix = float(int(config.at * whole))
        else:
            prefix = config.at * whole / turns if is_episode else float(config.at)
    prefix = min(prefix, whole)
    remaining = 1 - prefix / whole
    return Takeovers(
        number=work.num_student_rows * (1.0 if config.select == "all" else rates.failed_fraction),
        prefix=prefix,
        new=_first(rates.takeover_tokens, lengths.new * remaining),
        observed=lengths.observed * remaining,
        turns=max(1.0, turns * remaining),
        num_concurrent=None if config.endpoint is None else config.endpoint.max_concurrency,
    )


# ── rows: what is scored and what trains ─────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Sequences of one origin in a step."""

    number: float
    length: float
    new: float
    """Completion tokens of each."""
    num_trained: float
    """Those of them that losses apply to, in rows that train."""
    scored: float = 1.0
    """Fraction that the teacher scores."""
    trained: float = 1.0
    """Fraction in the update."""
    is_sampled: bool = True
    """By the student, or read from data: hints are for these."""


def list_rows(work: Workload) -> tuple[Rows, ...]:
    """All that a step scores or trains, the student's own samples first."""
    lengths = work.lengths
    whole = Rows(
        number=0.0, length=lengths.sequence, new=lengths.new, num_trained=lengths.num_trained
    )
    groups = [
        replace(whole, number=work.num_student_rows, scored=_scored_fraction(work)),
        replace(whole, number=work.num_teacher_rows),
        replace(whole, number=work.num_dataset_rows),
        *_list_repairs(work),
        *_list_takeovers(work),
    ]
    if not work.recipe.tasks.is_recorded:
        sources = ("student", "teacher", "dataset")
        for index, source in enumerate(sources):
            trained = _trained_fraction(work, source, groups[index].scored)
            groups[index] = replace(groups[index], trained=trained)
    if not work.recipe.scores_with_teacher:
        groups = [replace(group, scored=0.0) for group in groups]
    return tuple(group for group in groups if group.number)


def _list_repairs(work: Workload) -> Iterable[Rows]:
    lengths, turns = work.lengths, work.lengths.turns
    for config in work.recipe.drafts:
        if not isinstance(config, RewriteConfig):
            continue
        size = _first(work.rates.repair_tokens, lengths.new / turns)
        before = 0.0
        if turns > 1:  # the last turn, or one of them
            share = (turns - 1) / turns
            before = work.suffix_tokens * (share if config.turn == "last" else share / 2)
        repairs = Rows(
            number=num_repairs(work),
            length=lengths.prompt + before + size,
            new=size,
            num_trained=size,
            scored=0.0 if contexts(work) & {"repair", "critique"} else 1.0,
            is_sampled=False,
        )
        trained = _trained_fraction(work, "teacher", repairs.scored)
        yield replace(repairs, trained=1.0 if config.pairs else trained)
        if config.pairs and work.recipe.tasks.is_environment:  # the draft's turn alone
            turn = lengths.new / turns
            yield _make_copies(work, repairs.number, lengths.prompt + before + turn, turn)


def _list_takeovers(work: Workload) -> Iterable[Rows]:
    takeovers, lengths = count_takeovers(work), work.lengths
    if takeovers is None:
        return
    number = takeovers.number * work.rates.takeover_fraction
    length = lengths.prompt + takeovers.suffix
    whole = Rows(
        number=number, length=length, new=takeovers.new, num_trained=takeovers.new,
        is_sampled=False,
    )  # fmt: skip
    yield replace(whole, trained=_trained_fraction(work, "teacher", whole.scored))
    assert work.recipe.takeover is not None
    if not work.recipe.takeover.pair:
        return
    if work.recipe.tasks.is_environment:  # both sides end with the fork's turn
        turn = lengths.new / lengths.turns
        yield _make_copies(work, 2 * number, lengths.prompt + takeovers.prefix + turn, turn)
    else:
        yield _make_copies(work, number, length, takeovers.new)
        yield _make_copies(work, number, lengths.sequence, lengths.new - takeovers.prefix)


def _make_copies(work: Workload, number: float, length: float, new: float) -> Rows:
    """Members of pairs that train by preferences alone, and that no teacher scores."""
    return Rows(
        number=number, length=length, new=new, num_trained=new, scored=0.0,
        trained=float(_prefers(work)), is_sampled=False,
    )  # fmt: skip


def num_repairs(work: Workload) -> float:
    rewriters = [c for c in work.recipe.drafts if isinstance(c, RewriteConfig)]
    return sum(count_asked(work, c) * work.rates.repair_fraction for c in rewriters)


def contexts(work: Workload) -> set[str]:
    return {t.context.kind for t in work.recipe.model_teachers if t.context is not None}


def _scored_fraction(work: Workload) -> float:
    """Of the student's samples: a context that a draft stage writes exists for some only."""
    number, kinds = work.num_student_rows, contexts(work)
    if not number:
        return 1.0
    if "repair" in kinds:
        return min(1.0, num_repairs(work) / number)
    if "critique" in kinds:
        critics = [c for c in work.recipe.drafts if isinstance(c, CriticizeConfig)]
        num_asked = sum(count_asked(work, config) for config in critics)
        return num_asked * work.rates.critique_fraction / number
    return 1.0


def _trained_fraction(work: Workload, source: str, scored: float) -> float:
    """Of the rows of a source, those that any loss trains on."""
    fraction = 0.0
    turns = ("hinted_turns", "unhinted_turns") if source == "student" else ("unhinted_turns",)
    for loss in work.recipe.losses:
        if loss.kind == "preference" or (loss.kind == "policy_gradient" and source == "dataset"):
            continue
        if loss.on in ("all", source, *turns):
            fraction = max(fraction, scored if loss.needs_teacher else 1.0)
    if source == "dataset" and _prefers(work):
        return 1.0
    if source == "student" and fraction < 1.0 and work.num_student_rows:
        fraction = max(fraction, _paired_samples(work) / work.num_student_rows)
    return fraction


def _paired_samples(work: Workload) -> float:
    """Samples of the student that train as members of pairs."""
    members = 2 if _prefers(work) else int(any(loss.on == "chosen" for loss in work.recipe.losses))
    number = 0.0
    for config in work.recipe.drafts:
        if isinstance(config, ChooseConfig):
            number += members * work.num_sampled_prompts * work.rates.pair_fraction
        elif isinstance(config, RewriteConfig) and config.pairs and members == 2:
            number += 0.0 if work.recipe.tasks.is_environment else num_repairs(work)
    return number


def _prefers(work: Workload) -> bool:
    return any(loss.kind == "preference" for loss in work.recipe.losses)


def _first(value: float | None, other: float) -> float:
    return other if value is None else value
