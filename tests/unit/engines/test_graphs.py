"""The graphed loop draws what the eager one draws. On a CPU its step is called, not replayed."""

from __future__ import annotations

import pytest
from tiny import tiny_model, tiny_tokenizer

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.graphs import KEPT, Decoders
from courtside.engines.transformers import TransformersEngine

REQUESTS = [
    SampleRequest(prompt_ids=prompt, seed=seed)
    for prompt in ((0, 5, 9), (0, 7, 7, 7, 30, 31), (0, 40))
    for seed in (1, 2, 3)
]


def engine(*, graphed: bool) -> TransformersEngine:
    made = TransformersEngine(tiny_model().double(), tiny_tokenizer(), name="tiny")
    made.decoders = Decoders(made.model, made.head) if graphed else None
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_same_samples_as_the_eager_loop(temperature: float) -> None:
    sampling = Sampling(max_new_tokens=40, temperature=temperature)
    eager = engine(graphed=False).sample(REQUESTS, sampling)
    graphed_engine = engine(graphed=True)
    graphed = graphed_engine.sample(REQUESTS, sampling)
    assert [s.token_ids for s in graphed] == [s.token_ids for s in eager]
    assert [s.stop for s in graphed] == [s.stop for s in eager]
    for ours, theirs in zip(graphed, eager, strict=True):
        assert ours.logp == pytest.approx(theirs.logp, abs=1e-5)
    # A graph that was used before starts clean.
    again = graphed_engine.sample(REQUESTS[:4], sampling)
    assert [s.token_ids for s in again] == [s.token_ids for s in eager[:4]]


def test_other_weights_get_another_graph_and_old_ones_go() -> None:
    made = engine(graphed=True)
    assert made.decoders is not None
    sampling = Sampling(max_new_tokens=4)
    before = made.sample(REQUESTS, sampling)
    for parameter in made.model.parameters():
        parameter.data = parameter.data * 0.5  # a new address, as when weights are lent
    after = made.sample(REQUESTS, sampling)
    fresh = engine(graphed=False)
    for parameter in fresh.model.parameters():
        parameter.data.mul_(0.5)
    assert [s.token_ids for s in after] == [s.token_ids for s in fresh.sample(REQUESTS, sampling)]
    assert [s.token_ids for s in after] != [s.token_ids for s in before]
    for length in range(2 * KEPT):
        made.sample(REQUESTS, Sampling(max_new_tokens=length + 2))
    assert len(made.decoders._kept) == KEPT
