"""The student's LoRA adapter on vLLM servers: a new name and a new folder for each version.

A server reads an adapter once per name, and its prefix cache is by name and folder; so neither is
used twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.replicas import Replica
from courtside.engines.served.requests import RefusedError, Request
from courtside.engines.served.shared_folder import SharedFolder
from courtside.errors import ServerError


def count_loaded(max_staleness: int) -> int:
    """Versions on a server at a time, for --max-loras: the current one, those that are still
    sampled with, and a new one that is loaded before the oldest goes. vLLM takes more without a
    word and evicts the oldest."""
    return max_staleness + 2


UNLOAD = "/v1/unload_lora_adapter"
UNLOAD_SECONDS = 10.0
FLAGS = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, as `courtside serve` does"


class AdapterTransport:
    labels_answers = False

    def __init__(self, pool: ReplicaPool, folder: SharedFolder, save: Callable[[Path], None]):
        """`save` writes the student's adapter into a folder."""
        self.pool, self.folder, self._save = pool, folder, save

    def publish(self, name: str) -> Path:
        self.folder.write(name, self._save)
        return self.folder.locate(name)

    def adopt(self, name: str, published: Path) -> None:
        self.folder.adopt(name, published)

    def retract(self, name: str) -> None:
        self.folder.remove(name)

    async def load(self, replica: Replica, name: str) -> None:
        folder = self.folder.locate(name)
        body = {"lora_name": name, "lora_path": str(folder)}
        request = Request(path="/v1/load_lora_adapter", body=body, parse=str)
        try:
            await self.pool.send(replica, request)
        except RefusedError as error:
            # "already": the answer to an earlier try was lost.
            if "already been loaded" not in error.text:
                raise ServerError(f"{error}. {self._fix(error, folder)}") from None
        self.pool.farewells[replica.url, name] = (UNLOAD, {"lora_name": name})

    async def unload(self, replica: Replica, name: str) -> None:
        body = {"lora_name": name}
        request = Request(path=UNLOAD, body=body, parse=str, timeout=UNLOAD_SECONDS)
        with suppress(RefusedError):  # it evicted it, or restarted: gone either way
            await self.pool.send(replica, request)
        self.pool.farewells.pop((replica.url, name), None)

    async def find_stale_weights(self, replica: Replica, name: str) -> str | None:
        """A name was never loaded before, so nothing older can answer to it."""
        return None

    def _fix(self, error: RefusedError, folder: Path) -> str:
        if error.status == 404 and "No adapter found" in error.text:
            return (
                f"The server does not see {folder}: set {self.pool.field}.sync_folder to a folder "
                "on a disk that it has under the same path"
            )
        return f"Start it with {FLAGS}, and --max-lora-rank at least student.lora.rank"
