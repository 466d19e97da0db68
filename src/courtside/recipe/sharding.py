"""[sharding]: how several processes train one student together."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from courtside.recipe.base import Section

MAX_WHOLE_BYTES = 20e9
"""Of a model that never trains, for sharding.teachers = 'auto': 8 billion parameters in bfloat16
are whole, and 14 billion in shards."""


class ShardingConfig(Section):
    """How many processes there are is the launcher's to say: --nproc, or torchrun."""

    zero_stage: Literal[1, 2, 3] = 3
    """What is in shards, as in ZeRO: optimizer state (1), gradients, too (2), and weights (3).
    3 gathers a layer for each forward and each backward pass; 2 gathers it once for both, with the
    whole model in memory during a pass. 1 gathers all weights once for a step and reduces their
    gradients once, in its last pass: the least communication, with whole weights and gradients in
    memory during an update. All three train the same."""
    teachers: Literal["auto", "whole", "shards"] = "auto"
    """Weights of teachers and the reference, where they are not those of the student's own copy:
    whole on every process, or in shards over all of them, where each forward pass gathers one layer
    after the other. auto: shards for models of more than 20 GB. Moving averages are always kept in
    shards; this decides whether a whole copy scores, too."""
    timeout_minutes: PositiveFloat = 60.0
    """How long one process waits for another before the run ends: longer than the rollout of one
    may take after that of the others."""

    def shards_teacher(self, num_bytes: float, *, num_ranks: int) -> bool:
        """Whether a model of this size that never trains is in shards."""
        if self.teachers == "auto":
            return num_ranks > 1 and num_bytes > MAX_WHOLE_BYTES
        return self.teachers == "shards"
