"""The rates of a recipe's corrections: given, read from a run, or the most. Each is noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from courtside.errors import PlanError
from courtside.planning.corrections import Rates, count_takeovers, list_questions
from courtside.planning.workload import Workload
from courtside.recipe import Recipe
from courtside.recipe.drafts import ChooseConfig, CriticizeConfig, DraftConfig, RewriteConfig
from courtside.report.summary import format_number

SENTENCES = {
    "failed_fraction": "of the drafts fail",
    "pair_fraction": "of the prompts give a chosen pair",
    "repair_fraction": "of the drafts that the rewriter is asked about get a repair that is used",
    "critique_fraction": "of the drafts that the critic is asked about get a critique",
    "takeover_fraction": "of the take-overs train",
}
QUESTION_SIZES = ("question_tokens", "reply_tokens")
TAKEOVER_SIZES = ("prefix_tokens", "takeover_tokens")


def make_rates(values: Mapping[str, float]) -> Rates:
    names = [field.name for field in fields(Rates)]
    for name in values:
        if name not in names:
            raise PlanError(f"--assume {name}: is not known. Known: {', '.join(names)}")
    return Rates(**values)


def list_used_rates(recipe: Recipe) -> set[str]:
    """Names of the rates that a plan of the recipe depends on."""
    names = {name for config in recipe.drafts for name in _list_of_stage(config)}
    if (takeover := recipe.takeover) is not None:
        names |= {"takeover_fraction", *TAKEOVER_SIZES}
        names |= {"failed_fraction"} if takeover.select != "all" else set()
        names |= {"call_seconds"} if takeover.endpoint is not None else set()
    return names


def _list_of_stage(config: DraftConfig) -> Iterator[str]:
    match config:
        case ChooseConfig():
            yield "pair_fraction"
            if config.by != "judge":
                return
        case RewriteConfig():
            yield from ("repair_fraction", "repair_tokens")
            if config.require_better:
                yield "failed_fraction"
        case CriticizeConfig():
            yield "critique_fraction"
            if config.skip_passed:
                yield "failed_fraction"
    yield from QUESTION_SIZES
    if config.endpoint is not None:
        yield "call_seconds"


def refuse_unused_rates(values: Mapping[str, float], recipes: Sequence[Recipe]) -> None:
    make_rates(values)
    names = {name for recipe in recipes for name in list_used_rates(recipe)}
    for name in values:
        if name not in names:
            raise PlanError(
                f"--assume {name}: nothing in this recipe depends on it. "
                + (f"It depends on {', '.join(sorted(names))}" if names else "Remove it")
            )


def describe_rates(
    work: Workload, explicit: Mapping[str, float], measured: Mapping[str, float], run: str
) -> list[str]:
    """A sentence for each assumption that the recipe's corrections need, with its source."""

    def name_source(*names: str) -> str:
        for values, source in ((explicit, "given"), (measured, f"of {run}")):
            if any(name in values for name in names):
                return source
        return f"assumed; --assume {names[0]}=…"

    relevant = list_used_rates(work.recipe)
    notes = []
    for name, sentence in SENTENCES.items():
        if name in relevant:
            most = "" if name in {*explicit, *measured} else "; the most"
            value = getattr(work.rates, name)
            notes.append(f"{value:.0%} {sentence} ({name_source(name)}{most})")
    for questions in list_questions(work):
        whom = "the teacher" if questions.num_concurrent is None else "an endpoint"
        notes.append(
            f"{questions.stage}: {format_number(questions.number)} questions a step to {whom}, of "
            f"{questions.input_tokens:,.0f} tokens, with replies of "
            f"{questions.output_tokens:,.0f} ({name_source(*QUESTION_SIZES)})"
        )
    if (takeovers := count_takeovers(work)) is not None:
        by = "" if takeovers.num_concurrent is None else " by an endpoint"
        notes.append(
            f"take-overs{by} after {takeovers.prefix:,.0f} tokens of a draft, of "
            f"{takeovers.new:,.0f} sampled tokens ({name_source(*TAKEOVER_SIZES)})"
        )
    if "call_seconds" in relevant and work.rates.call_seconds is None:
        notes.append("an endpoint's calls take no time (assumed; --assume call_seconds=…)")
    return notes


# ── of an earlier run ────────────────────────────────────────────────────────────────────────────


def read_rates(
    work: Workload, rows: Sequence[Mapping[str, Any]], tokens: tuple[int, int] | None
) -> dict[str, float]:
    """What the metrics of a run say. `tokens`: in and out of questions. None: not known apart."""

    def total(name: str) -> float:
        return float(sum(row.get(name, 0) for row in rows))

    recipe, values = work.recipe, dict[str, float]()
    drafts = len(rows) * work.num_student_rows

    def add(name: str, part: float, whole: float) -> None:
        if whole:
            highest = 1.0 if name.endswith("_fraction") else float("inf")
            values[name] = min(highest, part / whole)

    num_questions = num_rounds = 0.0
    for config in recipe.drafts:
        kind = f"drafts/{config.kind}"
        requests = total(f"{kind}/requests")
        num_questions += requests
        num_rounds += requests / config.endpoint.max_concurrency if config.endpoint else 0.0
        if isinstance(config, ChooseConfig):
            add("pair_fraction", total(f"{kind}/pairs"), len(rows) * work.num_sampled_prompts)
        elif isinstance(config, RewriteConfig):
            add("repair_fraction", total(f"{kind}/repairs"), requests)
            add("failed_fraction", requests + total(f"{kind}/skipped/budget"), drafts)
        else:
            add("critique_fraction", total(f"{kind}/critiques"), requests)
            add("failed_fraction", requests, drafts)
    if recipe.takeover is not None:
        add("takeover_fraction", total("takeover/trained"), total("takeover/drafts"))
        add("takeover_tokens", total("takeover/sampled_tokens"), total("takeover/played"))
        add("failed_fraction", total("takeover/drafts"), drafts)
    seconds = total("seconds/drafts")
    if recipe.takeover is not None and (endpoint := recipe.takeover.endpoint) is not None:
        num_rounds += total("takeover/requests") / endpoint.max_concurrency
        seconds += total("seconds/teacher")  # with what a [teacher] scores, where there is one
    add("call_seconds", seconds, num_rounds)
    if tokens is not None and num_questions:
        add("question_tokens", tokens[0], num_questions)
        add("reply_tokens", tokens[1], num_questions)
    return {name: value for name, value in values.items() if name in list_used_rates(recipe)}
