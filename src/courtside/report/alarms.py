"""Alarms of a run: what its report shows first, because the numbers alone would not say it."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from courtside.errors import RunError, UserError
from courtside.recipe import Recipe
from courtside.report.console import RunConsole
from courtside.report.folder.folder import RunFolder
from courtside.report.metrics import DRAFTS, READER, TAKEOVER
from courtside.types import Evaluation, HintOutcome, Scored, Update

HARMFUL_HINTS, UNHEEDED_HINTS = "harmful_hints", "unheeded_hints"
FEW_REPAIRS, FEW_TAKEOVERS = "few_repairs", "few_takeovers"
"""Kinds of alarm."""
MIN_CORRECTIONS, FEW_CORRECTIONS = 64, 0.1
"""Questions for a repair, or take-overs, of the latest steps that an alarm needs, and the fraction
of them below which it is raised: where 2 of 84 questions gave a repair, steps on those few repairs
ruined the student."""
NUM_COMPARED = 3
"""Steps with hints at the start of a run, and lately, whose shifts are compared."""
MIN_FIRST_SHIFT, UNHEEDED_FRACTION = 1.0, 0.1
"""In nats, and of the first shift: in six runs the fraction was below this where a live teacher no
longer heeded its hints, and above it where it did."""
STEPS_BETWEEN_ALARMS = 10
"""Of one kind."""


class RunAlarms:
    """Alarms go to the run folder and the console."""

    def __init__(self, folder: RunFolder, console: RunConsole) -> None:
        self.folder, self.console = folder, console

    def check_hints(self, step: int, hints: Sequence[HintOutcome]) -> None:
        """Alarm where most hints do harm, and again after some steps where they still do."""
        self._raise_now_and_then(step, HARMFUL_HINTS, check_harmful_hints(hints))

    def check_shifts(self, step: int) -> None:
        """Alarm where hints move their turns much less than at the start of the run."""
        self._raise_now_and_then(step, UNHEEDED_HINTS, check_unheeded_hints(self.folder.metrics()))

    def check_repairs(self, step: int) -> None:
        """Alarm where hardly any question of a `rewrite` stage gives a repair that is used."""
        self._raise_now_and_then(step, FEW_REPAIRS, check_few_repairs(self.folder.metrics()))

    def check_takeovers(self, step: int) -> None:
        """Alarm where hardly any take-over trains."""
        self._raise_now_and_then(step, FEW_TAKEOVERS, check_few_takeovers(self.folder.metrics()))

    def _raise_now_and_then(self, step: int, kind: str, alarm: str | None) -> None:
        if alarm is None:
            return
        steps = [row["step"] for row in self.folder.alarms() if row.get("kind") == kind]
        if not steps or step - max(steps) >= STEPS_BETWEEN_ALARMS:
            self.folder.record_alarm({"step": step, "kind": kind, "message": alarm})
            self.console.alarm(kind, f"step {step + 1}: {alarm}", step=step)

    def check_finished(self, num_steps: int) -> None:
        """After the last step."""
        rows = self.folder.metrics()
        alarms = {
            "nothing_trained": check_nothing_trained(rows),
            "missing_metrics": check_missing_metrics(rows, num_steps),
        }
        for kind, alarm in alarms.items():
            if alarm is not None:
                self._raise(num_steps - 1, kind, alarm)

    def check_faults(self, evaluation: Evaluation) -> None:
        if faults := evaluation.metrics.get("environment_faults", 0):
            message = (
                f"{evaluation.policy} on {evaluation.split} tasks: {faults:g} episodes were ended "
                "by bugs in the environment and are not in the score"
            )
            self._raise(evaluation.step, "environment_faults", message)

    def report_unmeasured(self, what: str, error: Exception, *, step: int) -> None:
        """The evaluation is tried again by the next command."""
        reason = str(error)
        if not isinstance(error, UserError | RunError):
            reason = f"{type(error).__name__}: {error}"
            warnings.warn("".join(traceback.format_exception(error)), stacklevel=2)
        message = f"not measured after training: {what} ({reason})"
        self._raise(step, "not_measured", message)

    def _raise(self, step: int, kind: str, message: str) -> None:
        self.folder.record_alarm({"step": step, "kind": kind, "message": message})
        self.console.alarm(kind, message, step=step)


def check_empty_update(recipe: Recipe, scored: Sequence[Scored], update: Update) -> None:
    """An empty batch is not a zero loss: raise unless the student made no mistake to correct."""
    if recipe.takeover is not None:
        outcomes = [s.takeover for s in scored if s.takeover is not None]
        if update.step > 0 or not outcomes or any(o.num_sampled_tokens for o in outcomes):
            return
        reasons = sorted({outcome.drop_reason or "" for outcome in outcomes})
        raise RunError(
            f"step {update.step}: the teacher took over none of {len(outcomes)} drafts "
            f"({', '.join(reasons)}), so there is nothing to train on. See takeover.at, and "
            "docs/takeover.md for what each reason means"
        )
    if recipe.reader is not None:
        hints = [hint for s in scored for hint in s.hints]
        # A threshold that drops every hint of the first step is a mistake in the recipe; later the
        # student may no longer need any of them. Harmful hints have an alarm of their own.
        if not hints or any(hint.drop_reason == "harmful" for hint in hints):
            return
        if update.step > 0 and all(hint.drop_reason is not None for hint in hints):
            return
    elif scored and recipe.rollout.corrections and all(x.on == "dataset" for x in recipe.losses):
        num_wrong = sum(bool(turn.events) for s in scored for turn in s.trajectory.turns)
        if not num_wrong:
            return
        raise RunError(
            f"step {update.step}: {num_wrong} turns went wrong, and the environment says of none "
            "what would have been right, so rollout.corrections has nothing to imitate. Put it "
            "into the events' details as `correct`, or remove rollout.corrections"
        )
    if update.metrics.get("reward/zero_variance_groups"):
        return  # zero_variance_groups = "drop": all samples of every prompt have equal rewards
    if scored and recipe.drafts:
        return  # no sample is better than another, or none needs a correction: `drafts/` counts why
    has_no_context = recipe.draft_contexts and not any(s.has_target for s in scored)
    if scored and has_no_context and (update.step > 0 or all_passed(scored)):
        # Feedback is about failures, and an able student has none. A first step without a single
        # text is a mistake in the recipe; later a batch may have no failure, or no passing sibling.
        return
    raise RunError(
        f"step {update.step}: no trajectory has anything to train on (of {len(scored)}, "
        f"{sum(not s.has_target for s in scored)} have no teacher). An empty batch is not a zero "
        "loss. Look at the tasks, the teacher's context and each loss's `on`"
    )


def all_passed(scored: Sequence[Scored]) -> bool:
    return all(s.trajectory.grade is not None and s.trajectory.grade.passed for s in scored)


def check_harmful_hints(hints: Sequence[HintOutcome]) -> str | None:
    """The alarm of a step in which at least half of the measured hints make their turn more likely;
    None: fewer do."""
    measured = [outcome.shift for outcome in hints if outcome.shift is not None]
    harmful = [outcome for outcome in hints if outcome.is_harmful]
    if not harmful or 2 * len(harmful) < len(measured):
        return None
    num_trained = sum(outcome.drop_reason is None for outcome in harmful)
    consequence = (
        f"{num_trained} of these trained, as hints.harmful = 'train' says: they teach the mistake"
        if num_trained
        else "they would teach the mistake, and did not train"
    )
    mean = sum(measured) / len(measured)
    return (
        f"{len(harmful)} of {len(measured)} hints make their turn more likely (mean shift "
        f"{mean:+.2f} nats); {consequence}. Say what is right instead of quoting what went wrong, "
        "check that each hint is for the turn it names, and see the hints in the report"
    )


def check_unheeded_hints(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The alarm of a run whose last hints move their turns by a tenth of what the first ones did,
    or less; None: they move them, or there were too few."""
    shifts = [row["hints/shift"] for row in rows if row.get("hints/shift") is not None]
    if len(shifts) < 2 * NUM_COMPARED:
        return None
    first, last = (
        sum(part) / NUM_COMPARED for part in (shifts[:NUM_COMPARED], shifts[-NUM_COMPARED:])
    )
    if first < MIN_FIRST_SHIFT or last >= UNHEEDED_FRACTION * first:
        return None
    return (
        f"hints move their turns by {last:+.2f} nats now, where it was {first:+.2f} in the first "
        "steps: the teacher hardly heeds them any more, so they teach little. A teacher with "
        "weights = 'live' unlearns it together with the student; 'frozen' and 'ema' hold it longer"
    )


