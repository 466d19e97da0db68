"""Log-probs against one full forward pass and softmax per sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_model import tiny_model
from torch import Tensor

from courtside.engines.base import ScoreRequest
from courtside.engines.forward.forward import score_positions
from courtside.engines.local import LocalEngine
from courtside.errors import ModelError

Make = Callable[..., LocalEngine]

VARIOUS = [
    ScoreRequest(token_ids=(4, 9, 200, 31, 7), scored=(False, False, True, True, True)),
    ScoreRequest(token_ids=(5, 6), scored=(False, True), temperature=0.4),
    ScoreRequest(
        token_ids=tuple(range(90, 111)),
        scored=tuple(i in (1, 2, 9, 17, 20) for i in range(21)),
        temperature=1.7,
    ),
    ScoreRequest(token_ids=(8, 1, 1, 8), scored=(False, True, False, True)),
]


@torch.no_grad()
def reference_logps(engine: LocalEngine, request: ScoreRequest) -> tuple[Tensor, Tensor]:
    """Log-probs of the scored tokens and of the whole vocabulary there, in float64."""
    logits_LV = engine.model(input_ids=torch.tensor([request.token_ids])).logits[0].double()
    logp_LV = torch.log_softmax(logits_LV / request.temperature, -1)
    positions = [i for i, scored in enumerate(request.scored) if scored]
    logp_TV = logp_LV[[i - 1 for i in positions]]
    ids_T = torch.tensor([request.token_ids[i] for i in positions])
    return logp_TV.gather(-1, ids_T[:, None]).squeeze(-1), logp_TV


@torch.no_grad()
def test_the_kernel_gives_the_same_logps(make_engine: Make) -> None:
    """In Triton's interpreter: each row at its temperature, with a head that scales."""
    engine = make_engine()
    engine.model.float()
    engine.head.scale = 0.3
    with engine.passes.patch_model():
        hidden_ND, spans = engine.passes.forward([request.token_ids for request in VARIOUS])
    score = partial(score_positions, engine.head, hidden_ND, spans, VARIOUS, uses_kernel=True)
    for ours, reference in zip(score(want="logp"), engine.score(VARIOUS), strict=True):
        torch.testing.assert_close(ours.logp_T, reference.logp_T, rtol=0, atol=1e-5)
    assert score(want="top_k", top_k=3)[0].top_ids_TK is not None


@pytest.mark.parametrize("budget", [1, 30, 65536])
def test_scores_equal_separate_passes(make_engine: Make, budget: int) -> None:
    engine = make_engine(max_batch_tokens=budget)
    hidden = engine.score(VARIOUS, want="hidden")
    top_k = engine.score(VARIOUS, want="top_k", top_k=5)
    for request, scores, top_scores in zip(VARIOUS, hidden, top_k, strict=True):
        logp_T, logp_TV = reference_logps(engine, request)
        torch.testing.assert_close(scores.logp_T.double(), logp_T, rtol=0, atol=1e-6)
        torch.testing.assert_close(top_scores.logp_T.double(), logp_T, rtol=0, atol=1e-6)

        assert scores.hidden_TD is not None
        head_logp_TV = torch.log_softmax(engine.head(scores.hidden_TD) / request.temperature, -1)
        torch.testing.assert_close(head_logp_TV.double(), logp_TV, rtol=0, atol=1e-6)

        top = logp_TV.topk(5, dim=-1)
        assert top_scores.top_ids_TK is not None and top_scores.top_logp_TK is not None
        assert torch.equal(top_scores.top_ids_TK, top.indices)
        torch.testing.assert_close(top_scores.top_logp_TK.double(), top.values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 2, 512])
