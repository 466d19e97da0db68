"""What an update says about the routers of a mixture of experts, and their load-balancing loss.

The loss is that of Switch Transformers, as in transformers, for each layer with experts, mean over
these layers: E · Σ_e f_e · P_e. f_e is the share of tokens that went to expert e (Σ f_e is the
number of experts per token), P_e the mean over tokens of the softmax of the router's logits. Both
are over all tokens of the step's trajectories whose experts the sampler has recorded, prompts
included, up to the last one that the update processes; a prefix that trajectories share counts for
each of them, padding for none. Gradients flow through P alone. As f is counted in the records
before the first pass, the sum over micro-batches is the loss of the whole batch, however it is
split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from courtside.engines.routing import ExpertRecord, PassRouting, Routers
from courtside.recipe.router_validation import LOSS_NAME
from courtside.training.metrics import MetricAccumulator

Exchange = Callable[[Any], list[Any]]


class StepRouting:
    """The routing of one step's passes: compared with the sampler's, and balanced."""

    def __init__(
        self,
        routers: Routers,
        sequences: Sequence[tuple[ExpertRecord, int]],
        *,
        coefficient: float,
        exchange: Exchange,
        device: torch.device,
    ):
        """`sequences`: as for `RouterBalance`. `coefficient`: of the load-balancing loss; 0: it is
        no part of the update."""
        self.routers, self.coefficient = routers, coefficient
        self.balance = None
        if coefficient:
            self.balance = RouterBalance(routers, sequences, exchange=exchange, device=device)

    def finish_forward(self, metrics: MetricAccumulator) -> Tensor | None:
        """Of the pass that has just run: records what its routers select, and returns its part of
        the weighted load-balancing loss."""
        routing = self.routers.current
        if routing is None:
            return None
        record_routing(routing, metrics)
        part = None if self.balance is None else self.balance.part(routing)
        routing.logits.clear()  # with their graph
        if part is None:
            return None
        metrics.add_loss(LOSS_NAME, part)
        return part * self.coefficient


class RouterBalance:
    def __init__(
        self,
        routers: Routers,
        sequences: Sequence[tuple[ExpertRecord, int]],
        *,
        exchange: Exchange,
        device: torch.device,
    ):
        """`sequences`: the record of each, and how many of its tokens the update processes.
        `exchange`: the counts of all processes that train together."""
        counts_LE = torch.zeros(routers.num_layers, routers.num_experts, dtype=torch.long)
        num_tokens = 0
        for parts, length in sequences:
            if parts:
                experts_NLK = torch.cat(list(parts))[:length].long()
                num_tokens += len(experts_NLK)
                index_LN = experts_NLK.permute(1, 0, 2).flatten(1)
                counts_LE.scatter_add_(1, index_LN, torch.ones_like(index_LN))
        of_ranks = exchange((num_tokens, counts_LE))
        self.num_tokens = sum(num for num, _ in of_ranks)
        counts_LE = sum((counts for _, counts in of_ranks), torch.zeros_like(counts_LE))
        share_LE = counts_LE.double() / max(1, self.num_tokens)
        self.share_LE = share_LE.to(device)
        """f of each layer."""

    def part(self, routing: PassRouting) -> Tensor | None:
        """The pass's addend of the loss, with its graph; None: it has no recorded token."""
        if not self.num_tokens or routing.counts_N is None:
            return None
        layers = []
        for layer, logits_NE in sorted(routing.logits.items()):
            dtype = torch.promote_types(logits_NE.dtype, torch.float32)
            probability_NE = torch.softmax(logits_NE.to(dtype), dim=-1)
            # No matmul: autocast would round it.
            sum_E = (routing.counts_N[:, None] * probability_NE).sum(0)
            num_experts = logits_NE.shape[-1]
            layers.append(num_experts * (self.share_LE[layer, :num_experts] * sum_E).sum())
        loss: Tensor = torch.stack(layers).mean() / self.num_tokens
        return loss


@torch.no_grad()
def record_routing(routing: PassRouting, metrics: MetricAccumulator) -> None:
    """How often a router of the update scores other experts highest than the sampler's did."""
    if routing.recorded_NLK is None or routing.counts_N is None:
        return
    selected_NLK, recorded_NLK = (
        experts.sort(dim=-1).values for experts in (routing.stack_selected(), routing.recorded_NLK)
    )
    is_recorded_N = routing.counts_N > 0
    differs_NL = (selected_NLK != recorded_NLK).any(-1)
    where_NL = is_recorded_N[:, None].expand_as(differs_NL)
    metrics.mean("sampler/routing_diff", differs_NL, where=where_NL)
    metrics.mean("sampler/routing_diff_tokens", differs_NL.any(-1), where=is_recorded_N)
