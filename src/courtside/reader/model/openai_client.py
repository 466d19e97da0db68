"""A model behind OpenAI's chat completions, over HTTP.

The key is read from the environment when the reader is made and goes into one header; it is in no
record, message or file of ours.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import httpx

from courtside.errors import RecipeError, RunError
from courtside.reader.model.client import Reply
from courtside.recipe.reader import ModelReaderConfig
from courtside.sanitize import to_one_line, truncate
from courtside.types import Message

LONGEST_WAIT = 60.0
"""Seconds between two tries, whatever the server asks for."""
GO_ON = "Then start the same command again: a run goes on from its last checkpoint"


class _Busy(Exception):
    """Worth another try."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class OpenAIClient:
    def __init__(self, config: ModelReaderConfig, *, first_wait: float = 1.0):
        assert config.endpoint is not None, "the recipe names a server"
        self.config = config
        self.endpoint = config.endpoint
        self.first_wait = first_wait
        """Seconds before the second try; doubled each time."""
        self._key = _key(self.endpoint.api_key_env)
        self._stop = threading.Event()
        """Set when one request failed for good, so that the others do not go on trying."""

    def fits(self, prompt: Sequence[Message]) -> bool:
        return True

    def __call__(self, prompts: Sequence[Sequence[Message]]) -> list[Reply]:
        if not prompts:
            return []
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._stop.clear()
        with (
            httpx.Client(timeout=self.endpoint.timeout, headers=headers) as client,
            ThreadPoolExecutor(max_workers=self.endpoint.max_concurrency) as threads,
        ):
            futures = [threads.submit(self._ask, client, prompt) for prompt in prompts]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
            for future in done:
                if (error := future.exception()) is not None:
                    raise error
            return [future.result() for future in futures]

    def _ask(self, client: httpx.Client, prompt: Sequence[Message]) -> Reply:
        body = self._body(prompt)
        for tries in range(1, self.endpoint.max_retries + 2):
            try:
                return self._once(client, body)
            except _Busy as busy:
                last = busy
            pause = self.first_wait * 2 ** (tries - 1) if last.wait is None else last.wait
            if tries <= self.endpoint.max_retries and self._stop.wait(min(pause, LONGEST_WAIT)):
                break  # another request failed for good; its error is the one to tell
        raise RunError(
            f"reader.endpoint.base_url = {self.endpoint.base_url!r}: no answer after {tries} tries "
            f"({last}). Check that the server runs and can be reached from here, or raise its "
            f"timeout and retries. {GO_ON}"
        )

    def _body(self, prompt: Sequence[Message]) -> dict[str, Any]:
        extra = {
            name: dict(value) if not isinstance(value, str | int | float) else value
            for name, value in self.endpoint.extra_body.items()
        }
        limit = {"max_tokens": self.config.max_new_tokens}
        return {
            "model": self.endpoint.model,
            "messages": [{"role": m.role, "content": m.content} for m in prompt],
            "temperature": self.config.temperature,
            **({} if "max_completion_tokens" in extra else limit),
            **extra,
        }

    def _once(self, client: httpx.Client, body: dict[str, Any]) -> Reply:
        try:
            response = client.post(f"{self.endpoint.base_url}/chat/completions", json=body)
        except httpx.TransportError as error:
            raise _Busy(f"{type(error).__name__}: {error}") from None
        status = response.status_code
        if status in (408, 425, 429) or status >= 500:
            raise _Busy(f"status {status}: {self._excerpt(response)}", _retry_after(response))
        if status != 200:
            raise RunError(
                f"reader.endpoint.base_url = {self.endpoint.base_url!r} refused the request "
                f"(status {status}): {self._excerpt(response)}. {_fix(status)}. {GO_ON}"
            )
        return self._reply(response)

    def _reply(self, response: httpx.Response) -> Reply:
        try:
            body = response.json()
            text = body["choices"][0]["message"].get("content")
            usage = body.get("usage") or {}
            num_tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise RunError(
                f"reader.endpoint.base_url = {self.endpoint.base_url!r} answered with something "
                f"that is no chat completion: {self._excerpt(response)}. Give the address up to "
                f"and with the version, like http://localhost:8000/v1. {GO_ON}"
            ) from None
        input_tokens, output_tokens = (n if isinstance(n, int) else 0 for n in num_tokens)
        # Nothing (a refusal, thoughts alone) is a reply too: it holds no hints, and is counted.
        return Reply(
            text=text if isinstance(text, str) else "",
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )

    def _excerpt(self, response: httpx.Response) -> str:
        """The beginning of what came back. Some servers repeat the key in it."""
        text = response.text
        if self._key is not None:
            text = text.replace(self._key, "***")
        return truncate(to_one_line(text), 300) or "nothing"


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise RecipeError(
            f"reader.endpoint.api_key_env = {name!r}: that environment variable is not set. Set it "
            "to the key, or remove the field if the server wants none"
        )
    if not key.isascii() or not key.isprintable():
        raise RecipeError(
            f"reader.endpoint.api_key_env = {name!r}: the variable holds characters that no key "
            "has. Set it to the key alone"
        )
    return key


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdecimal() else None


def _fix(status: int) -> str:
    if status in (401, 403):
        return "Check the key in the variable that reader.endpoint.api_key_env names"
    if status == 404:
        return "Check reader.endpoint.base_url (it ends in the version, like /v1) and its model"
    if status in (400, 413, 422):
        return (
            "If the prompt is too long for the model, lower reader.window_chars or "
            "reader.max_message_chars"
        )
    return "Check reader.endpoint"