def test_scores_do_not_depend_on_the_chunk_size(make_engine: Make, chunk_size: int) -> None:
    engine = make_engine()
    with torch.no_grad(), engine.passes.patch_model():
        hidden_ND, spans = engine.passes.forward([request.token_ids for request in VARIOUS])
        scores = score_positions(
            engine.head, hidden_ND, spans, VARIOUS, want="top_k", top_k=5, chunk_size=chunk_size
        )
    for request, top_scores in zip(VARIOUS, scores, strict=True):
        logp_T, logp_TV = reference_logps(engine, request)
        torch.testing.assert_close(top_scores.logp_T.double(), logp_T, rtol=0, atol=1e-6)
        assert torch.equal(top_scores.top_ids_TK, logp_TV.topk(5, dim=-1).indices)


def test_nothing_else_is_returned(make_engine: Make) -> None:
    scores = make_engine().score(VARIOUS[:1])[0]
    assert scores.hidden_TD is None and scores.top_ids_TK is None and scores.top_logp_TK is None


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sequences=st.lists(
        st.lists(st.integers(0, 257), min_size=2, max_size=18), min_size=2, max_size=6
    ),
    budget=st.integers(1, 80),
)
def test_scores_do_not_depend_on_the_batch(
    make_engine: Make, sequences: list[list[int]], budget: int
) -> None:
    engine = make_engine(tiny_model(layers=1), max_batch_tokens=budget)
    requests = [
        ScoreRequest(token_ids=tuple(ids), scored=(False,) + (True,) * (len(ids) - 1))
        for ids in sequences
    ]
    together = engine.score(requests)
    for request, scores in zip(requests, together, strict=True):
        (alone,) = engine.score([request])
        torch.testing.assert_close(scores.logp_T, alone.logp_T, rtol=0, atol=1e-6)


def test_no_pass_is_larger_than_the_budget(make_engine: Make) -> None:
    engine = make_engine(max_batch_tokens=45)
    assert engine.passes.padding_reason is None  # the probe is over
    shapes: list[torch.Size] = []

    def record(module: Any, args: Any, kwargs: Any) -> None:
        shapes.append(kwargs["input_ids"].shape)

    engine.model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    requests = [
        ScoreRequest(token_ids=(n, *(5,) * (n - 1)), scored=(False,) + (True,) * (n - 1))
        for n in (3, 21, 20, 4, 6, 60)
    ]
    engine.score(requests)
    assert [tuple(shape) for shape in shapes] == [(1, 60), (1, 21 + 20 + 4), (1, 6 + 3)]


def test_a_request_may_score_nothing(make_engine: Make) -> None:
    nothing = ScoreRequest(token_ids=(5, 6, 7), scored=(False,) * 3)
    engine = make_engine()
    first, second = engine.score([nothing, VARIOUS[0]], want="hidden")
    assert first.logp_T.shape == (0,)
    torch.testing.assert_close(
        second.logp_T.double(), reference_logps(engine, VARIOUS[0])[0], rtol=0, atol=1e-6
    )
    assert engine.score([]) == []


def test_the_first_token_cannot_be_scored(make_engine: Make) -> None:
    with pytest.raises(AssertionError, match="nothing predicts the first token"):
        make_engine().score([ScoreRequest(token_ids=(5, 6), scored=(True, True))])


def test_sequences_longer_than_the_context_are_refused(make_engine: Make) -> None:
    engine = make_engine(tiny_model(layers=1))
    fits = ScoreRequest(token_ids=(5,) * 512, scored=(False,) * 511 + (True,))
    engine.score([fits])
    too_long = ScoreRequest(token_ids=(5,) * 513, scored=(False,) * 512 + (True,))
    with pytest.raises(ModelError, match=r"513 tokens do not fit the context of tiny \(512\)"):
        engine.score([fits, too_long])


def test_scoring_builds_no_graph_and_changes_no_weight(make_engine: Make) -> None:
    engine = make_engine()
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    scores = engine.score(VARIOUS, want="hidden")
    assert not any(s.logp_T.requires_grad for s in scores)
    assert not any(s.hidden_TD.requires_grad for s in scores if s.hidden_TD is not None)
    assert all(torch.equal(p, before[name]) for name, p in engine.model.named_parameters())
