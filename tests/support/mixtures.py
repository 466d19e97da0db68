"""Small mixtures of experts, and their routing written by hand: the experts are given, the weights
are what each kind of router makes of its scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.model_kinds import ModelKind, build_model
from support.tiny_model import tiny_tokenizer
from torch import Tensor
from torch.nn import functional as F

from courtside.types import Scored, Trajectory

NUM_EXPERTS, TOP_K = 8, 2
COMMON: dict[str, Any] = {
    "num_hidden_layers": 3, "sliding_window": None, "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}  # fmt: skip
GROUPS: dict[str, Any] = {"n_routed_experts": NUM_EXPERTS, "n_group": 4, "topk_group": 2}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": NUM_EXPERTS, "norm_topk_prob": True},
    "mixtral": {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS},
    "olmoe": {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS},
    "gpt_oss": {
        "num_experts": NUM_EXPERTS,
        "num_local_experts": NUM_EXPERTS,
        "sliding_window": 8,
    },
    "deepseek_v3": {**GROUPS, "first_k_dense_replace": 1, "num_local_experts": NUM_EXPERTS},
    "glm4_moe": {**GROUPS, "num_local_experts": NUM_EXPERTS},
}


def mixture(kind: str, **settings: Any) -> Any:
    model = build_model(
        ModelKind(model_type=kind, settings={**COMMON, **KINDS[kind], **settings}), seed=1
    )
    for router in routers_of(model):
        torch.nn.init.normal_(router.weight, std=0.5)
    return model


@torch.no_grad()
def make_near_ties(model: Any) -> None:
    """From here on the scores of each four experts differ by as much as rounding."""
    for router in routers_of(model):
        same = torch.arange(NUM_EXPERTS) // 4 * 4
        router.weight.copy_(router.weight[same])
        if getattr(router, "bias", None) is not None:
            router.bias.copy_(router.bias[same])
    jitter_routers(model)


@torch.no_grad()
def jitter_routers(model: Any, scale: float = 1e-6) -> None:
    """As much as rounding: it changes which of four such experts score highest, nothing else."""
    for router in routers_of(model):
        router.weight *= 1 + scale * torch.randn(router.weight.shape).to(router.weight)


def save_mixture(folder: Path, kind: str, **settings: Any) -> Path:
    mixture(kind, **settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def routers_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


# ── the same, naively ────────────────────────────────────────────────────────────────────────────


@contextmanager
def forced_experts(model: Any, scored: list[Scored]) -> Iterator[Any]:
    """A model called with one sequence at a time, whose tokens go to the experts that its
    trajectory has recorded; others to those that score highest."""
    records = {
        s.trajectory.token_ids: torch.cat(s.trajectory.routed_experts).long() for s in scored
    }
    routers = routers_of(model)
    current: list[Tensor] = []

    def route(layer: int, router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        scores_first = hasattr(router, "e_score_correction_bias")  # DeepSeek, GLM
        if scores_first:
            logits = F.linear(hidden.float(), router.weight.float())
            scores = logits.sigmoid()
        else:
            logits = F.linear(hidden, router.weight, getattr(router, "bias", None))
            scores = logits
        experts = scores.topk(TOP_K).indices
        experts[: len(current[0])] = current[0][: len(experts), layer]
        if scores_first:
            weights = scores.gather(-1, experts)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = weights * router.routed_scaling_factor
        elif "GptOss" in type(router).__name__:
            weights = logits.gather(-1, experts).softmax(-1)
        else:
            weights = logits.float().softmax(-1).gather(-1, experts)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(hidden.dtype), experts

    class Naive:
        def __call__(self, input_ids: Tensor) -> Any:
            current[:] = [records[tuple(input_ids[0].tolist())]]
            return model(input_ids=input_ids, use_cache=False)

    for layer, router in enumerate(routers):
        router.forward = lambda hidden, layer=layer, router=router: route(layer, router, hidden)
    try:
        yield Naive()
    finally:
        for router in routers:
            del router.forward


def with_random_experts(scored: list[Scored], num_layers: int) -> list[Scored]:
    """Any experts in place of the recorded ones; the same for the prompt of a task."""
    from dataclasses import replace

    def draw(seed: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(count, num_layers, NUM_EXPERTS, generator=generator)
        return noise.argsort(-1)[..., :TOP_K].to(torch.uint8)

    def change(number: int, trajectory: Trajectory) -> Trajectory:
        prompt, answer = trajectory.turns
        seed = sum(prompt.token_ids)
        turns = (
            replace(prompt, routed_experts=(draw(seed, len(prompt.token_ids)),)),
            replace(answer, routed_experts=(draw(number, len(answer.token_ids) - 1),)),
        )
        return replace(trajectory, turns=turns)

    return [replace(s, trajectory=change(i, s.trajectory)) for i, s in enumerate(scored)]
