"""The student's weights on vLLM servers: each version under a name of its own, and checked.

How they travel is a `Transport`'s: as an adapter (`adapters`), or all of them (`full_weights`,
`nccl_transfer`). A replica that was away gets the current ones before its next request. After each
load log-probs of some prompts are compared with the trainer's.

Of several ranks the leader publishes each version and loads it into the replicas, and the others
wait for that. A replica that was away gets it from the rank that asks it first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from courtside.engines.base import ScoreRequest
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.replicas import LONGEST_WAIT, Replica
from courtside.engines.served.requests import (
    GO_ON,
    RefusedError,
    Request,
    StaleReplicaError,
    UnavailableError,
)
from courtside.engines.served.routes import Generated, Route
from courtside.engines.served.scores import read_logps
from courtside.engines.served.weight_check import (
    ProbeLogps,
    find_weight_problem,
    shows_last_change,
)
from courtside.errors import ServerError
from courtside.ranks import ALONE, Ranks
from courtside.types import VersionSpan

PATIENCE = 3.0
"""Replicas get so many times as long for new weights as the first of them took."""
MIN_PATIENCE = 5.0
"""Seconds."""
LOCK_SECONDS = 0.05
"""Between two tries to be the only rank that loads weights into a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    version: int
    """Optimizer steps."""
    name: str
    trainer_logps: tuple[float, ...]
    """Of the probe prompts' tokens."""


class Transport(Protocol):
    """Brings weights to one replica. A name is that of one version, and never used twice."""

    labels_answers: bool
    """Whether answers carry the name of the weights that sampled them. If not, the name is that of
    the model in requests, and a server without it refuses them."""

    def publish(self, name: str) -> Any:
        """The student's weights as they are now, for servers; returns what `adopt` takes."""

    def adopt(self, name: str, published: Any) -> None:
        """What another rank has published, so that this one may load it, too."""

    def retract(self, name: str) -> None:
        """No server is asked to load these any more."""

    async def load(self, replica: Replica, name: str) -> None:
        """Returns when this replica samples with them; raises `UnavailableError`."""

    async def unload(self, replica: Replica, name: str) -> None:
        """After newer ones are there; raises `UnavailableError`."""

    async def find_stale_weights(self, replica: Replica, name: str) -> str | None:
        """Where log-probs tell nothing: why what was loaded cannot be the published weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What the leader tells the other ranks of new weights."""

    weights: PublishedWeights
    published: Any
    """For `Transport.adopt`."""
    urls: frozenset[str]
    """Of the replicas that have them."""


