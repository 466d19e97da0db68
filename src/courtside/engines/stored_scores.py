"""An engine that asks another one for those scores only that are not on disk yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from courtside.engines.base import (
    BranchRequest,
    BranchScores,
    Capabilities,
    Engine,
    InProcessEngine,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    Session,
    Want,
)
from courtside.engines.score_store import ScoreStore
from courtside.types import Sample


class StoredScoresEngine:
    def __init__(self, engine: Engine, store: ScoreStore, *, device: torch.device):
        """`device`: of the scores."""
        self.engine, self.store, self.device = engine, store, device
        self.name, self.eos_ids = engine.name, engine.eos_ids
        self.num_parameters = engine.num_parameters
        self.context_length, self.max_batch_tokens = engine.context_length, engine.max_batch_tokens

    @property
    def capabilities(self) -> Capabilities:
        """Hidden states are not stored: they are as large as the logits are worth."""
        return replace(
            self.engine.capabilities,
            hidden_states=False,
            weight_updates=False,
            given_ids=0,
            mixed_sampling=False,
        )

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        return self.engine.sample(requests, sampling)

    def session(self, num_rows: int, *, row_capacity: int | None = None) -> Session:
        return self.engine.session(num_rows, row_capacity=row_capacity)

    def load_weights(self, version: int) -> None:
        raise AssertionError("refused when assembled: weight_updates is false")

    def notes(self) -> list[str]:
        size = self.store.num_bytes / 1e9
        return [f"{self.name}: scores are taken from {self.store.folder} ({size:.2f} GB there)"]

    def score(
        self, requests: Sequence[ScoreRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[Scores]:
        assert want != "hidden", "refused when assembled"
        stored = {request: self._read(request, top_k) for request in dict.fromkeys(requests)}
        missing = [request for request, scores in stored.items() if scores is None]
        if missing:
            for request, scores in zip(
                missing, self.engine.score(missing, want=want, top_k=top_k), strict=True
            ):
                self.store.write(request, scores)
                stored[request] = scores
        return [cast(Scores, stored[request]) for request in requests]

    def score_branches(
        self, requests: Sequence[BranchRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[BranchScores]:
        """A trajectory of which anything is missing is scored as a whole, in one pass."""
        results = [self._read_branches(request, top_k) for request in requests]
        missing = [i for i, result in enumerate(results) if result is None]
        if missing:
            engine = cast(InProcessEngine, self.engine)
            unknown_requests = [requests[i] for i in missing]
            for i, scores in zip(
                missing,
                engine.score_branches(unknown_requests, want=want, top_k=top_k),
                strict=True,
            ):
                results[i] = scores
                for sequence, part in zip(_sequences(requests[i]), _parts(scores), strict=True):
                    self.store.write(sequence, part)
        return [cast(BranchScores, result) for result in results]

    def _read_branches(self, request: BranchRequest, top_k: int) -> BranchScores | None:
        parts = [self._read(sequence, top_k) for sequence in _sequences(request)]
        if any(part is None for part in parts):
            return None
        scores = cast(list[Scores], parts)
        trunk = scores.pop(0) if request.scored is not None else None
        return BranchScores(trunk=trunk, branches=tuple(scores))

    def _read(self, request: ScoreRequest, top_k: int) -> Scores | None:
        return self.store.read(request, top_k=top_k, device=self.device)


def _sequences(request: BranchRequest) -> list[ScoreRequest]:
    """What is scored, each as a sequence of its own."""
    trunk = [] if request.scored is None else [request.trunk()]
    return [*trunk, *(request.sequence(branch) for branch in request.branches)]


def _parts(scores: BranchScores) -> list[Scores]:
    return [*([] if scores.trunk is None else [scores.trunk]), *scores.branches]
