"""`server`: vLLM servers that answer token ids with token ids and log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from courtside.recipe.base import Section
from courtside.recipe.endpoint import check_server_url, check_variable_name

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServerConfig(Section):
    """One vLLM server, or several replicas of it."""

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Addresses without a path, e.g. `["http://node1:8000", "http://node2:8000"]`. Requests move
    away from a replica that does not answer, and it is tried again later."""
    model: str
    """Name of the model on the servers."""
    api_key_env: str | None = None
    """Name of the environment variable with the key; the key itself is never stored. Unset: no key
    is sent."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for one answer."""
    max_retries: NonNegativeInt = 5
    """After 429, 5xx and failed connections, waiting longer each time."""
    max_concurrency: PositiveInt = 64
    """Requests under way on each server."""
    hedge_after: PositiveFloat | Literal["auto"] = "auto"
    """Seconds after which a request without an answer goes to a second server that is free, too;
    the first answer counts. auto: three times what the longest answer of its kind took."""

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(check_server_url(url).removesuffix("/v1") for url in values)
        if len(set(urls)) != len(urls):
            raise ValueError(f"names a server twice: {list(urls)}; give each address once")
        return urls

    @field_validator("api_key_env")
    @classmethod
    def _check_variable_name(cls, value: str | None) -> str | None:
        return check_variable_name(value)

    @property
    def is_local(self) -> bool:
        """Whether all servers run on this machine."""
        return all(urlsplit(url).hostname in LOOPBACK for url in self.urls)


class RolloutServerConfig(ServerConfig):
    """Servers that sample with the student's weights."""

    sync_folder: Path | None = None
    """Folder for the weights of each step (a LoRA adapter, or all weights), which the servers read
    under the same path. Unset: a temporary folder, where all servers run on this machine."""
    weight_transfer: Literal["folder", "nccl"] = "folder"
    """How all weights travel, without student.lora. folder: through `sync_folder`. nccl: from the
    student's GPU to the servers', by vLLM, which must be installed here, too."""
    max_staleness: Annotated[int, Field(ge=0, le=16)] = 0
    """0: the servers sample a step when the one before it has trained. n: they sample up to n steps
    ahead while the student trains, with weights that are at most n optimizer steps older."""
    max_difference: PositiveFloat = 0.05
    """Nats a token by which the servers' log-probs of some prompts may differ from the trainer's,
    on average, after new weights were loaded; above it the run stops. Rounding in bfloat16 gives
    about 0.01 to 0.03, in float32 less than 0.001."""

    @property
    def lacks_sync_folder(self) -> bool:
        """Whether weights travel through a folder, and none is named."""
        return self.sync_folder is None and self.weight_transfer == "folder"
