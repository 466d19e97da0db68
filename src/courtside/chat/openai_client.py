"""A model behind OpenAI's chat completions, over HTTP.

Each try has a request id, which messages and logs of failures name, as they do for servers of
rollouts and scores.
The key is read from the environment when the client is made and goes into one header; it is in no
record, message or file of ours.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from courtside.chat.api_requests import make_request_fields
from courtside.chat.model_client import Reply
from courtside.errors import RunError
from courtside.recipe.endpoint import EndpointConfig, read_api_key
from courtside.request_ids import HEADER, RequestIds
from courtside.sanitize import to_one_line, truncate
from courtside.tls import explain_tls_failure, make_tls_context
from courtside.types import Message

LONGEST_WAIT = 60.0
"""Seconds between two tries, whatever the server asks for."""
GO_ON = "Then start the same command again: a run goes on from its last checkpoint"
LOGGER = logging.getLogger("courtside.servers")


class _Busy(Exception):
    """Worth another try."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class Replies(NamedTuple):
    replies: list[Reply | None]
    """In the order of the prompts; None: there is none."""
    errors: list[RunError]
    """Of those without a reply, the first first."""


Ask = Callable[[Sequence[Message]], "Future[Reply | RunError]"]
"""Begins a request; the result is the error where there is no reply after all retries."""


