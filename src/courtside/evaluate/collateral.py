"""What training changed elsewhere: KL(before ‖ after) of the student over the whole vocabulary.

It is taken at every token of turns that the student wrote before training, right or wrong, and of
its answers to prompts that have nothing to do with the tasks. Turns selected by their outcome would
bias it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from torch import Tensor

from courtside.chat.template import ChatTemplate
from courtside.engines.base import InProcessEngine, SampleRequest, Sampling, ScoreRequest
from courtside.evaluate.untrained import measure_untrained
from courtside.seeds import seed_for
from courtside.types import Message, Trajectory

NUM_SCORED = 16
"""Sequences whose hidden states are held at once."""
CHUNK = 256
"""Positions whose logits are computed at once."""
NUM_ANSWER_TOKENS = 48
PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis in simple words.",
    "Give me three ideas for a birthday present.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Name four planets.",
    "Why is the sky blue?",
    "Tell me a joke about cats.",
    "Summarize the story of Romeo and Juliet in two sentences.",
    "What should I wear in the rain?",
    "List the seasons of the year.",
    "Who wrote Don Quixote?",
    "What does a doctor do?",
    "How many days has a week?",
    "Write a polite email to cancel a meeting.",
    "What is a synonym of 'happy'?",
    "Describe a sunset.",
    "How does a bicycle work?",
    "Give me a recipe for pancakes.",
    "What is the difference between a lake and a river?",
    "Write a Python function that adds two numbers.",
    "What is gravity?",
)


def measure_collateral(
    before: Sequence[Trajectory],
    load_untrained: Callable[[], InProcessEngine],
    trained: InProcessEngine,
    template: ChatTemplate,
    *,
    seed: int,
) -> dict[str, float]:
    """All `collateral/…`. The untrained student is in memory only meanwhile."""

    def measure(untrained: InProcessEngine) -> dict[str, float]:
        return {
            **collateral_kl(before, untrained, trained),
            **collateral_kl_on_prompts(untrained, trained, template, seed=seed),
        }

    return measure_untrained(load_untrained, measure)


def collateral_kl(
    before: Sequence[Trajectory], untrained: InProcessEngine, trained: InProcessEngine
) -> dict[str, float]:
    """In nats per token, on what `untrained` sampled: `collateral/turns` over all turns, and
    `collateral/DECISION` over those that made that kind of decision."""
    sampled = [t for t in before if t.num_completion_tokens]
    requests = [ScoreRequest.of_trajectory(t) for t in sampled]
    values: list[float] = []
    by_decision: dict[str, list[float]] = {}
    for trajectory, kl_T in zip(sampled, kl_by_token(requests, untrained, trained), strict=True):
        values += kl_T.tolist()
        for turn, kl in zip(trajectory.turn_of, kl_T.tolist(), strict=True):
            if (decision := trajectory.turns[turn].decision) is not None:
                by_decision.setdefault(decision, []).append(kl)
    if not values:
        return {}
    return {
        **{f"collateral/{name}": fmean(by_decision[name]) for name in sorted(by_decision)},
        "collateral/turns": fmean(values),
    }


def collateral_kl_on_prompts(
    untrained: InProcessEngine, trained: InProcessEngine, template: ChatTemplate, *, seed: int
) -> dict[str, float]:
    """`collateral/prompts`: the same on answers of `untrained` to `PROMPTS`."""
    prompts = [template.prompt_ids((Message(role="user", content=text),)) for text in PROMPTS]
    requests = [
        SampleRequest(prompt_ids=ids, seed=seed_for(seed, "collateral", i))
        for i, ids in enumerate(prompts)
    ]
    samples = untrained.sample(requests, Sampling(max_new_tokens=NUM_ANSWER_TOKENS))
    scored = [
        ScoreRequest(
            token_ids=ids + sample.token_ids,
            scored=(False,) * len(ids) + (True,) * len(sample.token_ids),
        )
        for ids, sample in zip(prompts, samples, strict=True)
    ]
    kl_N = torch.cat(kl_by_token(scored, untrained, trained))
    return {"collateral/prompts": float(kl_N.mean())}


@torch.no_grad()
def kl_by_token(
    requests: Sequence[ScoreRequest], first: InProcessEngine, second: InProcessEngine
) -> list[Tensor]:
    """KL(first ‖ second) at each scored token of each request, at the request's temperature."""
    results: list[Tensor] = []
    for start in range(0, len(requests), NUM_SCORED):
        part = requests[start : start + NUM_SCORED]
        both = zip(
            part, first.score(part, want="hidden"), second.score(part, want="hidden"), strict=True
        )
        for request, scores, other_scores in both:
            assert scores.hidden_TD is not None and other_scores.hidden_TD is not None
            chunks = zip(
                scores.hidden_TD.split(CHUNK), other_scores.hidden_TD.split(CHUNK), strict=True
            )
            kl_T = [
                _kl(first.head(first_ND), second.head(second_ND), request.temperature)
                for first_ND, second_ND in chunks
            ]
            results.append(torch.cat(kl_T).cpu())
    return results


def _kl(first_NV: Tensor, second_NV: Tensor, temperature: float) -> Tensor:
    logp_NV = (first_NV.float() / temperature).log_softmax(-1)
    other_NV = (second_NV.float() / temperature).log_softmax(-1)
    return (logp_NV.exp() * (logp_NV - other_NV)).sum(-1).double()
