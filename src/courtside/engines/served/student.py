"""The student on vLLM servers: they sample with its weights, the trainer's process scores."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from courtside.engines.base import (
    Capabilities,
    Engine,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    Want,
)
from courtside.engines.served.engine import ServedEngine
from courtside.engines.served.requests import Request
from courtside.engines.served.routes import Generated
from courtside.engines.served.weight_sync import PublishedWeights, WeightSync
from courtside.errors import RecipeError
from courtside.progress import ProgressMeter
from courtside.types import Sample, VersionSpan


class ServedStudent(ServedEngine):
    def __init__(self, *args: Any, local: Engine, sync: WeightSync, **options: Any):
        """`local`: the engine over the weights that are trained."""
        super().__init__(*args, **options)
        self._local, self.sync = local, sync
        self.pinned: PublishedWeights | None = None
        """Weights to sample with; None: the current ones."""
        self.context_length = min(self.facts.context_length, local.context_length)
        self.load_weights(0)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._local.capabilities, hidden_states=False, branches=False,
                       independent_rows=True, mixed_sampling=False)  # fmt: skip

    @property
    def weights(self) -> PublishedWeights:
        return self.pinned or self.sync.current

    @property
    def model(self) -> str:
        return self.sync.name_model(self.weights)

    def fork(self, progress: ProgressMeter) -> ServedStudent:
        """The same servers for rollouts in another thread, which may go on with older weights
        (`pinned`) and count their own progress."""
        fork = copy(self)
        fork.progress = progress
        return fork

    def load_weights(self, version: int) -> None:
        """Returns when the servers have them, and their log-probs agree with the trainer's."""
        self.sync.publish(version)

    def check_sampling(self, sampling: Sampling) -> None:
        """A sample's log-probs must be those of the distribution that was sampled."""
        t = sampling.temperature
        if self.facts.logprobs == "raw" and t != 0 and (t != 1 or sampling.truncates):
            raise RecipeError(
                f"{self.pool.field}.urls: the servers give log-probs of the model's distribution, "
                f"and with temperature {t:g}, top_p, top_k or min_p another one is sampled. Start "
                "them with --logprobs-mode processed_logprobs"
            )

    def ask_sample(self, request: SampleRequest, sampling: Sampling, key: str) -> Request[Sample]:
        plain = super().ask_sample(request, sampling, key)
        version = self.weights.version

        def parse(answer: Any) -> Sample:
            sample = plain.parse(answer)
            if sample.policy_versions:
                return sample
            spans = (VersionSpan(0, len(sample.token_ids), version),)
            return replace(sample, policy_versions=spans)

        return replace(plain, parse=parse)

    def _read_sample(self, generated: Generated, sampling: Sampling) -> Sample:
        spans = self.sync.read_versions(generated)  # first: a stale answer counts no token
        sample = super()._read_sample(generated, sampling)
        end = len(sample.token_ids)  # a stop string may cut what was generated
        cut = (span._replace(end=min(span.end, end)) for span in spans if span.start < end)
        return replace(sample, policy_versions=tuple(cut))

    def score(
        self, requests: Sequence[ScoreRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[Scores]:
        """By the trainer's weights themselves."""
        return self._local.score(requests, want=want, top_k=top_k)
