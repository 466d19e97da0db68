"""`endpoint`: a server that a reader or a draft stage asks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from courtside.errors import RecipeError
from courtside.recipe.base import Section

Plain = str | int | float | bool


class EndpointConfig(Section):
    """A server with OpenAI's chat completions API: vLLM, llama.cpp, a provider."""

    base_url: str
    """With the version, e.g. `http://localhost:8000/v1`."""
    model: str
    """Name of the model on the server."""
    api_key_env: str | None = None
    """Name of the environment variable with the key; the key itself is never stored. Unset: no key
    is sent."""
    timeout: PositiveFloat = 120.0
    """Seconds to wait for one reply."""
    max_retries: NonNegativeInt = 5
    """After 429, 5xx and failed connections, waiting longer each time."""
    max_concurrency: PositiveInt = 8
    """Concurrent requests."""
    extra_body: Mapping[str, Plain | Mapping[str, Plain]] = Field(default_factory=dict)
    """Further fields of each request, e.g. `seed`, or `max_completion_tokens` for servers that
    refuse `max_tokens`."""

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        return check_server_url(value, path="/v1")

    @field_validator("api_key_env")
    @classmethod
    def _check_variable_name(cls, value: str | None) -> str | None:
        return check_variable_name(value)

    @field_validator("extra_body")
    @classmethod
    def _check_extra_fields(
        cls, value: Mapping[str, Plain | Mapping[str, Plain]]
    ) -> Mapping[str, Plain | Mapping[str, Plain]]:
        homes = {
            "model": "endpoint.model",
            "temperature": "temperature beside the endpoint",
            "max_tokens": "max_new_tokens beside the endpoint",
        }
        for name in value:
            if name in homes:
                raise ValueError(f"{name} has a field of its own; set {homes[name]}")
            if name in ("messages", "n", "stream"):
                raise ValueError(f"{name} is set for each request; remove it")
        return value


def check_server_url(value: str, *, path: str = "") -> str:
    """The address of a server; `path`: what an example has after host and port."""
    parts = urlsplit(value)
    _ = parts.port  # raises where it is no port
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "holds a password, and recipes are stored with every run; remove it, and name an "
            "environment variable in api_key_env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError(
            f"must be the address of a server, like http://localhost:8000{path}, without a query"
        )
    return value.rstrip("/")


def check_variable_name(value: str | None) -> str | None:
    # The message does not repeat the value: it may be the key itself.
    if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError(
            "must be the name of an environment variable, like READER_KEY, never the key itself"
        )
    return value


def read_api_key(name: str | None, field: str) -> str | None:
    """The key in the variable that `field`.api_key_env names; None: no key is sent."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise RecipeError(
            f"{field}.api_key_env = {name!r}: that environment variable is not set. Set it "
            "to the key, or remove the field if the server wants none"
        )
    if not key.isascii() or not key.isprintable():
        raise RecipeError(
            f"{field}.api_key_env = {name!r}: the variable holds characters that no key "
            "has. Set it to the key alone"
        )
    return key
