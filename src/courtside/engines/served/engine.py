"""A model behind vLLM servers: token ids in, token ids and log-probs out.

One request for each sample, with its own seed, and one for each sequence that is scored. Texts are
decoded here from the ids that came; no text is tokenized again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch

from courtside.engines.base import (
    Capabilities,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    Session,
    Want,
)
from courtside.engines.generation.sampler import SampleBuffer
from courtside.engines.served.given_ids import add_given_ids, read_given_logps
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.probe import ServerFacts
from courtside.engines.served.requests import BadAnswerError, Request
from courtside.engines.served.routes import Generated
from courtside.engines.served.scores import read_scores
from courtside.errors import ModelError, RecipeError
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.types import Sample

TEMPERATURE_FIX = (
    "prompt log-probs of vLLM are those of temperature 1, whatever a request says. Set "
    "rollout.temperature = 1, or use a teacher in this process"
)


class ServedEngine:
    def __init__(
        self,
        pool: ReplicaPool,
        facts: ServerFacts,
        *,
        name: str,
        tokenizer: Any,
        eos_ids: frozenset[int],
        vocab_size: int,
        context_length: int,
        num_parameters: int = 0,
        device: torch.device | None = None,
        progress: ProgressMeter | None = None,
    ):
        """`tokenizer`, `eos_ids`, `vocab_size`, `context_length`: the student's. `num_parameters`:
        0 where nobody told. `device`: of the scores."""
        self.pool, self.facts = pool, facts
        self.name = name
        self.tokenizer: Any = tokenizer
        self.eos_ids, self.vocab_size = eos_ids, vocab_size
        self.num_parameters = num_parameters
        # A server that scores samples one token after the sequence; nobody looks at it.
        self.context_length = min(facts.context_length - 1, context_length)
        # Servers queue what does not fit: what counts is how many requests may be under way.
        num_slots = len(pool.replicas) * pool.config.max_concurrency
        self.max_batch_tokens = num_slots * self.context_length
        self.device = device or torch.device("cpu")
        self.progress = progress or ProgressMeter()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            top_k=min(self.facts.max_logprobs, self.vocab_size),
            hidden_states=False,
            branches=False,
            independent_rows=True,
            weight_updates=False,
            given_ids=self.facts.max_given_ids,
        )

    @property
    def model(self) -> str:
        """The name that requests give."""
        return self.pool.config.model

    def load_weights(self, version: int) -> None:
        raise AssertionError("refused when assembled: weight_updates is false")

    def notes(self) -> list[str]:
        urls = ", ".join(self.pool.config.urls)
        return [f"{self.name}: vLLM {self.facts.version} at {urls} ({self.facts.route.path})"]

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        return self.sample_with_keys(requests, sampling, [hash_ids(r.prompt_ids) for r in requests])

    def sample_with_keys(
        self, requests: Sequence[SampleRequest], sampling: Sampling, keys: Sequence[str]
    ) -> list[Sample]:
        """`keys`: requests with the same one go to the same replica."""
        return self.pool.ask_all(
            [self.ask_sample(r, sampling, key) for r, key in zip(requests, keys, strict=True)]
        )

    def ask_sample(self, request: SampleRequest, sampling: Sampling, key: str) -> Request[Sample]:
        self._check_length(len(request.prompt_ids) + sampling.max_new_tokens)
        route = self.facts.route
        return Request(
            path=route.path,
            body=route.sample_body(
                self.model,
                request.prompt_ids,
                sampling,
                seed=request.seed,
                stop_ids=sorted(self.eos_ids),
            ),
            parse=lambda answer: self._read_sample(route.read_sample(answer), sampling),
            key=key,
            kind=f"sample {sampling.max_new_tokens}",
        )

    def _read_sample(self, generated: Generated, sampling: Sampling) -> Sample:
        """It ends where the local engine would end it."""
        ids, logps = list(generated.token_ids), list(generated.logps)
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise BadAnswerError(f"sampled ids {min(ids)} to {max(ids)} of {self.vocab_size}")
        if len(ids) > sampling.max_new_tokens:
            raise BadAnswerError(
                f"{len(ids)} tokens where {sampling.max_new_tokens} were asked for"
            )
        buffer = SampleBuffer(
            1, sampling, eos=self.eos_ids, tokenizer=self.tokenizer, progress=self.progress
        )
        buffer.extend(0, ids, [0.0] * len(ids) if sampling.temperature == 0 else logps)
        (sample,) = buffer.samples()
        if sample.stop == "length" and len(ids) < sampling.max_new_tokens:
            raise BadAnswerError(
                f"a sample that ends after {len(ids)} of {sampling.max_new_tokens} tokens with the "
                f"id {ids[-1]}, which is no end token of the student ({generated.finish_reason}); "
                "the server must run with --generation-config vllm"
            )
        return sample

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    def session(self, num_rows: int, *, row_capacity: int | None = None) -> Session:
        return ServedSession(self, num_rows=num_rows)

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────

    def score(
        self, requests: Sequence[ScoreRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[Scores]:
        assert want != "hidden" and top_k <= self.capabilities.top_k, "refused when assembled"
        for request in requests:
            if request.temperature != 1.0 and any(request.scored):
                raise RecipeError(
                    f"{self.pool.field}: a trajectory was sampled at temperature "
                    f"{request.temperature:g}, and {TEMPERATURE_FIX}"
                )
            self._check_length(len(request.token_ids) + 1)
        route = self.facts.route
        # Else the log-prob of the token itself is among the teacher's likeliest, as an answer in
        # JSON that has each token's text.
        realized = top_k == 0
        progress = self.progress.phase = PhaseProgress(total=len(requests), unit="sequences")

        def ask(request: ScoreRequest) -> Request[Scores]:
            def parse(answer: Any) -> Scores:
                if request.given_ids and realized:
                    return self._read_given(answer, request)
                rows = route.read_prompt_logps(answer)
                scores = read_scores(
                    rows, request, top_k=top_k, vocab_size=self.vocab_size, device=self.device
                )
                if not request.given_ids:
                    return scores
                num_ids = len(request.given_ids[0])
                logp_TK = read_given_logps(answer, request, num_ids=num_ids)
                return replace(scores, given_logp_TK=logp_TK.to(self.device))

            body = route.score_body(self.model, request.token_ids, top_k)
            if request.given_ids:
                body = add_given_ids(body, request, realized=realized)
            kind = f"score {len(request.token_ids).bit_length()} {top_k}"
            return Request(path=route.path, body=body, parse=parse, kind=kind)

        def count(index: int, scores: Scores) -> None:
            progress.finished += 1

        return self.pool.ask_all([ask(request) for request in requests], report=count)

    def _read_given(self, answer: Any, request: ScoreRequest) -> Scores:
        """Of an answer without `prompt_logprobs`: the token itself, then the given ids."""
        assert request.given_ids
        num_ids = 1 + len(request.given_ids[0])
        logp_TK = read_given_logps(answer, request, num_ids=num_ids).to(self.device)
        return Scores(logp_T=logp_TK[:, 0], given_logp_TK=logp_TK[:, 1:])

    def _check_length(self, length: int) -> None:
        if length > self.facts.context_length:
            raise ModelError(
                f"{length} tokens do not fit the context of {self.name} "
                f"({self.facts.context_length}). Shorten the prompts or rollout.max_new_tokens, or "
                "start the server with a larger --max-model-len; nothing is cut silently"
            )


class ServedSession:
    """Sends the whole conversation with every turn, to the replica that has it cached."""

    def __init__(self, engine: ServedEngine, *, num_rows: int):
        self._engine = engine
        self._conversations = [Conversation() for _ in range(num_rows)]

    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        samples = [self.begin(*row, sampling) for row in zip(rows, requests, strict=True)]
        try:
            done, _ = wait(samples, return_when=FIRST_EXCEPTION)
            for sample in done:
                sample.result()  # the first failure, before the others have ended
            return [sample.result() for sample in samples]
        except BaseException:
            for sample in samples:
                sample.cancel()
            raise

    def begin(self, row: int, request: SampleRequest, sampling: Sampling) -> Future[Sample]:
        conversation = self._conversations[row]
        whole = conversation.extend(request)
        future = self._engine.pool.begin(self._engine.ask_sample(whole, sampling, conversation.key))
        conversation.last_turn = whole.prompt_ids, future
        return future

    def restart(self, row: int) -> None:
        self._conversations[row] = Conversation()


@dataclass(slots=True)
class Conversation:
    """One row of a session."""

    key: str = ""
    """Of its first prompt: episodes of one task share its cache, too."""
    last_turn: tuple[tuple[int, ...], Future[Sample]] | None = None
    """Ids before the last sample, and that sample."""

    def extend(self, request: SampleRequest) -> SampleRequest:
        """The request with all that came before it. The last token of a sample is the first of the
        next request."""
        self.key = self.key or hash_ids(request.prompt_ids)
        if self.last_turn is None:
            return request
        prompt_ids, sample = self.last_turn
        context = prompt_ids + sample.result().token_ids[:-1]
        return replace(request, prompt_ids=context + request.prompt_ids)


def hash_ids(ids: Sequence[int]) -> str:
    return sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
