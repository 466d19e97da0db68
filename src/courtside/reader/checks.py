"""What is known of hints before the first step: those that can never train, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from courtside.recipe.reader import HumanReaderConfig
from courtside.recipe.rules import EVENT_DETECTORS, SLOTS, Rule, parse_slots
from courtside.types import Hint


@dataclass(frozen=True, slots=True, kw_only=True)
class HintTargets:
    """Turns that a hints file may name."""

    turns: Mapping[str, Collection[int]] | None
    """By the id of a conversation or stored trajectory: its assistant turns; None: trajectories are
    sampled, and have the ids of `trajectory_id`."""
    num_steps: int = 0
    batch_shape: tuple[int, int] = (0, 0)
    """Prompts of a step, and samples of a prompt."""

    def find_problem(self, hint: Hint) -> str | None:
        if self.turns is None:
            return self._find_id_problem(hint.trajectory)
        turns = self.turns.get(hint.trajectory)
        if turns is None:
            close = get_close_matches(hint.trajectory, self.turns, n=1)
            guess = f"; did you mean {close[0]!r}?" if close else ""
            return f"none of the {len(self.turns)} conversations or trajectories has this id{guess}"
        if hint.turn not in turns:
            return f"that is no turn of the assistant; its turns there are {sorted(turns)[:20]}"
        return None

    def _find_id_problem(self, id: str) -> str | None:
        parts = re.fullmatch(r"(\d{6,})-(\d{3,})-(\d+)", id)
        limits = (self.num_steps, *self.batch_shape)
        if parts and all(
            int(part) < limit for part, limit in zip(parts.groups(), limits, strict=True)
        ):
            return None
        return (
            "this run samples its trajectories, as STEP-PROMPT-SAMPLE "
            f"up to {limits[0] - 1:06d}-{limits[1] - 1:03d}-{limits[2] - 1}, and none gets this id"
        )


def find_hint_problems(
    config: HumanReaderConfig,
    hints: Sequence[Hint],
    targets: HintTargets,
    *,
    count_tokens: Callable[[str], int],
    context_length: int,
    find_splice_problem: Callable[[Hint], str | None] | None = None,
) -> Iterator[str]:
    """One line for each hint that can never train. `find_splice_problem`: inserts it into the
    recording that it names; None: there are none before the first step."""
    for hint in hints:
        problem = targets.find_problem(hint)
        if problem is None and len(hint.text) > config.max_chars:
            problem = (
                f"it has {len(hint.text):,} characters, and reader.max_chars is "
                f"{config.max_chars:,}; shorten it"
            )
        if problem is None and count_tokens(hint.text) >= context_length:
            problem = (
                f"it has {count_tokens(hint.text):,} tokens, and the model's context "
                f"{context_length:,}; shorten it"
            )
        if problem is None and find_splice_problem is not None:
            problem = find_splice_problem(hint)
        if problem is not None:
            yield f"{config.path}: hint for turn {hint.turn} of {hint.trajectory!r}: {problem}"


def find_rule_problems(
    rules: Sequence[Rule],
    *,
    privileged: Collection[str],
    kinds: Collection[str] | None,
    details: Collection[str] | None,
) -> Iterator[tuple[int, str]]:
    """Index and reason of each rule that can give no hint.

    `privileged`: fields of the tasks. `kinds`, `details`: of the environment's events; None: not
    known before it runs.
    """
    for index, rule in enumerate(rules):
        kind = rule.event if rule.event is not None else rule.detect
        is_event = rule.detect in (*EVENT_DETECTORS, "event")
        if is_event and kinds is not None and kind not in kinds:
            occurring = f"they are {', '.join(sorted(kinds))}" if kinds else "there are none here"
            yield index, f"no event is of kind {kind!r}; {occurring}{_guess(kind, kinds)}"
            continue
        fillable_slots = {"turn", *SLOTS[rule.detect], *rule.groups, *privileged}
        fillable_slots |= {*details} if is_event and details is not None else set()
        for slot in parse_slots(rule.template):
            if slot not in fillable_slots and not (is_event and details is None):
                options = ", ".join(f"{{{name}}}" for name in sorted(fillable_slots))
                yield (
                    index,
                    f"nothing fills {{{slot}}}; it has {options}{_guess(slot, fillable_slots)}",
                )
                break


def find_doubtful_slots(
    rules: Sequence[Rule], *, privileged: Collection[str]
) -> Iterator[tuple[int, str]]:
    """Index and slot, where only a detail of an event could fill it and details are not known."""
    for index, rule in enumerate(rules):
        fillable_slots = {"turn", *SLOTS[rule.detect], *rule.groups, *privileged}
        for slot in parse_slots(rule.template):
            if slot not in fillable_slots:
                yield index, slot


def _guess(name: str, options: Collection[str]) -> str:
    close = get_close_matches(name, list(options), n=1)
    return f". Did you mean {close[0]!r}?" if close else ""
