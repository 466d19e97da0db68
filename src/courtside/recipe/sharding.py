"""[sharding]: how several processes train one student together."""

from __future__ import annotations

from pydantic import PositiveFloat

from courtside.recipe.base import Section


class ShardingConfig(Section):
    """How many processes there are is the launcher's to say: --nproc, or torchrun."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass, and gather them again for its
    backward pass. False: less communication, and the whole model in memory during a pass."""
    timeout_minutes: PositiveFloat = 60.0
    """How long one process waits for another before the run ends: longer than the rollout of one
    may take after that of the others."""
