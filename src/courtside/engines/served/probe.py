"""What the replicas of a server can do: asked once, before anything else runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from courtside.engines.base import Sampling, ScoreRequest
from courtside.engines.served.given_ids import add_given_ids, read_given_logps
from courtside.engines.served.pool import BadAnswerError, RefusedError, ReplicaPool, Request
from courtside.engines.served.replicas import Replica
from courtside.engines.served.routes import CompletionsRoute, Generated, GenerateRoute, Route
from courtside.engines.served.scores import read_logps
from courtside.errors import RecipeError
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


def probe_servers(pool: ReplicaPool, *, probe_ids: tuple[int, ...]) -> ServerFacts:
    """`probe_ids`: a short prompt in the model's vocabulary, whose next token is uncertain."""
    replicas = pool.ask_each(lambda replica: _probe(pool, replica, probe_ids))
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


async def _probe(pool: ReplicaPool, replica: Replica, probe_ids: tuple[int, ...]) -> ServerFacts:
    model = pool.config.model
    first = Request(
        path="/v1/models", parse=lambda answer: _read_models(answer, model), timeout=FIRST_SECONDS
    )
    context_length = await pool.ask(replica, first)
    if isinstance(context_length, list):
        raise RecipeError(
            f"{pool.field}.model = {model!r}: {replica.url} serves {context_length}. Give one of "
            "these names, or start the server with --served-model-name"
        )
    route = await _choose_route(pool, replica, probe_ids)
    max_logprobs = await _ask_max_logprobs(pool, replica, route, probe_ids)
    scores_given = await _scores_given_ids(pool, replica, route, probe_ids)
    return ServerFacts(
        version=await _ask_version(pool, replica),
        context_length=context_length,
        max_logprobs=max_logprobs,
        max_given_ids=max_logprobs if scores_given else 0,
        route=route,
        logprobs=await _ask_logprobs_mode(pool, replica, route, probe_ids),
        takes_weights=await _has_weight_routes(pool, replica),
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


async def _ask_version(pool: ReplicaPool, replica: Replica) -> str:
    def read(answer: Any) -> str:
        return str(answer.get("version")) if isinstance(answer, Mapping) else "unknown"

    try:
        return await pool.ask(replica, Request(path="/version", parse=read))
    except RefusedError:
        return "unknown"


async def _has_weight_routes(pool: ReplicaPool, replica: Replica) -> bool:
    try:
        await pool.ask(replica, Request(path="/weight_info", parse=lambda answer: answer))
    except RefusedError:
        return False
    return True


async def _choose_route(pool: ReplicaPool, replica: Replica, probe_ids: tuple[int, ...]) -> Route:
    """The generate route where it is switched on: its answers are smaller, and all integers."""
    generate, completions = GenerateRoute(), CompletionsRoute()
    try:
        await _sample_one(pool, replica, generate, probe_ids)
        return generate
    except RefusedError as error:
        if error.status not in (403, 404, 405):
            raise
    await _sample_one(pool, replica, completions, probe_ids)
    return completions


async def _sample_one(
    pool: ReplicaPool,
    replica: Replica,
    route: Route,
    probe_ids: tuple[int, ...],
    *,
    temperature: float = 1.0,
) -> Generated:
    body = route.sample_body(
        pool.config.model,
        probe_ids,
        Sampling(max_new_tokens=1, temperature=temperature),
        seed=0,
        stop_ids=(),
        num_top=1,
    )
    return await pool.ask(replica, Request(path=route.path, body=body, parse=route.read_sample))


async def _ask_max_logprobs(
    pool: ReplicaPool, replica: Replica, route: Route, probe_ids: tuple[int, ...]
) -> int:
    body = route.score_body(pool.config.model, probe_ids, TOO_MANY)
    try:
        request = Request(path=route.path, body=body, parse=route.read_prompt_logps)
        await pool.ask(replica, request)
    except RefusedError as error:
        if (limit := LIMIT.search(error.text)) is None:
            raise
        return int(limit[1])
    return TOO_MANY


async def _scores_given_ids(
    pool: ReplicaPool, replica: Replica, route: Route, probe_ids: tuple[int, ...]
) -> bool:
    """Whether log-probs of ids that a request names come, and are those of `prompt_logprobs`."""
    if not isinstance(route, GenerateRoute) or len(probe_ids) < 2:
        return False
    probe = ScoreRequest(
        token_ids=probe_ids,
        scored=(False,) + (True,) * (len(probe_ids) - 1),
        given_ids=tuple((id,) for id in probe_ids[1:]),
    )
    plain = route.score_body(pool.config.model, probe_ids, 0)
    body = add_given_ids(plain, probe, realized=False)

    def read(answer: Any) -> bool:
        if answer.get("prompt_token_id_logprobs") is None:  # an older vLLM ignores the fields
            return False
        logp_T1 = read_given_logps(answer, probe, num_ids=1)
        logps = read_logps(route.read_prompt_logps(answer), probe)
        if not torch.allclose(logp_T1[:, 0], torch.tensor(logps), atol=MAX_GIVEN_DIFFERENCE):
            raise BadAnswerError("log-probs of given ids that are not those of its prompt_logprobs")
        return True

    try:
        return await pool.ask(replica, Request(path=route.path, body=body, parse=read))
    except RefusedError:
        return False


async def _ask_logprobs_mode(
    pool: ReplicaPool, replica: Replica, route: Route, probe_ids: tuple[int, ...]
) -> Literal["raw", "processed"]:
    """Whether temperature changes the log-prob of the likeliest token."""
    plain, hot = [
        (await _sample_one(pool, replica, route, probe_ids, temperature=t)).top_logps[0]
        for t in (1.0, 2.0)
    ]
    if plain > 0 or hot > 0:
        raise RecipeError(
            f"{pool.field}.urls: {replica.url} gives logits in place of log-probs. Start it with "
            "--logprobs-mode processed_logprobs"
        )
    return "raw" if plain == hot else "processed"
