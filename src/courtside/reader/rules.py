"""A reader of declared rules: a detector, and the hint for turns that it finds."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from courtside.reader.base import ReaderOutput
from courtside.reader.detectors import TurnLog, detect_mistake
from courtside.recipe.reader import RuleReaderConfig
from courtside.recipe.rules import ERROR_PATTERN, parse_slots
from courtside.sanitize import escape_control_characters, to_one_line, truncate
from courtside.seeds import seed_for
from courtside.types import Hint, Trajectory

FACT_CHARS = 200
"""Of a text from the trajectory that goes into a hint: an error message can be a whole page."""
LONG_FACTS = frozenset({"message", "arguments", "match"})


class RuleReader:
    def __init__(self, config: RuleReaderConfig, *, seed: int):
        self.config = config
        self.seed = seed
        self.error = re.compile(config.error_pattern or ERROR_PATTERN)
        self.clean_rules = tuple(rule for rule in config.rules if not rule.needs_finding)

    def __call__(self, trajectories: Sequence[Trajectory]) -> ReaderOutput:
        hints: list[Hint] = []
        counts: Counter[str] = Counter()
        for trajectory in trajectories:
            log = TurnLog(trajectory, self.error)
            for turn in trajectory.hintable_turns:
                hints += self._hints_for_turn(log, turn, counts)
        return ReaderOutput(hints=tuple(hints), counts=counts)

    def _hints_for_turn(self, log: TurnLog, turn: int, counts: Counter[str]) -> list[Hint]:
        hints: list[Hint] = []
        clean = True
        for rule in self.config.rules:
            finding = detect_mistake(rule, log, turn)
            if finding is None:
                continue
            clean = False
            counts[f"rules/{rule.detect}"] += 1
            facts = {"turn": str(turn), **finding.facts}
            text = self._fill_template(rule.template, facts, log.trajectory, counts)
            if text is not None:
                hints.append(
                    Hint(
                        trajectory=log.trajectory.id,
                        turn=turn,
                        text=text,
                        source=f"rules:{rule.event or rule.detect}",
                        reason=truncate(to_one_line(finding.reason), FACT_CHARS),
                        bad_span=finding.bad_span,
                    )
                )
        if clean and self.config.false_positive_rate:
            hints += self._false_positive(log.trajectory, turn, counts)
        return hints

    def _false_positive(
        self, trajectory: Trajectory, turn: int, counts: Counter[str]
    ) -> list[Hint]:
        rng = random.Random(seed_for(self.seed, "false_positive", trajectory.id, turn))
        if rng.random() >= self.config.false_positive_rate:
            return []
        rule = rng.choice(self.clean_rules)
        counts["rules/false_positive"] += 1
        text = self._fill_template(rule.template, {"turn": str(turn)}, trajectory, counts)
        if text is None:
            return []
        reason = f"noise: {rule.detect} found nothing here"
        return [
            Hint(
                trajectory=trajectory.id,
                turn=turn,
                text=text,
                source="rules:false_positive",
                reason=reason,
            )
        ]

    def _fill_template(
        self,
        template: str,
        facts: Mapping[str, str],
        trajectory: Trajectory,
        counts: Counter[str],
    ) -> str | None:
        """The template's words; None, and counted, where they cannot be used."""
        facts_by_slot = {
            **trajectory.task.privileged,
            **{name: _fact(name, text) for name, text in facts.items()},
        }
        if any(not facts_by_slot.get(slot, "").strip() for slot in parse_slots(template)):
            counts["dropped/missing_slot"] += 1
            return None
        text = escape_control_characters(template.format_map(facts_by_slot)).strip()
        if not text:
            counts["dropped/empty_hint"] += 1
            return None
        if len(text) > self.config.max_chars:
            counts["dropped/long_hint"] += 1
            return None
        return text


def _fact(name: str, text: str) -> str:
    """As it goes into a hint. What the assistant or a tool wrote can be long; a name is not cut."""
    line = to_one_line(text)
    return truncate(line, FACT_CHARS) if name in LONG_FACTS else line
