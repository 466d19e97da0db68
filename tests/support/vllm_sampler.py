"""An HTTP server that speaks vLLM's protocol and samples with the weights that it was given: LoRA
adapters, or all weights from a folder. A sample follows from weights, prompt and seed alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from support.vllm_model import VllmModel
from support.vllm_stand_in import GENERATE, Response, generated

from courtside.engines.loading import load_adapter, load_model, merge_adapter

LOADING = threading.Lock()
"""transformers loads one model at a time: two threads at once leave a tied head out."""


class VllmSampler(VllmModel):
    def __init__(self, folder: Path):
        """`folder`: of the model that it starts with."""
        self._start, self._lock_model = folder, threading.Lock()
        self._models: dict[str, Any] = {}
        """By the folder of an adapter or of all weights; empty: those of the start."""
        super().__init__(None)

    def answer(self, path: str, body: Any) -> Response:
        name = (body or {}).get("model", "tiny")
        if path != GENERATE or (name != "tiny" and name not in self.adapters):
            return super().answer(path, body)
        with self._lock_model:
            self.model = self._load(self.adapters.get(name, self.folder), name)
            if "logprobs" not in body["sampling_params"]:
                return super().answer(path, body)
            return self._sample(body["token_ids"], body["sampling_params"])

    @torch.no_grad()
    def _sample(self, prompt: list[int], fields: Any) -> Response:
        random = torch.Generator().manual_seed(fields["seed"])
        ids, logps = [*prompt], []
        for _ in range(fields["max_tokens"]):
            logits_V = self.model(torch.tensor([ids])).logits[0, -1].float()
            logp_V = (logits_V / fields["temperature"]).log_softmax(-1)
            ids.append(int(logp_V.exp().multinomial(1, generator=random)))
            logps.append(float(logp_V[ids[-1]]))
            if ids[-1] in fields["stop_token_ids"]:
                return generated(ids[len(prompt) :], logps, "stop", self.label)
        return generated(ids[len(prompt) :], logps, "length", self.label)

    def _load(self, folder: str, name: str) -> Any:
        if folder not in self._models:
            is_adapter = name in self.adapters
            source = str(self._start) if is_adapter or not folder else folder
            with LOADING:
                model = load_model(source, dtype=torch.float32, device=torch.device("cpu"))
                if is_adapter:
                    model = merge_adapter(load_adapter(model, Path(folder), source))
            self._models[folder] = model
        return self._models[folder]
