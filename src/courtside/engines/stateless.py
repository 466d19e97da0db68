"""Sessions and branch scoring for any engine, from `sample` and `score` alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from courtside.engines.base import (
    BranchRequest,
    BranchScores,
    Engine,
    InProcessEngine,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Want,
)
from courtside.types import Sample


class StatelessSession:
    """Sends the whole conversation with every turn: exact, and slower without a prefix cache."""

    def __init__(
        self,
        sample: Callable[[Sequence[SampleRequest], Sampling], list[Sample]],
        *,
        num_rows: int,
        note: str,
    ):
        self._sample = sample
        self.note = note
        """Why no KV cache is kept between turns."""
        self.contexts: list[tuple[int, ...]] = [()] * num_rows

    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        whole = [
            SampleRequest(prompt_ids=self.contexts[row] + request.prompt_ids, seed=request.seed)
            for row, request in zip(rows, requests, strict=True)
        ]
        samples = self._sample(whole, sampling)
        for row, request, sample in zip(rows, whole, samples, strict=True):
            self.contexts[row] = request.prompt_ids + sample.token_ids[:-1]
        return samples

    def restart(self, row: int) -> None:
        self.contexts[row] = ()


def score_branches(
    engine: Engine, requests: Sequence[BranchRequest], *, want: Want = "logp", top_k: int = 0
) -> list[BranchScores]:
    """Tree scoring where the engine has it, else one sequence per branch."""
    if engine.capabilities.branches:
        return cast(InProcessEngine, engine).score_branches(requests, want=want, top_k=top_k)
    note = f"{engine.name} has no tree scoring"
    return score_branches_separately(engine, requests, want=want, top_k=top_k, note=note)


def score_branches_separately(
    engine: Engine,
    requests: Sequence[BranchRequest],
    *,
    want: Want = "logp",
    top_k: int = 0,
    note: str | None = None,
) -> list[BranchScores]:
    """The scores of `score_branches` from one sequence per branch, for any engine and model."""
    sequences: list[ScoreRequest] = []
    for request in requests:
        sequences += [request.trunk()] if request.scored is not None else []
        sequences += [request.sequence(branch) for branch in request.branches]
    scores = iter(engine.score(sequences, want=want, top_k=top_k))
    return [
        BranchScores(
            trunk=next(scores) if request.scored is not None else None,
            branches=tuple(next(scores) for _ in request.branches),
            note=note,
        )
        for request in requests
    ]