class WeightSync:
    def __init__(
        self,
        pool: ReplicaPool,
        route: Route,
        transport: Transport,
        *,
        max_difference: float,
        score: Callable[[], tuple[float, ...]],
        probes: Sequence[ScoreRequest],
        max_staleness: int = 0,
        ranks: Ranks = ALONE,
    ):
        """`score` gives the trainer's log-probs of the scored tokens of `probes`, one after the
        other. `max_staleness`: how many older versions may still be asked for."""
        self.pool, self.route, self.transport = pool, route, transport
        self.ranks = ranks
        self.max_difference = max_difference
        self._score, self.probes = score, tuple(probes)
        self._run = uuid4().hex[:8]
        """In every name: a server may still have weights of an earlier run."""
        self._num_retained = 1 if transport.labels_answers else 1 + max_staleness
        """Where weights have no names in requests, a server has one version of them."""
        self.retained: list[PublishedWeights] = []
        """Versions that requests may name, the current one last."""
        self._versions: dict[str, int] = {}
        """Of everything that was published, by name."""
        self._earlier: dict[str, list[ProbeLogps]] = {}
        """By replica: of the first and the previous version that it loaded."""
        self._locks = {replica.url: asyncio.Lock() for replica in pool.replicas}
        pool.prepare, pool.recover = self._prepare, self._recover

    @property
    def current(self) -> PublishedWeights:
        return self.retained[-1]

    def name_model(self, weights: PublishedWeights) -> str:
        """The name that requests for these weights give."""
        return self.pool.config.model if self.transport.labels_answers else weights.name

    def publish(self, version: int) -> PublishedWeights:
        """Bring the student's weights to every replica that answers, check that they are what it
        computes with, and forget older ones. All ranks call it."""
        if self.ranks.is_leader:
            publication = self._publish(version)
            self.ranks.exchange(publication)
        else:
            publication = self.ranks.exchange(None)[0]
            self._adopt(publication)
        self._retire()
        return publication.weights

    def _publish(self, version: int) -> Publication:
        name = f"courtside-{self._run}-{version:06d}-{len(self._versions)}"
        self._versions[name] = version
        published = self.transport.publish(name)
        weights = PublishedWeights(version=version, name=name, trainer_logps=self._score())
        self.retained.append(weights)
        for tries in range(self.pool.config.max_retries + 1):
            if self.pool.run(self._prepare_all()):
                break
            time.sleep(min(self.pool.first_wait * 2.0**tries, LONGEST_WAIT))
        else:
            raise ServerError(
                f"{self.pool.field}.urls: no server took the weights of step {version}; none of "
                f"{list(self.pool.config.urls)} answers. Check that they run. {GO_ON}"
            )
        urls = frozenset(r.url for r in self.pool.replicas if name in r.loaded)
        return Publication(weights=weights, published=published, urls=urls)

    def _adopt(self, publication: Publication) -> None:
        weights = publication.weights
        self._versions[weights.name] = weights.version
        self.transport.adopt(weights.name, publication.published)
        self.retained.append(weights)
        for replica in self.pool.replicas:
            if replica.url in publication.urls:
                replica.loaded.add(weights.name)

    def _retire(self) -> None:
        """Forget the versions that no request names any more."""
        retired = {weights.name for weights in self.retained[: -self._num_retained]}
        if not retired:
            return
        # In one statement: requests of another thread may be under way.
        self.retained = self.retained[-self._num_retained :]
        if self.ranks.is_leader:
            self.pool.run(self._prepare_all())  # the servers unload them
        else:
            for replica in self.pool.replicas:
                replica.loaded -= retired
        for name in sorted(retired):
            self.transport.retract(name)

    def read_versions(self, generated: Generated) -> tuple[VersionSpan, ...]:
        """Of an answer's tokens; empty: the request named its weights."""
        if not self.transport.labels_answers:
            return ()
        spans = generated.weight_versions
        if unknown := [label for label, _, _ in spans if label not in self._versions]:
            raise StaleReplicaError(f"an answer sampled with the weights {unknown[0]!r}, not ours")
        if not spans or spans[0][1] != 0 or spans[-1][2] != len(generated.token_ids):
            raise StaleReplicaError("an answer that does not name the weights of its tokens")
        return tuple(VersionSpan(start, end, self._versions[name]) for name, start, end in spans)

    # ── in the event loop of the pool ────────────────────────────────────────────────────────────

    async def _prepare_all(self) -> bool:
        """Whether a replica has the current weights now. One that fails, hangs or is far slower
        than another gets them before its next request."""
        loop = asyncio.get_running_loop()
        start, seconds, is_ready = loop.time(), None, False
        available = [r for r in self.pool.replicas if not r.is_blocked] or self.pool.replicas
        work = {asyncio.ensure_future(self._try_to_prepare(r)): r for r in available}
        waiting = set(work)
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                is_ready |= any([task.result() for task in done])
                if is_ready and seconds is None:
                    seconds = max(PATIENCE * (loop.time() - start), MIN_PATIENCE)
            for task in waiting:
                self.pool.report_failure(work[task], "it does not take the weights in time")
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        return is_ready

    async def _try_to_prepare(self, replica: Replica) -> bool:
        """Whether it has the current weights now."""
        try:
            await self.pool.make_ready(replica)
        except UnavailableError as error:
            self.pool.report_failure(replica, str(error), error.wait)
            return False
        except RefusedError as error:  # it restarted between two requests
            if not self._recover(replica, error):
                raise
            return False
        return True

    async def _prepare(self, replica: Replica) -> None:
        """Load what it lacks, and unload what nobody asks for any more."""
        async with self._locks[replica.url]:
            if self._find_missing(replica) is None and not self._find_unneeded(replica):
                return
            async with self._keep_ranks_out(replica):
                while (weights := self._find_missing(replica)) is not None:
                    try:
                        await self.transport.load(replica, weights.name)
                        await self._check(replica, weights)
                    except ServerError:
                        if weights in self.retained:
                            raise
                        continue  # they were retired meanwhile, and their folder is gone
                    replica.loaded.add(weights.name)
                for name in self._find_unneeded(replica):
                    await self.transport.unload(replica, name)
                    replica.loaded.discard(name)

    def _find_missing(self, replica: Replica) -> PublishedWeights | None:
        """The oldest weights that requests may name and this replica does not have."""
        recent = self.retained[-self._num_retained :]
        return next((w for w in recent if w.name not in replica.loaded), None)

    def _find_unneeded(self, replica: Replica) -> list[str]:
        return sorted(replica.loaded - {weights.name for weights in self.retained})

    @asynccontextmanager
    async def _keep_ranks_out(self, replica: Replica) -> AsyncIterator[None]:
        """Two ranks may notice at once that a server was restarted."""
        while not self.ranks.try_lock(replica.url):
            await asyncio.sleep(LOCK_SECONDS)
        try:
            yield
        finally:
            self.ranks.unlock(replica.url)

    def _recover(self, replica: Replica, error: RefusedError | StaleReplicaError) -> bool:
        """A server that was restarted has lost its weights."""
        if isinstance(error, RefusedError) and (
            error.status != 404 or not any(w.name in error.text for w in self.retained)
        ):
            return False
        replica.loaded.clear()
        return True

    async def _check(self, replica: Replica, weights: PublishedWeights) -> None:
        logps: list[float] = []
        for probe in self.probes:  # one at a time: see docs/serving.md
            body = self.route.score_body(self.name_model(weights), probe.token_ids, 0)

            def parse(answer: Any, probe: ScoreRequest = probe) -> list[float]:
                return read_logps(self.route.read_prompt_logps(answer), probe)

            logps += await self.pool.send(
                replica, Request(path=self.route.path, body=body, parse=parse)
            )
        current = ProbeLogps(trainer=weights.trainer_logps, server=tuple(logps))
        earlier = self._earlier.setdefault(replica.url, [])
        problem = find_weight_problem(current, earlier, max_difference=self.max_difference)
        if problem is None and not shows_last_change(current, earlier):
            problem = await self.transport.find_stale_weights(replica, weights.name)
        if problem is not None:
            raise ServerError(
                f"{self.pool.field}.urls: {replica.url} does not sample with the student's weights "
                f"of step {weights.version}: {problem}. Nothing was sampled with them. "
                + (
                    "Check that it serves the model that the student starts from, in the dtype of "
                    f"student.dtype; for another one raise {self.pool.field}.max_difference"
                    if not earlier
                    else f"Restart the server. {GO_ON}"
                )
            )
        self._earlier[replica.url] = [*earlier[:1], current]
