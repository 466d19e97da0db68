"""vLLM's two ways from token ids to token ids: requests to them and what comes back.

`/inference/v1/generate` gives integers (`--enable-scale-out`); `/v1/completions` is always there
and gives the same with `return_token_ids`. No field is left to the server's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from courtside.engines.base import Sampling
from courtside.engines.served.requests import BadAnswerError, UnavailableError
from courtside.sanitize import to_one_line, truncate

PromptLogps = list[Mapping[str, Any] | None]
"""For each prompt token: by token id `{logprob, rank}`; None for the first."""
NO_PROBABILITY = -9999.0
"""What vLLM writes for −inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    top_logps: tuple[float, ...]
    """Of the likeliest token of each position, where more than the sampled one was asked for."""
    finish_reason: str
    weight_versions: tuple[tuple[str, int, int], ...] = ()
    """Label of the weights, first token and end of each span; empty: the server does not say."""


class Route(Protocol):
    path: str

    def sample_body(
        self,
        model: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        stop_ids: Sequence[int],
        num_top: int = 0,
    ) -> dict[str, Any]: ...

    def read_sample(self, answer: Any) -> Generated: ...

    def score_body(self, model: str, token_ids: Sequence[int], top_k: int) -> dict[str, Any]: ...

    def read_prompt_logps(self, answer: Any) -> PromptLogps: ...


def _sampling_fields(
    sampling: Sampling, *, seed: int, stop_ids: Sequence[int], num_top: int
) -> dict[str, Any]:
    return {
        "n": 1,
        "seed": seed,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": True,
        "logprobs": num_top,
    }


class GenerateRoute:
    path = "/inference/v1/generate"

    def sample_body(
        self,
        model: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        stop_ids: Sequence[int],
        num_top: int = 0,
    ) -> dict[str, Any]:
        fields = _sampling_fields(sampling, seed=seed, stop_ids=stop_ids, num_top=num_top)
        fields["detokenize"] = bool(sampling.stop)  # stop strings are looked for in text
        return {"model": model, "token_ids": list(prompt_ids), "sampling_params": fields}

    def read_sample(self, answer: Any) -> Generated:
        choice = _only_choice(answer)
        try:
            content = choice["logprobs"]["content"]
            ids = tuple(choice["token_ids"])
            same = tuple(token["token_id"] for token in content)
            logps = tuple(token["logprob"] for token in content)
            top = tuple(max(t["logprob"] for t in token["top_logprobs"]) for token in content)
            versions = tuple(
                (str(span["version"]), int(span["start"]), int(span["end"]))
                for span in choice.get("weight_versions") or ()
            )
            generated = _check(ids, same, logps, top, choice["finish_reason"])
            return replace(generated, weight_versions=versions)
        except (LookupError, TypeError, ValueError):
            raise _not_understood(answer) from None

    def score_body(self, model: str, token_ids: Sequence[int], top_k: int) -> dict[str, Any]:
        fields = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k, "detokenize": True}
        return {"model": model, "token_ids": list(token_ids), "sampling_params": fields}

    def read_prompt_logps(self, answer: Any) -> PromptLogps:
        return _prompt_logps(answer, answer)


class CompletionsRoute:
    path = "/v1/completions"

    def sample_body(
        self,
        model: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        stop_ids: Sequence[int],
        num_top: int = 0,
    ) -> dict[str, Any]:
        fields = _sampling_fields(sampling, seed=seed, stop_ids=stop_ids, num_top=num_top)
        return {
            "model": model,
            "prompt": list(prompt_ids),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **fields,
        }

    def read_sample(self, answer: Any) -> Generated:
        choice = _only_choice(answer)
        try:
            logprobs = choice["logprobs"]
            ids = tuple(choice["token_ids"])
            same = tuple(int(token.removeprefix("token_id:")) for token in logprobs["tokens"])
            logps = tuple(logprobs["token_logprobs"])
            top = tuple(max(tokens.values()) for tokens in logprobs["top_logprobs"])
            return _check(ids, same, logps, top, choice["finish_reason"])
        except (LookupError, TypeError, ValueError, AttributeError):
            raise _not_understood(answer) from None

    def score_body(self, model: str, token_ids: Sequence[int], top_k: int) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
        }

    def read_prompt_logps(self, answer: Any) -> PromptLogps:
        return _prompt_logps(answer, _only_choice(answer))


def _only_choice(answer: Any) -> Any:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list):
        raise _not_understood(answer)
    if len(choices) != 1:
        raise BadAnswerError(f"{len(choices)} choices where one was asked for")
    return choices[0]


def _check(
    ids: tuple[int, ...],
    same: tuple[int, ...],
    logps: tuple[float, ...],
    top: tuple[float, ...],
    finish_reason: Any,
) -> Generated:
    if finish_reason in ("abort", "error"):
        raise UnavailableError(f"the server gave the request up ({finish_reason})")
    if not ids or len(logps) != len(ids):
        raise BadAnswerError(f"{len(ids)} sampled ids and {len(logps)} log-probs")
    if same != ids:
        raise BadAnswerError("log-probs of other ids than those that were sampled")
    for id, logp in zip(ids, logps, strict=True):
        if not math.isfinite(logp) or logp <= NO_PROBABILITY:
            raise BadAnswerError(f"the log-prob {logp} for the sampled id {id}")
    return Generated(token_ids=ids, logps=logps, top_logps=top, finish_reason=str(finish_reason))


def _prompt_logps(answer: Any, holder: Any) -> PromptLogps:
    rows = holder.get("prompt_logprobs") if isinstance(holder, Mapping) else None
    if not isinstance(rows, list):
        raise _not_understood(answer)
    return rows


def _not_understood(answer: Any) -> BadAnswerError:
    text = truncate(to_one_line(str(answer)), 300)
    return BadAnswerError(f"something that is no answer of vLLM's: {text or 'nothing'}")
