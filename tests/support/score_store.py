"""Score stores and what is written into them, importable by processes that tests start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from courtside.engines.base import ScoreRequest, Scores
from courtside.engines.score_store import ScoreStore

CPU = torch.device("cpu")
REQUEST = ScoreRequest(token_ids=(3, 4, 5, 6), scored=(False, True, False, True))


def make_store(folder: Path, *, teacher: str = "big", max_bytes: int = 10**9) -> ScoreStore:
    return ScoreStore(folder, teacher=teacher, max_bytes=max_bytes, field="teacher.store")


def make_scores(seed: int = 0, *, k: int = 3) -> Scores:
    draw = torch.Generator().manual_seed(seed)
    return Scores(
        logp_T=-torch.rand(2, generator=draw),
        top_ids_TK=torch.randint(0, 200_000, (2, k), generator=draw),
        top_logp_TK=-torch.rand(2, k, generator=draw),
    )


def assert_equal(scores: Scores | None, expected: Scores, *, k: int) -> None:
    assert scores is not None and scores.top_ids_TK is not None and scores.top_logp_TK is not None
    assert expected.top_ids_TK is not None and expected.top_logp_TK is not None
    torch.testing.assert_close(scores.logp_T, expected.logp_T, rtol=0, atol=0)
    torch.testing.assert_close(scores.top_ids_TK, expected.top_ids_TK[:, :k], rtol=0, atol=0)
    torch.testing.assert_close(scores.top_logp_TK, expected.top_logp_TK[:, :k], rtol=0, atol=0)


def write_and_read(folder: Path, seed: int) -> None:
    """The same forty scores as the other processes, which also remove old ones all the time."""
    store = make_store(folder, max_bytes=6000)
    for i in range(120):
        request = replace(REQUEST, token_ids=(3, 4, 5, (i * (seed + 7)) % 40))
        scores = store.read(request, top_k=3, device=CPU)
        expected = make_scores(request.token_ids[-1])
        if scores is not None:
            assert_equal(scores, expected, k=3)
        store.write(request, expected)
