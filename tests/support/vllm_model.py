"""An HTTP server that speaks vLLM's protocol for a tiny model of this process, scoring of given ids
included, which a vLLM on a CPU does not have."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from support.tiny_model import tiny_tokenizer
from support.vllm_stand_in import GENERATE, Response, VllmStandIn, respond


class VllmModel(VllmStandIn):
    def __init__(self, model: Any, *, max_logprobs: int = 20):
        self.model, self.max_logprobs = model, max_logprobs
        super().__init__(tokenizer=tiny_tokenizer())

    @torch.no_grad()
    def answer(self, path: str, body: Any) -> Response:
        if path == "/tokenize":
            return respond({"tokens": self._tokenize(body)})
        if path != GENERATE or "logprobs" in body["sampling_params"]:
            return super().answer(path, body)
        fields, ids = body["sampling_params"], body["token_ids"]
        logp_TV = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)[:-1]
        choice = {"token_ids": [0], "finish_reason": "length"}
        answer: dict[str, Any] = {"choices": [choice], "prompt_logprobs": None}
        answer["prompt_token_id_logprobs"] = None
        if (k := fields.get("prompt_logprobs")) is not None:
            if k > self.max_logprobs:
                text = f"greater than max allowed: {self.max_logprobs}"
                return respond({"error": {"message": text}}, 400)
            rows = [_row(logp_V, id, k) for logp_V, id in zip(logp_TV, ids[1:], strict=True)]
            answer["prompt_logprobs"] = [None, *rows]
        if (id_rows := fields.get("prompt_logprob_token_ids")) is not None:
            start = fields["prompt_logprob_start"]
            assert len(id_rows) == len(ids) - 1 - start, "vLLM refuses other numbers of rows"
            ids_TK = torch.tensor(id_rows)
            assert ids_TK.shape[1] <= self.max_logprobs
            scores_TK = logp_TV[start:].gather(-1, ids_TK.clamp(min=0))
            scores_TK[ids_TK < 0] = -torch.inf
            answer["prompt_token_id_logprobs"] = encode(scores_TK.numpy())
        return respond(answer)

    def _tokenize(self, body: Any) -> list[int]:
        if "messages" in body:
            return self.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_dict=False
            )
        return self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]


def _row(logp_V: torch.Tensor, id: int, k: int) -> dict[str, Any]:
    """As vLLM's: the token itself at any rank, and the k likeliest."""
    top = logp_V.topk(k)
    row = {str(id): {"logprob": logp_V[id].item(), "rank": 1 + int((logp_V > logp_V[id]).sum())}}
    for rank, (logp, other) in enumerate(zip(top.values, top.indices, strict=True), start=1):
        row[str(int(other))] = {"logprob": logp.item(), "rank": rank}
    return row


def encode(array: Any) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()
