"""Log-probs of ids that the request names, for each position: `prompt_logprob_token_ids`.

vLLM 0.32 has it on the generate route, in its V2 model runner, which needs a GPU. Row i of the
request and of the answer is about prompt token `start` + i + 1, and −1 pads.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from courtside.engines.base import ScoreRequest
from courtside.engines.served.requests import BadAnswerError, UnavailableError

PADDING = -1


def add_given_ids(
    body: Mapping[str, Any], request: ScoreRequest, *, realized: bool
) -> dict[str, Any]:
    """`body`: of the generate route. `realized`: the sequence's own token comes first in each row;
    else `prompt_logprobs` has it."""
    rows, start = _make_rows(request, realized=realized)
    fields = {
        **body["sampling_params"],
        "prompt_logprob_token_ids": rows,
        "prompt_logprob_start": start,
    }
    if realized:
        fields.pop("prompt_logprobs", None)
    return {**body, "sampling_params": fields}


def read_given_logps(answer: Any, request: ScoreRequest, *, num_ids: int) -> Tensor:
    """[T, num_ids] of the scored tokens."""
    text = answer.get("prompt_token_id_logprobs") if isinstance(answer, Mapping) else None
    if text is None:
        raise UnavailableError("no log-probs of the given ids: vLLM drops them after a preemption")
    try:
        array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, TypeError, binascii.Error):
        raise BadAnswerError(f"{str(text)[:100]!r} where an array in base64 belongs") from None
    start = request.scored.index(True) - 1
    shape = (len(request.token_ids) - 1 - start, num_ids)
    if array.shape != shape or array.dtype.kind != "f":
        raise BadAnswerError(
            f"{array.dtype} log-probs of shape {array.shape} where {shape} were asked for"
        )
    logp_PK = torch.from_numpy(array.astype(np.float32))
    logp_TK = logp_PK[torch.tensor(request.scored[start + 1 :])]
    if not bool(((logp_TK <= 1e-3) & logp_TK.isfinite()).all()):
        raise BadAnswerError("log-probs of given ids that are none: NaN, infinite or positive")
    return logp_TK


def _make_rows(request: ScoreRequest, *, realized: bool) -> tuple[list[list[int]], int]:
    assert request.given_ids is not None
    start = request.scored.index(True) - 1
    ids_of_tokens = iter(request.given_ids)
    padding = [PADDING] * (len(request.given_ids[0]) + realized)
    rows = [
        [*([token] if realized else []), *next(ids_of_tokens)] if scored else padding
        for token, scored in zip(
            request.token_ids[start + 1 :], request.scored[start + 1 :], strict=True
        )
    ]
    return rows, start