def check_few_repairs(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The alarm of a run whose last `MIN_CORRECTIONS` questions gave few repairs that are used;
    None: they gave enough, or there were too few questions."""
    rewrite = f"{DRAFTS}rewrite/"
    few = find_few(rows, f"{rewrite}requests", f"{rewrite}repairs", reasons=f"{rewrite}dropped/")
    if few is None:
        return None
    return (
        f"{few.num_used} of the last {few.num_wanted} questions for a repair gave one that is used "
        f"({few.reasons}): each step trains on a few answers, and so few can ruin the student. "
        "Look at the replies with `courtside view`; see drafts.prompt and drafts.reference, ask a "
        "stronger model, or lower the learning rate"
    )


def check_few_takeovers(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The alarm of a run of whose last `MIN_CORRECTIONS` take-overs few train; None: enough did, or
    there were too few."""
    few = find_few(rows, f"{TAKEOVER}drafts", f"{TAKEOVER}trained", reasons=f"{TAKEOVER}dropped/")
    if few is None:
        return None
    return (
        f"{few.num_used} of the last {few.num_wanted} drafts that were to be taken over gave one "
        f"that trains ({few.reasons}): each step trains on a few, and so few can ruin the student. "
        "docs/takeover.md says what each reason means; see takeover.at and takeover.context, let a "
        "stronger model take over, or lower the learning rate"
    )


class FewUsed(NamedTuple):
    num_used: int
    num_wanted: int
    reasons: str


def find_few(
    rows: Sequence[Mapping[str, Any]], wanted_key: str, used_key: str, *, reasons: str
) -> FewUsed | None:
    """The latest steps with `MIN_CORRECTIONS` corrections that were wanted, by the names of the
    counts; None: enough of them are used, or there were fewer."""
    num_wanted = num_used = 0
    dropped: Counter[str] = Counter()
    for row in reversed(rows):
        if num_wanted >= MIN_CORRECTIONS:
            break
        num_wanted += row.get(wanted_key, 0)
        num_used += row.get(used_key, 0)
        dropped.update({k.removeprefix(reasons): n for k, n in row.items() if reasons in k})
    if num_wanted < MIN_CORRECTIONS or num_used >= FEW_CORRECTIONS * num_wanted:
        return None
    why = ", ".join(f"{reason} {n}" for reason, n in dropped.most_common())
    return FewUsed(num_used, num_wanted, why)


def check_nothing_trained(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The alarm of a run in which no step trained a token, or had a gradient where all rewards were
    equal; None: some did."""
    num_groups = sum(row.get("reward/groups", 0) for row in rows)
    num_equal = sum(row.get("reward/zero_variance_groups", 0) for row in rows)
    is_equal = 0 < num_groups == num_equal
    has_tokens = any(row[key] for row in rows for key in row if key.startswith("tokens/"))
    if has_tokens and not (is_equal and all(row.get("grad_norm") == 0 for row in rows)):
        return None
    what = "trained a single token: the weights did not change"
    if has_tokens:
        what = "had a gradient: nothing was learned"
    result = f"none of the {len(rows)} steps {what}"
    drafts: Counter[str] = Counter()
    for row in rows:
        drafts.update({name: n for name, n in row.items() if name.startswith(DRAFTS) and n})
    if drafts:
        text = ", ".join(f"{name.removeprefix(DRAFTS)} {n}" for name, n in sorted(drafts.items()))
        return f"{result}. The draft stages counted over all steps: {text}."
    takeovers: Counter[str] = Counter()
    for row in rows:
        dropped = f"{TAKEOVER}dropped/"
        takeovers.update({k.removeprefix(dropped): n for k, n in row.items() if dropped in k})
    if takeovers:
        text = ", ".join(f"{reason} {n}" for reason, n in takeovers.most_common())
        return f"{result}. No draft that was taken over trains: {text}."
    if is_equal:
        return (
            f"{result}. The samples of each of {num_groups} prompts had equal rewards, so none was "
            "better than another: give tasks that the student solves sometimes, more "
            "rollout.samples_per_prompt, or a reward that tells its answers apart."
        )
    if not any("hints/trained" in row for row in rows):
        return f"{result}. No loss applies to any token; see `on` of the losses."
    counts: Counter[str] = Counter()
    for row in rows:
        names = (key for key in row if key.startswith((READER, "hints/dropped/")))
        counts.update({name.removeprefix(READER): row[name] for name in names if row[name]})
    if counts:
        text = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
        return f"{result}. The reader counted over all steps: {text}."
    kinds = sorted({key.removeprefix("events/") for row in rows for key in row
                    if key.startswith("events/")})  # fmt: skip
    events = (
        f"the environment reported events of kind {', '.join(kinds)}, and no rule detects one of "
        "them; add a rule for it to reader.rules"
        if kinds
        else "no event was reported and no text matched; look at some turns with `courtside view`"
    )
    return f"{result}. The reader proposed no hint in any step: {events}."


def check_missing_metrics(rows: Sequence[Mapping[str, Any]], num_steps: int) -> str | None:
    """The alarm of a run whose metrics.jsonl lost steps that were trained; None: all are there."""
    missing = sorted(set(range(num_steps)) - {row["step"] for row in rows})
    if not missing:
        return None
    return (
        f"metrics.jsonl has no row of {len(missing)} of {num_steps} steps (from {missing[0]} to "
        f"{missing[-1]}): the file was deleted or changed under the run. The weights are complete; "
        "the curves of the report have a hole"
    )
