"""An HTTP server that speaks vLLM's protocol and samples with adapters of a tiny model, in this
process. A sample follows from the weights, the prompt and the seed, whoever else is asked."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import torch
from peft import PeftModel
from support.vllm_model import VllmModel
from support.vllm_stand_in import GENERATE, Response, generated, respond


class VllmStudent(VllmModel):
    def __init__(self, model: Any) -> None:
        self._one_at_a_time = threading.RLock()
        self._base, self._peft = model, None
        super().__init__(model)

    @torch.no_grad()
    def answer(self, path: str, body: Any) -> Response:
        if path == "/v1/load_lora_adapter":
            with self._one_at_a_time:
                response = super().answer(path, body)
                if response and response[0] == 200:
                    self._load(body["lora_name"], body["lora_path"])
                return response
        if path != GENERATE:
            return super().answer(path, body)
        name = body["model"]
        if name != "tiny" and name not in self.adapters:
            return respond({"error": {"message": f"The model `{name}` does not exist."}}, 404)
        with self._one_at_a_time, ExitStack() as stack:
            if self._peft is not None and name == "tiny":
                stack.enter_context(self._peft.disable_adapter())
            elif self._peft is not None:
                self._peft.set_adapter(name)
            if "logprobs" in body["sampling_params"]:
                return self._sample(body["token_ids"], body["sampling_params"])
            return super().answer(path, body)

    def _load(self, name: str, folder: str) -> None:
        if self._peft is None:
            self._peft = PeftModel.from_pretrained(self._base, folder, adapter_name=name)
            self.model = self._peft
        else:
            self._peft.load_adapter(folder, adapter_name=name)
        self._peft.eval()

    def _sample(self, prompt_ids: list[int], fields: Any) -> Response:
        generator = torch.Generator().manual_seed(fields["seed"])
        ids: list[int] = []
        logps: list[float] = []
        while len(ids) < fields["max_tokens"]:
            logits_V = self.model(torch.tensor([[*prompt_ids, *ids]])).logits[0, -1].float()
            logp_V = (logits_V / fields["temperature"]).log_softmax(-1)
            ids.append(int(torch.multinomial(logp_V.exp(), 1, generator=generator)))
            logps.append(logp_V[ids[-1]].item())
            if ids[-1] in fields["stop_token_ids"]:
                return generated(ids, logps, "stop")
        return generated(ids, logps)
