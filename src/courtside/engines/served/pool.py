"""HTTP to the replicas of one server: pooled connections, retries, failover, a clean end.

Requests run in an event loop in a thread of its own. Whoever waits for them may be interrupted:
then they are cancelled, their connections are closed, and vLLM stops computing them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from courtside.engines.served.hedging import HedgeTimer
from courtside.engines.served.replicas import (
    LONGEST_WAIT,
    Replica,
    choose_idle_replica,
    choose_replica,
)
from courtside.engines.served.requests import (
    GO_ON,
    Answer,
    AttemptError,
    BadAnswerError,
    NoAnswerError,
    RefusedError,
    Request,
    StaleReplicaError,
    UnavailableError,
)
from courtside.errors import ServerError
from courtside.recipe.endpoint import read_api_key
from courtside.recipe.server import ServerConfig
from courtside.request_ids import HEADER, RequestIds
from courtside.sanitize import to_one_line, truncate
from courtside.tls import explain_tls_failure, make_tls_context

CONNECT_SECONDS = 10.0
FAREWELL_SECONDS = 2.0
RECHECK_SECONDS = 2.0
"""Until somebody asks again whether it is known by now what an answer takes."""
SLOWER = "another server answered the same request first, after a multiple of what it usually takes"
MAX_EXCERPT = 300
BUSY = (408, 425, 429)
LOGGER = logging.getLogger("courtside.servers")


@dataclass(slots=True)
class ClosingLock:
    """A loop that has stopped takes work and never does it."""

    mutex: threading.Lock = field(default_factory=threading.Lock)
    is_closed: bool = False


class ReplicaPool:
    def __init__(self, config: ServerConfig, *, field: str, first_wait: float = 1.0):
        """`field`: of the recipe, for messages."""
        self.config, self.field = config, field
        self.first_wait = first_wait
        """Seconds before the second try; doubled each time."""
        self.check: Callable[[Replica], Awaitable[None]] | None = None
        """Run on a replica of which it is not known what it can do; raises `UnavailableError`."""
        self.prepare: Callable[[Replica], Awaitable[None]] | None = None
        """Run on a replica before each of its requests: loads what it lacks."""
        self.recover: Callable[[Replica, RefusedError | StaleReplicaError], bool] = (
            lambda replica, error: False
        )
        """Whether a request is worth another try, after `prepare`."""
        self._key = read_api_key(config.api_key_env, field)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._client = httpx.AsyncClient(
            headers=headers,
            verify=make_tls_context(config.urls),
            timeout=httpx.Timeout(config.timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._loop = asyncio.new_event_loop()
        self.hedges = HedgeTimer(hedge_after=config.hedge_after)
        self.replicas = [
            Replica(server=field, url=url, slots=asyncio.Semaphore(config.max_concurrency))
            for url in config.urls
        ]
        self._lock = ClosingLock()
        self._ids = RequestIds()
        self.farewells: dict[tuple[str, str], tuple[str, Mapping[str, Any]]] = {}
        """By replica and what it holds for us: path and body of a last request, which gives that
        back."""
        thread = threading.Thread(target=self._loop.run_forever, name=field, daemon=True)
        thread.start()
        self.close = weakref.finalize(
            self, _close, thread, self._loop, self._client, self.farewells, self._lock
        )
        """Cancels what is under way and says farewell; also at the end of the process."""

    # ── from other threads ───────────────────────────────────────────────────────────────────────

    def ask_all(
        self,
        requests: Sequence[Request[Answer]],
        *,
        report: Callable[[int, Answer], None] = lambda index, answer: None,
    ) -> list[Answer]:
        """Answers in the order of the requests; the first failure is raised, and cancels the
        others. `report` is called in another thread as answers come."""
        return self.run(self._answer_all(requests, report))

    def ask_each(self, make: Callable[[Replica], Awaitable[Answer]]) -> list[Answer]:
        """One coroutine for each replica, at the same time."""

        async def run() -> list[Answer]:
            return await _gather([make(replica) for replica in self.replicas])

        return self.run(run())

    def begin(self, request: Request[Answer]) -> Future[Answer]:
        """The answer to come. To cancel the future is to cancel the request."""
        return self._start(self._answer(request))

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        future = self._start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        with self._lock.mutex:
            if not self._lock.is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise ServerError(f"{self.field}: the run has ended, and nothing more is asked for")

    # ── in the event loop ────────────────────────────────────────────────────────────────────────

    async def _answer_all(
        self, requests: Sequence[Request[Answer]], report: Callable[[int, Answer], None]
    ) -> list[Answer]:
        async def answer(index: int, request: Request[Answer]) -> Answer:
            result = await self._answer(request)
            report(index, result)
            return result

        return await _gather([answer(i, request) for i, request in enumerate(requests)])

    async def _answer(self, request: Request[Answer]) -> Answer:
        """By some replica; those that fail are left alone for a while."""
        num_tries = self.config.max_retries + len(self.replicas)
        last = ""
        for _ in range(num_tries):
            try:
                return await self._answer_once(request)
            except AttemptError as error:
                last = str(error)
        raise self._no_answer(num_tries, last)

    async def _answer_once(self, request: Request[Answer]) -> Answer:
        """By one replica, or by the faster of two where the first takes far longer than usual."""
        replica = await self._acquire(request.key)
        replicas = [replica]
        first = asyncio.ensure_future(self._attempt(replica, request))
        attempts = {first}
        try:
            while request.kind is not None:
                seconds = self.hedges.seconds(request.kind)
                pause = RECHECK_SECONDS if seconds is None else seconds
                if (await asyncio.wait(attempts, timeout=pause))[0]:
                    break
                other = choose_idle_replica(self.replicas, replica)
                if seconds is None or other is None:
                    # Nobody knows yet what such answers take; or the others are busy, and a second
                    # request would take their time.
                    continue
                self.hedges.num_hedged += 1
                replica.num_hedged += 1
                LOGGER.info(
                    "%s: no answer after %.1f s, so %s is asked, too", replica.url, seconds,
                    other.url, extra={"event": "request_hedged", "server": self.field},
                )  # fmt: skip
                await other.slots.acquire()  # at once: it is idle
                other.num_assigned += 1
                replicas.append(other)
                attempts.add(asyncio.ensure_future(self._attempt(other, request)))
                break
            pending = set(attempts)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    error = attempt.exception()
                    if error is None:
                        if attempt is not first and not first.done():
                            self.hedges.num_won += 1
                            self.report_failure(replica, SLOWER)
                        return attempt.result()
                    if not pending or not isinstance(error, AttemptError):
                        raise error
            raise AssertionError("an attempt ends with an answer or an error")
        finally:
            for attempt in attempts:
                attempt.cancel()
            # Here and not in the attempts: one that is cancelled before it begins runs no line.
            for replica in replicas:
                replica.num_assigned -= 1
                replica.slots.release()
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _attempt(self, replica: Replica, request: Request[Answer]) -> Answer:
        """By this replica, of which the caller has a slot; a failure blocks it for a while."""
        try:
            await self.make_ready(replica)
            start = asyncio.get_running_loop().time()
            answer = await self.send(replica, request)
        except UnavailableError as error:
            self.report_failure(replica, str(error), error.wait)
            replica.num_failed += 1
            raise AttemptError(f"{replica.url}: {error}") from None
        except (RefusedError, StaleReplicaError) as error:
            if not self.recover(replica, error):
                raise
            replica.num_failed += 1
            raise AttemptError(f"{replica.url}: {error}") from None
        if replica.report_answer():
            LOGGER.warning("%s: %s answers again", self.field, replica.url)
        seconds = asyncio.get_running_loop().time() - start
        replica.answer_seconds += seconds
        self.hedges.add_answer(request.kind, seconds)
        return answer

    async def make_ready(self, replica: Replica) -> None:
        """What comes before each request to a replica."""
        if not replica.is_checked and self.check is not None:
            await self.check(replica)
            replica.is_checked = True
        if self.prepare is not None:
            await self.prepare(replica)

    def report_failure(self, replica: Replica, reason: str, wait: float | None = None) -> None:
        """Others take its work for a while; the first failure in a row is logged."""
        if replica.report_failure(self.first_wait, wait):
            LOGGER.warning("%s: %s is left alone for a while: %s", self.field, replica.url, reason)

    async def _acquire(self, key: str | None) -> Replica:
        while True:
            replica = choose_replica(self.replicas, key)
            if replica is None:
                until = min(replica.blocked_until for replica in self.replicas)
                await asyncio.sleep(max(0.0, until - asyncio.get_running_loop().time()) + 0.001)
                continue
            replica.num_assigned += 1
            try:
                await replica.slots.acquire()
            except BaseException:
                replica.num_assigned -= 1
                raise
            if not replica.is_blocked:
                return replica
            replica.num_assigned -= 1
            replica.slots.release()

    async def ask(self, replica: Replica, request: Request[Answer]) -> Answer:
        """By this replica and no other, with retries."""
        for tries in range(1, self.config.max_retries + 2):
            try:
                return await self.send(replica, request)
            except UnavailableError as error:
                last, wait = f"{replica.url}: {error}", error.wait
            if tries <= self.config.max_retries:
                pause = self.first_wait * 2.0 ** (tries - 1) if wait is None else wait
                await asyncio.sleep(min(pause, LONGEST_WAIT))
        raise self._no_answer(tries, last)

    async def send(self, replica: Replica, request: Request[Answer]) -> Answer:
        """Once; raises `UnavailableError`."""
        name = self._ids.make()
        try:
            return await self._send_as(name, replica, request)
        except (UnavailableError, StaleReplicaError) as error:
            fields = {"server": self.field, "url": replica.url, "request_id": name}
            LOGGER.info("%s: %s", replica.url, error, extra={"event": "request_failed", **fields})
            raise

    async def _send_as(self, name: str, replica: Replica, request: Request[Answer]) -> Answer:
        headers = {HEADER: name}
        if request.key is not None:
            headers["X-Session-ID"] = request.key  # for a router in front of the servers
        url = replica.url + request.path
        options: dict[str, Any] = {"headers": headers}
        if request.timeout is not None:
            options["timeout"] = min(request.timeout, self.config.timeout)
        try:
            if request.body is None:
                response = await self._client.get(url, **options)
            else:
                response = await self._client.post(url, json=request.body, **options)
        except httpx.TransportError as error:
            if (explanation := explain_tls_failure(error)) is not None:
                raise ServerError(f"{self.field}.urls: {replica.url}: {explanation}") from None
            reason = f"{type(error).__name__} {error}".strip()
            raise UnavailableError(f"{reason} ({name})") from None
        status = response.status_code
        if status in BUSY or status >= 500:
            raise UnavailableError(
                f"status {status}: {self._excerpt(response)} ({name})", _retry_after(response)
            )
        if status != 200:
            raise RefusedError(
                f"{self.field}.urls: {url} refused the request {name} (status {status}): "
                f"{self._excerpt(response)}. {self._fix(status)}",
                status=status,
                text=response.text,
            )
        try:
            return request.parse(_read_json(response))
        except BadAnswerError as error:
            raise ServerError(
                f"{self.field}.urls: {url} answered with {error} ({name}). Nothing of it was used. "
                f"Check that this is the server that is meant and restart it. {GO_ON}"
            ) from None

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def _no_answer(self, num_tries: int, last: str) -> NoAnswerError:
        return NoAnswerError(
            f"{self.field}.urls: no answer after {num_tries} tries, the last to {last}. Check that "
            f"the server runs and can be reached from here, or raise {self.field}.max_retries and "
            f"timeout. {GO_ON}"
        )

    def _fix(self, status: int) -> str:
        if status in (401, 403):
            return f"Check the key in the variable that {self.field}.api_key_env names"
        if status == 404:
            return f"Check {self.field}.urls, {self.field}.model, and the server's flags"
        return f"Check {self.field} and the flags that the server was started with"

    def _excerpt(self, response: httpx.Response) -> str:
        """The beginning of what came back. Some servers repeat the key in it."""
        text = response.text
        if self._key is not None:
            text = text.replace(self._key, "***")
        return truncate(to_one_line(text), MAX_EXCERPT) or "nothing"


async def _gather(work: Sequence[Awaitable[Answer]]) -> list[Answer]:
    """All results, in order; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read_json(response: httpx.Response) -> Any:
    if response.text[:1] not in ("{", "["):
        return response.text
    try:
        return response.json()
    except (ValueError, RecursionError):
        raise BadAnswerError(
            f"something that is no JSON: {truncate(to_one_line(response.text), MAX_EXCERPT)}"
        ) from None


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdecimal() else None


def _close(
    thread: threading.Thread,
    loop: asyncio.AbstractEventLoop,
    client: httpx.AsyncClient,
    farewells: Mapping[tuple[str, str], tuple[str, Mapping[str, Any]]],
    lock: ClosingLock,
) -> None:
    async def say(url: str, path: str, body: Mapping[str, Any]) -> None:
        with suppress(httpx.HTTPError):  # the server may be gone before us
            await client.post(url + path, json=body, timeout=FAREWELL_SECONDS)

    async def stop() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        farewell = [say(url, path, body) for (url, _), (path, body) in farewells.items()]
        await asyncio.gather(*farewell)
        await client.aclose()
        loop.call_soon(loop.stop)

    with lock.mutex:
        lock.is_closed = True  # what was begun before is a task by the time that `stop` runs
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(stop(), loop)
        if threading.current_thread() is not thread:  # garbage is collected in any thread
            thread.join(2 * FAREWELL_SECONDS)
