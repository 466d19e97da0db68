"""What the replicas of a server can do: asked once, before anything else runs.

A replica that does not answer then is asked before its first request, and must be able to do as
much as the others.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from courtside.engines.base import Sampling, ScoreRequest
from courtside.engines.served.given_ids import add_given_ids, read_given_logps
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.replicas import Replica
from courtside.engines.served.requests import (
    Answer,
    BadAnswerError,
    NoAnswerError,
    RefusedError,
    Request,
)
from courtside.engines.served.routes import CompletionsRoute, Generated, GenerateRoute, Route
from courtside.engines.served.scores import read_logps
from courtside.errors import RecipeError, ServerError
from courtside.sanitize import to_one_line, truncate

TOO_MANY = 10**6
"""More log-probs than any server allows; the refusal names the limit."""
FIRST_SECONDS = 30.0
"""For a list of models, which takes no computing: a server that hangs is known by it."""
MAX_GIVEN_DIFFERENCE = 0.05
"""Nats between two kernels of one server."""
LIMIT = re.compile(r"greater than max allowed: (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Of all replicas: what each of them can do."""

    version: str
    context_length: int
    max_logprobs: int
    """The largest k of prompt log-probs."""
    route: Route
    logprobs: Literal["raw", "processed"]
    """Of which distribution a sampled token's log-prob is: the model's, or the one that was sampled
    after temperature and truncation."""
    max_given_ids: int
    """Ids of one position whose log-probs a request may ask for; 0: none."""
    takes_weights: bool
    """Whether the servers have the routes by which all of their weights are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaProbe:
    pool: ReplicaPool
    replica: Replica
    ids: tuple[int, ...]
    send: Callable[[Replica, Request[Any]], Awaitable[Any]]

    @property
    def model(self) -> str:
        return self.pool.config.model

    async def ask(self, request: Request[Answer]) -> Answer:
        answer: Answer = await self.send(self.replica, request)
        return answer


def probe_servers(pool: ReplicaPool, *, probe_ids: tuple[int, ...]) -> ServerFacts:
    """`probe_ids`: a short prompt in the model's vocabulary, whose next token is uncertain."""

    async def probe(replica: Replica) -> ServerFacts | NoAnswerError:
        try:
            return await _probe(
                ReplicaProbe(pool=pool, replica=replica, ids=probe_ids, send=pool.ask)
            )
        except NoAnswerError as error:
            pool.report_failure(replica, str(error))
            return error

    answers = dict(zip(pool.replicas, pool.ask_each(probe), strict=True))
    replicas = [facts for facts in answers.values() if isinstance(facts, ServerFacts)]
    for replica, answer in answers.items():
        if isinstance(answer, NoAnswerError) and not replicas:
            raise answer
        replica.is_checked = isinstance(answer, ServerFacts)
    facts = _find_common(replicas)

    async def check(replica: Replica) -> None:
        late = await _probe(ReplicaProbe(pool=pool, replica=replica, ids=probe_ids, send=pool.send))
        if (missing := _find_missing(late, facts)) is not None:
            raise ServerError(
                f"{pool.field}.urls: {replica.url} did not answer when the run began, and now it "
                f"can do less than the others: {missing}. Start it as they were started"
            )

    pool.check = check
    return facts


def _find_missing(late: ServerFacts, facts: ServerFacts) -> str | None:
    """What the facts promise and this replica has not; None: nothing."""
    for name in ("context_length", "max_logprobs", "max_given_ids", "takes_weights"):
        if getattr(late, name) < getattr(facts, name):
            return f"{name} = {getattr(late, name)}, not {getattr(facts, name)}"
    if isinstance(facts.route, GenerateRoute) and not isinstance(late.route, GenerateRoute):
        return f"it has no route {facts.route.path}"
    if late.logprobs != facts.logprobs:
        return f"its log-probs are {late.logprobs}, not {facts.logprobs}"
    return None


def _find_common(replicas: Sequence[ServerFacts]) -> ServerFacts:
    versions = sorted({facts.version for facts in replicas})
    all_generate = all(isinstance(facts.route, GenerateRoute) for facts in replicas)
    return ServerFacts(
        version=", ".join(versions),
        context_length=min(facts.context_length for facts in replicas),
        max_logprobs=min(facts.max_logprobs for facts in replicas),
        route=replicas[0].route if all_generate else CompletionsRoute(),
        logprobs="processed" if all(f.logprobs == "processed" for f in replicas) else "raw",
        max_given_ids=min(facts.max_given_ids for facts in replicas) if all_generate else 0,
        takes_weights=all_generate and all(facts.takes_weights for facts in replicas),
    )


