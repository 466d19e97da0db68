"""All of the student's weights on vLLM servers, which read them from a shared folder or get them
from a GPU (`nccl_transfer`).

A server is paused meanwhile, so no token is sampled with half of them, and its prefix cache
is emptied: vLLM keeps keys and values of the weights before. The name of the weights is given to
the server last; its answers carry it, so a server that was restarted tells by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Protocol

from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.replicas import Replica
from courtside.engines.served.requests import (
    GO_ON,
    BadAnswerError,
    RefusedError,
    Request,
    UnavailableError,
)
from courtside.engines.served.shared_folder import SharedFolder
from courtside.errors import ServerError
from courtside.sanitize import to_one_line, truncate

SWITCH = "VLLM_SERVER_DEV_MODE=1"
"""Of the environment of a server: without it there are no routes for weights."""
UNSEEN = ("Repo id must be", "Cannot find any model weights", "No such file or directory")
"""What vLLM says of a folder that it does not have, before its engine ends."""
RESUME = "/resume"


class Carrier(Protocol):
    """Brings weights into a server that is paused."""

    def publish(self, name: str) -> Hashable:
        """The student's weights as they are now; returns a value that other weights do not have."""

    def locate(self, name: str) -> Path | None:
        """Where other ranks find what was published; None: in no folder."""

    def adopt(self, name: str, folder: Path | None) -> None:
        """What another rank has published there."""

    def retract(self, name: str) -> None: ...

    async def deliver(self, replica: Replica, name: str) -> None: ...


class FullWeightsTransport:
    labels_answers = True

    def __init__(self, pool: ReplicaPool, carrier: Carrier):
        self.pool, self.carrier = pool, carrier
        self._fingerprints: dict[str, Hashable] = {}
        """Of what was published, by name."""
        self._checksums: dict[str, tuple[Hashable, Mapping[str, str]]] = {}
        """By replica: of the weights whose checksums were taken last, ours and the server's."""

    def publish(self, name: str) -> tuple[Hashable, Path | None]:
        self._fingerprints[name] = self.carrier.publish(name)
        return self._fingerprints[name], self.carrier.locate(name)

    def adopt(self, name: str, published: tuple[Hashable, Path | None]) -> None:
        self._fingerprints[name], folder = published
        self.carrier.adopt(name, folder)

    def retract(self, name: str) -> None:
        self.carrier.retract(name)

    async def load(self, replica: Replica, name: str) -> None:
        if await self.ask_name(replica) != name:  # else the answer to an earlier try was lost
            self.pool.farewells[replica.url, RESUME] = (RESUME, {})
            await self._post(replica, "/pause?mode=wait&clear_cache=true")
            await self.carrier.deliver(replica, name)
            reset = await self._post(replica, "/reset_prefix_cache")
            if not isinstance(reset, Mapping) or reset.get("success") is not True:
                raise ServerError(
                    f"{self.pool.field}.urls: {replica.url} did not empty its prefix cache, and "
                    "would go on from keys and values of older weights. Restart the server. "
                    f"{GO_ON}"
                )
            await self._post(replica, "/update_weight_version", new_version=name)
        await self._post(replica, RESUME)
        self.pool.farewells.pop((replica.url, RESUME), None)

    async def unload(self, replica: Replica, name: str) -> None:
        """The newer ones took their place."""

    async def find_stale_weights(self, replica: Replica, name: str) -> str | None:
        """Checksums tell where a step changed less than log-probs are rounded by."""
        fingerprint = self._fingerprints[name]
        ask = Request(path="/weight_checker", body={"action": "checksum"}, parse=_read_checksums)
        try:
            checksums = await self.pool.send(replica, ask)
        except RefusedError:
            return None  # an older vLLM
        before, self._checksums[replica.url] = (
            self._checksums.get(replica.url),
            (fingerprint, checksums),
        )
        if before is None or not checksums or before[1] != checksums or before[0] == fingerprint:
            return None
        return "the trainer's weights changed, and the checksums of the server's did not"

    async def ask_name(self, replica: Replica) -> str:
        """Of the weights that the server has; vLLM calls those that it started with `default`."""
        return str(await self._send(replica, Request(path="/weight_info", parse=_read_name)))

    async def _post(self, replica: Replica, path: str, **body: Any) -> Any:
        return await self._send(replica, Request(path=path, body=body, parse=lambda answer: answer))

    async def _send(self, replica: Replica, request: Request[Any]) -> Any:
        try:
            return await self.pool.send(replica, request)
        except RefusedError as error:
            if error.status in (404, 405):
                raise ServerError(
                    f"{error}. Without student.lora all weights travel: start it with {SWITCH}, as "
                    "`courtside serve` does"
                ) from None
            raise


class FolderCarrier:
    """Weights that a server reads from a folder in place of its own."""

    def __init__(self, pool: ReplicaPool, folder: SharedFolder, save: Callable[[Path], Hashable]):
        """`save` writes all weights into a folder and returns a value that other weights do not
        have."""
        self.pool, self.folder, self._save = pool, folder, save

    def publish(self, name: str) -> Hashable:
        return self.folder.write(name, self._save)

    def locate(self, name: str) -> Path:
        return self.folder.locate(name)

    def adopt(self, name: str, folder: Path | None) -> None:
        assert folder is not None, "the leader wrote one"
        self.folder.adopt(name, folder)

    def retract(self, name: str) -> None:
        self.folder.remove(name)

    async def deliver(self, replica: Replica, name: str) -> None:
        folder = self.folder.locate(name)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await self.pool.send(replica, Request(path="/collective_rpc", body=body, parse=str))
        except UnavailableError as error:
            if any(text in str(error) for text in UNSEEN):
                raise ServerError(
                    f"{self.pool.field}.sync_folder: {replica.url} does not see {folder}, and vLLM "
                    f"ends where it cannot read weights ({error}). Name a folder on a disk that it "
                    f"has under the same path, and start it again. {GO_ON}"
                ) from None
            raise


def _read_checksums(answer: Any) -> Mapping[str, str]:
    checksums = answer.get("checksums") if isinstance(answer, Mapping) else None
    if not isinstance(checksums, Mapping):
        raise BadAnswerError(f"{truncate(to_one_line(str(answer)), 200)!r} as checksums")
    return checksums


def _read_name(answer: Any) -> str:
    name = answer.get("weight_version") if isinstance(answer, Mapping) else None
    if not isinstance(name, str):
        raise BadAnswerError(f"{truncate(to_one_line(str(answer)), 200)!r} as the name of weights")
    return name
