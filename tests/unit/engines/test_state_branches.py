"""Scores of recurrent and hybrid models: padded sequences, and branches from saved states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.hybrids import KINDS, hybrid_engine, make_hybrid, plain_logp
from support.varlen import make_branch

from courtside.engines.base import BranchRequest, ScoreRequest, Scores
from courtside.engines.forward import state_branches
from courtside.engines.forward.state_branches import forward_state_branches, forward_trunk
from courtside.engines.forward.state_passes import StatePasses
from courtside.engines.forward.state_probe import probe_state_passes

EACH = pytest.mark.parametrize(
    ("kind", "adapter"), [*((kind, False) for kind in KINDS), ("qwen3_5_text", True)]
)


def ids(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(2 + (7 * i * i + 5 * start + i) % 250 for i in range(length))


REQUESTS = [
    BranchRequest(
        token_ids=ids(80),
        scored=tuple(i in (1, 9, 30, 79) for i in range(80)),
        branches=(
            make_branch(80, ids(5, 1)),  # at the end of the trunk
            make_branch(70, ids(19, 2), scored=(17, 18)),
            make_branch(70, ids(3, 3)),  # another hint for the same turn
            make_branch(0, ids(4, 4)),  # instead of everything
            make_branch(3, ids(2, 5), scored=(0, 1)),  # its first token is predicted by the trunk
            make_branch(11, ids(9, 6)),
        ),
        temperature=0.7,
    ),
    BranchRequest(token_ids=ids(9, 7), branches=(make_branch(4, ids(3, 8)),)),
    BranchRequest(token_ids=ids(12, 9), branches=(), scored=(False,) * 11 + (True,)),
]


def assert_plain(model: Any, request: ScoreRequest, scores: Scores) -> None:
    logp_T = plain_logp(model, request.token_ids, request.temperature)
    indices = [i - 1 for i, scored in enumerate(request.scored) if scored]
    torch.testing.assert_close(scores.logp_T, logp_T[indices], rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "nemotron_h", "jamba", "minimax"])
def test_padded_scores_are_those_of_separate_passes(kind: str) -> None:
    engine = hybrid_engine(kind)
    lengths = (3, 70, 9, 20, 66)
    requests = [
        ScoreRequest(token_ids=ids(n, n), scored=(False,) + (True,) * (n - 1)) for n in lengths
    ]
    for request, scores in zip(requests, engine.score(requests), strict=True):
        assert_plain(engine.model, request, scores)


@EACH
def test_branches_continue_from_the_state_at_their_splice(
    kind: str, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = hybrid_engine(kind, adapter=adapter)
    reason, num_rows = engine.separate_branches_reason, list[int]()  # the probe is over
    forward = StatePasses.forward

    def count(self: StatePasses, ids_BN: torch.Tensor, *arguments: Any) -> Any:
        num_rows.append(len(ids_BN))
        return forward(self, ids_BN, *arguments)

    monkeypatch.setattr(StatePasses, "forward", count)
    results = engine.score_branches(REQUESTS)
    for request, result in zip(REQUESTS, results, strict=True):
        assert result.note == reason
        assert (result.trunk is None) == (request.scored is None)
        if result.trunk is not None:
            assert_plain(engine.model, request.trunk(), result.trunk)
        for branch, scores in zip(request.branches, result.branches, strict=True):
            assert_plain(engine.model, request.sequence(branch), scores)
    assert (reason is None) == (kind not in ("jamba", "mamba", "falcon_mamba", "minimax"))
    if reason is None:  # trunks take a pass up to each splice, and branches share passes
        assert sum(num_rows) == 4 + 1 + 1 + 7
        assert (max(num_rows) > 1) == (kind != "rwkv")


@torch.no_grad()
def test_limits_change_no_branch_and_saved_states_share_their_keys() -> None:
    model = make_hybrid("qwen3_5_text")
    passes = probe_state_passes(model)
    assert isinstance(passes, StatePasses)
    _, states = forward_trunk(passes, REQUESTS[0], max_tokens=512)
    kv = [i for i, kind in enumerate(passes.layout.kinds) if kind == "kv"]
    for state in states.values():
        for i in kv:
            assert state.tensors[i].data_ptr() == states[80].tensors[i].data_ptr()
    branches = [(states.get(branch.splice), branch) for branch in REQUESTS[0].branches]
    limits = {"pad_id": 1, "max_tokens": 512, "max_keys": 10**6}
    expected = forward_state_branches(passes, branches, **limits)
    for limit in ({"max_tokens": 1}, {"max_keys": 1}, {"max_keys": 160}, {"pad_id": 77}):
        hidden = forward_state_branches(passes, branches, **(limits | limit))
        for x_ND, y_ND in zip(hidden, expected, strict=True):
            torch.testing.assert_close(x_ND, y_ND, rtol=1e-4, atol=1e-5)
    splits = state_branches._split_by_keys(range(6), branches, 160)
    assert [list(part) for part in splits] == [[0, 1], [2, 3], [4, 5]]