class OpenAIClient:
    def __init__(
        self,
        endpoint: EndpointConfig,
        *,
        field: str,
        max_new_tokens: int,
        temperature: float,
        shorten: str,
        first_wait: float = 1.0,
    ):
        """`field`: of the recipe, for messages; `shorten`: the fix for prompts too long."""
        self.endpoint, self.field, self.shorten = endpoint, field, shorten
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.first_wait = first_wait
        """Seconds before the second try; doubled each time."""
        self._key = read_api_key(endpoint.api_key_env, field)
        self._verify = make_tls_context([endpoint.base_url])
        self._ids = RequestIds()
        self._stop = threading.Event()
        """Set when requests are given up, so that the others do not go on trying."""

    def fits(self, prompt: Sequence[Message]) -> bool:
        return True

    def __call__(self, prompts: Sequence[Sequence[Message]]) -> list[Reply]:
        """All replies; the first failure is raised, and gives the others up."""
        replies, errors = self.try_each(prompts, max_failures=0)
        if errors:
            raise errors[0]
        return [reply for reply in replies if reply is not None]

    def try_each(
        self,
        prompts: Sequence[Sequence[Message]],
        *,
        max_failures: int,
        count_done: Callable[[], None] = lambda: None,
    ) -> Replies:
        """With more failures than `max_failures` the other requests are given up. `count_done` is
        called after each request, in the calling thread."""
        replies: list[Reply | None] = [None] * len(prompts)
        errors: list[RunError] = []
        if not prompts:
            return Replies([], [])
        with self.connect() as ask:
            futures = {ask(prompt): i for i, prompt in enumerate(prompts)}
            for future in as_completed(futures):
                count_done()
                reply = future.result()  # raises what is a bug of ours
                if isinstance(reply, RunError):
                    errors.append(reply)
                else:
                    replies[futures[future]] = reply
                if len(errors) > max_failures:
                    break
        return Replies(replies, errors)

    @contextmanager
    def connect(self) -> Iterator[Ask]:
        """Requests begin in threads, `max_concurrency` at a time; what is under way at the end is
        given up."""
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._stop.clear()
        with httpx.Client(
            timeout=self.endpoint.timeout, headers=headers, verify=self._verify
        ) as client:
            threads = ThreadPoolExecutor(max_workers=self.endpoint.max_concurrency)
            try:
                yield lambda prompt: threads.submit(self._try, client, prompt)
            finally:
                self._stop.set()
                threads.shutdown(wait=True, cancel_futures=True)

    def _try(self, client: httpx.Client, prompt: Sequence[Message]) -> Reply | RunError:
        try:
            return self._ask(client, prompt)
        except RunError as error:
            return error

    def _ask(self, client: httpx.Client, prompt: Sequence[Message]) -> Reply:
        body = self._body(prompt)
        for tries in range(1, self.endpoint.max_retries + 2):
            try:
                return self._send(client, body)
            except _Busy as busy:
                last = busy
            pause = self.first_wait * 2 ** (tries - 1) if last.wait is None else last.wait
            if tries <= self.endpoint.max_retries and self._stop.wait(min(pause, LONGEST_WAIT)):
                break  # another request failed for good; its error is the one to tell
        raise RunError(
            f"{self.field}.base_url = {self.endpoint.base_url!r}: no answer after {tries} "
            f"tries, the last: {last}. Check that the server runs and can be reached from here, or "
            f"raise its timeout and retries. {GO_ON}"
        )

    def _body(self, prompt: Sequence[Message]) -> dict[str, Any]:
        extra = {
            name: dict(value) if not isinstance(value, str | int | float) else value
            for name, value in self.endpoint.extra_body.items()
        }
        limit = {"max_tokens": self.max_new_tokens}
        return {
            "model": self.endpoint.model,
            **make_request_fields(prompt),
            "temperature": self.temperature,
            **({} if "max_completion_tokens" in extra else limit),
            **extra,
        }

    def _send(self, client: httpx.Client, body: dict[str, Any]) -> Reply:
        """Once; what fails may be a counted drop, so it is logged here."""
        name = self._ids.make()
        try:
            return self._send_as(name, client, body)
        except (_Busy, RunError) as error:
            url = self.endpoint.base_url
            fields = {"server": self.field, "url": url, "request_id": name}
            LOGGER.info("%s: %s", url, error, extra={"event": "request_failed", **fields})
            raise

    def _send_as(self, name: str, client: httpx.Client, body: dict[str, Any]) -> Reply:
        url = f"{self.endpoint.base_url}/chat/completions"
        try:
            response = client.post(url, json=body, headers={HEADER: name})
        except httpx.TransportError as error:
            if (explanation := explain_tls_failure(error)) is not None:
                raise RunError(
                    f"{self.field}.base_url = {self.endpoint.base_url!r}: {explanation}"
                ) from None
            raise _Busy(f"{type(error).__name__}: {error} ({name})") from None
        status = response.status_code
        if status in (408, 425, 429) or status >= 500:
            reason = f"status {status}: {self._excerpt(response)} ({name})"
            raise _Busy(reason, _retry_after(response))
        if status != 200:
            raise RunError(
                f"{self.field}.base_url = {self.endpoint.base_url!r} refused the request {name} "
                f"(status {status}): {self._excerpt(response)}. {self._fix(status)}. {GO_ON}"
            )
        return self._read_reply(name, response)

    def _read_reply(self, name: str, response: httpx.Response) -> Reply:
        try:
            body = response.json()
            message = body["choices"][0]["message"]
            text, calls = message.get("content"), message.get("tool_calls")
            thoughts = message.get("reasoning_content") or message.get("reasoning")
            reason = body["choices"][0].get("finish_reason")
            usage = body.get("usage") or {}
            num_tokens = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise RunError(
                f"{self.field}.base_url = {self.endpoint.base_url!r} answered the request "
                f"{name} with something that is no chat completion: {self._excerpt(response)}. "
                "Give the address up to and with the version, like http://localhost:8000/v1. "
                f"{GO_ON}"
            ) from None
        input_tokens, output_tokens = (max(0, n) if isinstance(n, int) else 0 for n in num_tokens)
        # Nothing (a refusal, thoughts alone) is a reply too: whoever parses it counts it.
        return Reply(
            text=text if isinstance(text, str) else "",
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            thoughts=thoughts if isinstance(thoughts, str) else "",
            tool_calls=calls if isinstance(calls, list) else (),
            is_truncated=reason == "length",
            request_id=name,
        )

    def _fix(self, status: int) -> str:
        if status in (401, 403):
            return f"Check the key in the variable that {self.field}.api_key_env names"
        if status == 404:
            return f"Check {self.field}.base_url (it ends in the version, like /v1) and its model"
        if status in (400, 413, 422):
            return f"If the prompt is too long for the model, {self.shorten}"
        return f"Check {self.field}"

    def _excerpt(self, response: httpx.Response) -> str:
        """The beginning of what came back. Some servers repeat the key in it."""
        text = response.text
        if self._key is not None:
            text = text.replace(self._key, "***")
        return truncate(to_one_line(text), 300) or "nothing"


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdecimal() else None
