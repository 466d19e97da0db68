"""Faults of environments over a run: the first is printed, and too many of them stop it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from courtside.environments.guard import EnvironmentFault
from courtside.errors import EnvironmentFaultsError

RECENT = 64
"""Episodes over which the fraction is taken, or those of the batch if they are more."""
MIN_FAULTS = 3
"""Fewer do not stop a run, unless no episode went well."""


@dataclass(slots=True, kw_only=True)
class FaultMonitor:
    max_fraction: float
    """`rollout.limits.max_fault_fraction`."""
    recent: list[str | None] = field(default_factory=list)
    """The fault of each recent episode; None: it had none."""
    has_printed: bool = False

    def print_first(self, fault: EnvironmentFault, *, where: str) -> None:
        if not self.has_printed:
            self.has_printed = True
            warnings.warn(
                f"the environment has a bug: {fault} ({where}). Such episodes end there without a "
                "grade and are counted as environment_faults, not as errors of the student; only "
                f"this one is printed. `courtside check-env` finds such bugs.\n{fault.trace}",
                stacklevel=2,
            )

    def check(self, faults: Sequence[str | None]) -> None:
        """Takes the faults of a batch of episodes; raises where they are too many."""
        self.recent = [*self.recent, *faults][-max(RECENT, len(faults)) :]
        messages = [fault for fault in self.recent if fault is not None]
        num, total = len(messages), len(self.recent)
        if num <= self.max_fraction * total or (num < MIN_FAULTS and num < total):
            return
        first = messages[0]
        self.recent = []
        raise EnvironmentFaultsError(
            f"{num} of the last {total} episodes were ended by a bug in the environment, more "
            f"than rollout.limits.max_fault_fraction = {self.max_fraction:g} allows. The first: "
            f"{first}. `courtside check-env` shows all kinds of them; mend the environment and go "
            "on in the same folder"
        )
