"""vLLM's own transfer of weights over NCCL, from the trainer's GPU to those of a server.

All that courtside knows of it is in this file, and it is imported where a recipe asks for it. vLLM
must be installed beside courtside, because both ends of the transfer are its code.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.replicas import Replica
from courtside.engines.served.requests import BadAnswerError, Request, UnavailableError
from courtside.errors import RecipeError


def refuse_nccl(field: str) -> None:
    """`field`: of the recipe's server."""
    reason = None
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed in this environment, and it sends the weights"
    elif not torch.cuda.is_available():
        reason = "no GPU is visible here, and NCCL sends from one"
    if reason is not None:
        raise RecipeError(
            f"{field}.weight_transfer = 'nccl': {reason}. Use 'folder', which needs a disk that "
            "the servers share"
        )


class NcclCarrier:
    """One NCCL group for each replica: this process is its rank 0, the server's GPUs the others."""

    def __init__(
        self, pool: ReplicaPool, model: torch.nn.Module, fingerprint: Callable[[], Hashable]
    ):
        self.pool, self.model, self._fingerprint = pool, model, fingerprint
        self._engines: dict[str, Any] = {}
        """By replica: vLLM's end of the transfer in this process."""

    def publish(self, name: str) -> Hashable:
        return self._fingerprint()

    def locate(self, name: str) -> None:
        """Nothing was stored."""

    def adopt(self, name: str, folder: Path | None) -> None:
        raise AssertionError("refused with several ranks")

    def retract(self, name: str) -> None:
        """Nothing was stored."""

    async def deliver(self, replica: Replica, name: str) -> None:
        num_gpus = await self.pool.send(
            replica, Request(path="/get_world_size", parse=_read_world_size)
        )
        try:
            await asyncio.to_thread(self._send, replica.url, num_gpus)
        except (OSError, RuntimeError) as error:  # also of requests and NCCL
            self._engines.pop(replica.url, None)  # a server that was restarted needs a new group
            raise UnavailableError(f"weight transfer: {type(error).__name__} {error}") from error

    def _send(self, url: str, num_gpus: int) -> None:
        if url not in self._engines:
            self._engines[url] = self._connect(url, num_gpus)
        self._engines[url].send_weights()

    def _connect(self, url: str, num_gpus: int) -> Any:
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address, port = find_address(url)
        return WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(
                rank=0, master_address=address, master_port=port, world_size=1 + num_gpus
            ),
            client=HTTPVLLMWeightSyncClient(url, timeout=self.pool.config.timeout),
            source=ModuleSource(self.model),
        )


def find_address(url: str) -> tuple[str, int]:
    """Of this machine, as the server reaches it, and a free port."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((parts.hostname, parts.port or 80))  # sends nothing
        address = route.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]


def _read_world_size(answer: Any) -> int:
    try:
        return int(answer["world_size"])
    except (LookupError, TypeError, ValueError):
        raise BadAnswerError(f"{str(answer)[:200]!r} as the number of its GPUs") from None
