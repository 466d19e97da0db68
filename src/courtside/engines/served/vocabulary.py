"""Compares the servers' tokenizer with one of ours, token by token.

vLLM tells the text of ids (`/detokenize`) and the ids of text (`/tokenize`). Token ids of another
vocabulary would mean other tokens without any error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.requests import BadAnswerError, RefusedError, Request

CHUNK = 2048
"""Ids of one request."""
TEXTS = (
    "Grüße aus Zürich: 3 + 4 = 7, 30 + 400 = 430.\n\n\tdef add(a, b):  return a+b",
    "한국어 日本語 العربية 🙂",
)


def find_difference(pool: ReplicaPool, tokenizer: Any) -> str | None:
    """How the servers' vocabulary differs from the tokenizer's; None: in nothing."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    chunks = [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
    texts = pool.ask_all([_detokenize(pool, chunk) for chunk in chunks])
    for chunk, text in zip(chunks, texts, strict=True):
        if text != tokenizer.decode(chunk) and (different := _narrow(pool, tokenizer, chunk)):
            id, text = different
            return f"the id {id} is {text!r} there and {tokenizer.decode([id])!r} here"
    for text, server_ids in zip(TEXTS, pool.ask_all([*_tokenize(pool)]), strict=True):
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        if server_ids != ours:
            return f"{text[:20]!r}… is tokenized as {server_ids[:8]} there and {ours[:8]} here"
    return None


def render_prompt(pool: ReplicaPool, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
    """By the servers' chat template; None: they have none."""
    body = {"model": pool.config.model, "messages": list(messages)}
    try:
        (ids,) = pool.ask_all([Request(path="/tokenize", body=body, parse=_read_tokens)])
    except RefusedError as error:
        if error.status != 400:
            raise
        return None
    return ids


def _narrow(pool: ReplicaPool, tokenizer: Any, ids: Sequence[int]) -> tuple[int, str] | None:
    """The first id of another text, and that text; None: only their concatenation differs."""
    (text,) = pool.ask_all([_detokenize(pool, ids)])
    if text == tokenizer.decode(list(ids)):
        return None
    if len(ids) == 1:
        return ids[0], text
    middle = len(ids) // 2
    return _narrow(pool, tokenizer, ids[:middle]) or _narrow(pool, tokenizer, ids[middle:])


def _detokenize(pool: ReplicaPool, ids: Sequence[int]) -> Request[str]:
    def read(answer: Any) -> str:
        if not isinstance(answer, Mapping) or not isinstance(answer.get("prompt"), str):
            raise BadAnswerError(f"{str(answer)[:200]!r} where a text was asked for")
        return str(answer["prompt"])

    body = {"model": pool.config.model, "tokens": list(ids)}
    return Request(path="/detokenize", body=body, parse=read)


def _tokenize(pool: ReplicaPool) -> Iterator[Request[list[int]]]:
    for text in TEXTS:
        body = {"model": pool.config.model, "prompt": text, "add_special_tokens": False}
        yield Request(path="/tokenize", body=body, parse=_read_tokens)


def _read_tokens(answer: Any) -> list[int]:
    tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
    if not isinstance(tokens, list):
        raise BadAnswerError(f"{str(answer)[:200]!r} where token ids were asked for")
    return tokens
