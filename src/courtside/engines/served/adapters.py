"""The student's LoRA adapter on vLLM servers: a new name and a new folder for each version.

A server reads an adapter once per name, and its prefix cache is by name and folder; so neither is
used twice. A replica that was away gets the current adapter before its next request. After each
load log-probs of some prompts are compared with the trainer's.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from courtside.engines.base import ScoreRequest
from courtside.engines.served.pool import (
    GO_ON,
    RefusedError,
    ReplicaPool,
    Request,
    UnavailableError,
)
from courtside.engines.served.replicas import LONGEST_WAIT, Replica
from courtside.engines.served.routes import Route
from courtside.engines.served.scores import read_logps
from courtside.engines.served.weight_check import ProbeLogps, find_weight_problem
from courtside.errors import RunError

NUM_LOADED = 2
"""Versions on a server at a time, for --max-loras: the new one is loaded before the old one goes.
vLLM takes more without a word and evicts the oldest."""
UNLOAD = "/v1/unload_lora_adapter"
FLAGS = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, as `courtside serve` does"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    version: int
    """Optimizer steps of its weights."""
    name: str
    folder: Path
    trainer_logps: tuple[float, ...]
    """Of the probe prompts' tokens."""


class AdapterSync:
    def __init__(
        self,
        pool: ReplicaPool,
        route: Route,
        *,
        folder: Path,
        max_difference: float,
        save: Callable[[Path], None],
        score: Callable[[], tuple[float, ...]],
        probes: Sequence[ScoreRequest],
    ):
        """`save` writes the student's adapter into a folder; `score` gives the trainer's log-probs
        of the scored tokens of `probes`, one after the other."""
        self.pool, self.route = pool, route
        self.folder, self.max_difference = folder, max_difference
        self._save, self._score, self.probes = save, score, tuple(probes)
        self._run = uuid4().hex[:8]
        """In every name: a server may still have adapters of an earlier run."""
        self.current: Adapter | None = None
        self._earlier: dict[str, list[ProbeLogps]] = {}
        """By replica: of the first and the previous version that it loaded."""
        self._locks = {replica.url: asyncio.Lock() for replica in pool.replicas}
        self._folders: list[Path] = []
        pool.prepare, pool.recover = self._prepare, self._recover
        weakref.finalize(self, _remove, self._folders)

    def publish(self, version: int) -> Adapter:
        """Write the student's adapter, load it on every replica that answers, check that it is what
        they compute with, and forget older ones."""
        name = f"courtside-{self._run}-{version:06d}-{len(self._folders)}"
        adapter = Adapter(
            version=version,
            name=name,
            folder=self._write(name),
            trainer_logps=self._score(),
        )
        old, self.current = self.current, adapter
        for tries in range(self.pool.config.max_retries + 1):
            if any(self.pool.ask_each(self._try_to_prepare)):
                break
            time.sleep(min(self.pool.first_wait * 2.0**tries, LONGEST_WAIT))
        else:
            raise RunError(
                f"{self.pool.field}.urls: no server took the adapter of step {version}; none of "
                f"{list(self.pool.config.urls)} answers. Check that they run. {GO_ON}"
            )
        if old is not None:
            self.pool.ask_each(lambda replica: self._unload(replica, old))
            shutil.rmtree(old.folder, ignore_errors=True)
        return adapter

    def _write(self, name: str) -> Path:
        """Under another name first: a server never sees half of a folder."""
        work, folder = self.folder / f".{name}", self.folder / name
        self._folders.append(folder)
        try:
            work.mkdir(parents=True)
            self._save(work)
            work.rename(folder)
        except OSError as error:
            shutil.rmtree(work, ignore_errors=True)
            raise RunError(
                f"{self.pool.field}.adapters = {str(self.folder)!r}: the adapter cannot be written "
                f"({error.strerror}). Name a folder with space that you may write to. {GO_ON}"
            ) from error
        return folder.absolute()  # a link may lead elsewhere on the servers

    # ── in the event loop of the pool ────────────────────────────────────────────────────────────

    async def _try_to_prepare(self, replica: Replica) -> bool:
        """Whether it has the current adapter now; if not, it gets it before its next request."""
        try:
            await self._prepare(replica)
        except UnavailableError as error:
            replica.report_failure(self.pool.first_wait, error.wait)
            return False
        return True

    async def _prepare(self, replica: Replica) -> None:
        async with self._locks[replica.url]:
            adapter = self.current
            if adapter is None or adapter.name in replica.loaded:
                return
            await self._load(replica, adapter)
            await self._check(replica, adapter)
            replica.loaded.add(adapter.name)
            self.pool.farewells[replica.url] = (UNLOAD, {"lora_name": adapter.name})

    def _recover(self, replica: Replica, error: RefusedError) -> bool:
        """A server that was restarted has lost its adapters."""
        adapter = self.current
        if adapter is None or error.status != 404 or adapter.name not in error.text:
            return False
        replica.loaded.clear()
        return True

    async def _load(self, replica: Replica, adapter: Adapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        request = Request(path="/v1/load_lora_adapter", body=body, parse=str)
        try:
            await self.pool.send(replica, request)
        except RefusedError as error:
            if "already been loaded" in error.text:  # the answer to an earlier try was lost
                return
            if error.status == 404 and "No adapter found" in error.text:
                fix = (
                    f"The server does not see {adapter.folder}: set {self.pool.field}.adapters to "
                    "a folder on a disk that it has under the same path"
                )
            else:
                fix = f"Start it with {FLAGS}, and --max-lora-rank at least student.lora.rank"
            raise RunError(f"{error}. {fix}") from None

    async def _check(self, replica: Replica, adapter: Adapter) -> None:
        logps: list[float] = []
        for probe in self.probes:  # one at a time: see docs/serving.md
            body = self.route.score_body(adapter.name, probe.token_ids, 0)

            def parse(answer: Any, probe: ScoreRequest = probe) -> list[float]:
                return read_logps(self.route.read_prompt_logps(answer), probe)

            logps += await self.pool.send(
                replica, Request(path=self.route.path, body=body, parse=parse)
            )
        current = ProbeLogps(trainer=adapter.trainer_logps, server=tuple(logps))
        earlier = self._earlier.setdefault(replica.url, [])
        problem = find_weight_problem(current, earlier, max_difference=self.max_difference)
        if problem is not None:
            raise RunError(
                f"{self.pool.field}.urls: {replica.url} does not sample with the student's weights "
                f"of step {adapter.version}: {problem}. Nothing was sampled with them. "
                + (
                    "Check that it serves the model that the student starts from, in the dtype of "
                    f"student.dtype; for another one raise {self.pool.field}.max_difference"
                    if not earlier
                    else f"Restart the server. {GO_ON}"
                )
            )
        self._earlier[replica.url] = [*earlier[:1], current]

    async def _unload(self, replica: Replica, adapter: Adapter) -> None:
        if adapter.name not in replica.loaded:
            return
        replica.loaded.discard(adapter.name)
        request = Request(path=UNLOAD, body={"lora_name": adapter.name}, parse=str)
        try:
            await self.pool.send(replica, request)
        except (UnavailableError, RefusedError):
            return  # it restarted, or evicted the adapter: it is gone either way


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
