"""A second engine: a tiny model behind the `Engine` protocol only, as a server would be.

It has a copy of the weights, answers every request by itself and out of order, gives no hidden
states and no more than a few top tokens, and knows neither tree scoring nor sessions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from threading import Lock
from typing import TypeVar

import torch

from courtside.engines.base import (
    Capabilities,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    Session,
    StatelessSession,
    Want,
)
from courtside.engines.local import LocalEngine
from courtside.types import Sample, VersionSpan

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class IndependentRows(StatelessSession):
    """Each row is sampled in a thread, some sooner than others."""

    threads = ThreadPoolExecutor(16)

    def begin(self, row: int, request: SampleRequest, sampling: Sampling) -> Future[Sample]:
        def sample() -> Sample:
            time.sleep(0.001 * (request.seed % 5))
            return self.sample([row], [request], sampling)[0]

        return self.threads.submit(sample)


class RemoteEngine:
    def __init__(self, trainer: LocalEngine, *, top_k: int = 20, independent_rows: bool = False):
        self._trainer = trainer.model
        self._server = LocalEngine(
            deepcopy(trainer.model),
            trainer.tokenizer,
            name=trainer.name,
            vocab_size=trainer.head.vocab_size,
            autocast=trainer.autocast,
        )
        self.name = trainer.name
        self.num_parameters = trainer.num_parameters
        self.eos_ids = trainer.eos_ids
        self.context_length = trainer.context_length
        self.max_batch_tokens = trainer.max_batch_tokens
        self.capabilities = Capabilities(
            top_k=top_k, hidden_states=False, branches=False, weight_updates=True,
            independent_rows=independent_rows,
        )  # fmt: skip
        self.version = 0
        self.finished: list[int] = []
        """Indices of requests in the order in which they were answered."""
        self._model_lock = Lock()

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        def answer(request: SampleRequest) -> Sample:
            (sample,) = self._server.sample([request], sampling)
            span = VersionSpan(0, len(sample.token_ids), self.version)
            return replace(sample, policy_versions=(span,))

        return self._answer_all(requests, answer)

    def score(
        self, requests: Sequence[ScoreRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[Scores]:
        assert want != "hidden" and top_k <= self.capabilities.top_k, "refused when assembled"
        return self._answer_all(
            requests, lambda r: self._server.score([r], want=want, top_k=top_k)[0]
        )

    def session(self, num_rows: int, *, row_capacity: int | None = None) -> Session:
        kind = IndependentRows if self.capabilities.independent_rows else StatelessSession
        return kind(self.sample, num_rows=num_rows, note="no sessions")

    def load_weights(self, version: int) -> None:
        with torch.no_grad():
            self._server.model.load_state_dict(self._trainer.state_dict())
        self.version = version

    def notes(self) -> list[str]:
        return [f"{self.name}: a server"]

    def _answer_all(
        self, requests: Sequence[Request], answer: Callable[[Request], Answer]
    ) -> list[Answer]:
        delays = random.Random(len(requests)).sample(range(len(requests)), len(requests))

        def serve(index: int) -> Answer:
            time.sleep(0.0002 * delays[index])
            with self._model_lock:
                self.finished.append(index)
                return answer(requests[index])

        with ThreadPoolExecutor(max_workers=max(1, len(requests))) as pool:
            return list(pool.map(serve, range(len(requests))))