async def _probe(probe: ReplicaProbe) -> ServerFacts:
    model, field = probe.model, probe.pool.field
    first = Request(
        path="/v1/models", parse=lambda answer: _read_models(answer, model), timeout=FIRST_SECONDS
    )
    context_length = await probe.ask(first)
    if isinstance(context_length, list):
        raise RecipeError(
            f"{field}.model = {model!r}: {probe.replica.url} serves {context_length}. Give one of "
            "these names, or start the server with --served-model-name"
        )
    route = await _choose_route(probe)
    max_logprobs = await _ask_max_logprobs(probe, route)
    scores_given = await _scores_given_ids(probe, route)
    return ServerFacts(
        version=await _ask_version(probe),
        context_length=context_length,
        max_logprobs=max_logprobs,
        max_given_ids=max_logprobs if scores_given else 0,
        route=route,
        logprobs=await _ask_logprobs_mode(probe, route),
        takes_weights=await _has_weight_routes(probe),
    )


def _read_models(answer: Any, model: str) -> int | list[str]:
    """The model's context length, or the names of other models."""
    try:
        cards = {str(card["id"]): card for card in answer["data"]}
        if model not in cards:
            return sorted(cards)
        card = cards[model]
        if card.get("parent") in cards:  # an adapter has the length of its base
            card = cards[card["parent"]]
        return int(card["max_model_len"])
    except (LookupError, TypeError, ValueError, AttributeError):
        text = truncate(to_one_line(str(answer)), 200)
        raise BadAnswerError(f"{text!r} where vLLM lists models with max_model_len") from None


async def _ask_version(probe: ReplicaProbe) -> str:
    def read(answer: Any) -> str:
        return str(answer.get("version")) if isinstance(answer, Mapping) else "unknown"

    try:
        return await probe.ask(Request(path="/version", parse=read))
    except RefusedError:
        return "unknown"


async def _has_weight_routes(probe: ReplicaProbe) -> bool:
    try:
        await probe.ask(Request(path="/weight_info", parse=lambda answer: answer))
    except RefusedError:
        return False
    return True


async def _choose_route(probe: ReplicaProbe) -> Route:
    """The generate route where it is switched on: its answers are smaller, and all integers."""
    generate, completions = GenerateRoute(), CompletionsRoute()
    try:
        await _sample_one(probe, generate)
        return generate
    except RefusedError as error:
        if error.status not in (403, 404, 405):
            raise
    await _sample_one(probe, completions)
    return completions


async def _sample_one(
    probe: ReplicaProbe,
    route: Route,
    *,
    temperature: float = 1.0,
) -> Generated:
    body = route.sample_body(
        probe.model,
        probe.ids,
        Sampling(max_new_tokens=1, temperature=temperature),
        seed=0,
        stop_ids=(),
        num_top=1,
    )
    return await probe.ask(Request(path=route.path, body=body, parse=route.read_sample))


async def _ask_max_logprobs(probe: ReplicaProbe, route: Route) -> int:
    body = route.score_body(probe.model, probe.ids, TOO_MANY)
    try:
        request = Request(path=route.path, body=body, parse=route.read_prompt_logps)
        await probe.ask(request)
    except RefusedError as error:
        if (limit := LIMIT.search(error.text)) is None:
            raise
        return int(limit[1])
    return TOO_MANY


async def _scores_given_ids(probe: ReplicaProbe, route: Route) -> bool:
    """Whether log-probs of ids that a request names come, and are those of `prompt_logprobs`."""
    if not isinstance(route, GenerateRoute) or len(probe.ids) < 2:
        return False
    scored = ScoreRequest(
        token_ids=probe.ids,
        scored=(False,) + (True,) * (len(probe.ids) - 1),
        given_ids=tuple((id,) for id in probe.ids[1:]),
    )
    plain = route.score_body(probe.model, probe.ids, 0)
    body = add_given_ids(plain, scored, realized=False)

    def read(answer: Any) -> bool:
        if answer.get("prompt_token_id_logprobs") is None:  # an older vLLM ignores the fields
            return False
        logp_T1 = read_given_logps(answer, scored, num_ids=1)
        logps = read_logps(route.read_prompt_logps(answer), scored)
        if not torch.allclose(logp_T1[:, 0], torch.tensor(logps), atol=MAX_GIVEN_DIFFERENCE):
            raise BadAnswerError("log-probs of given ids that are not those of its prompt_logprobs")
        return True

    try:
        return await probe.ask(Request(path=route.path, body=body, parse=read))
    except RefusedError:
        return False


async def _ask_logprobs_mode(probe: ReplicaProbe, route: Route) -> Literal["raw", "processed"]:
    """Whether temperature changes the log-prob of the likeliest token."""
    plain, hot = [(await _sample_one(probe, route, temperature=t)).top_logps[0] for t in (1.0, 2.0)]
    if plain > 0 or hot > 0:
        raise RecipeError(
            f"{probe.pool.field}.urls: {probe.replica.url} gives logits in place of log-probs. "
            "Start it with --logprobs-mode processed_logprobs"
        )
    return "raw" if plain == hot else "processed"
