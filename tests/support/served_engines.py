"""Engines over servers of `vllm_stand_in`, whose weights follow a trainer that is one number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.tiny_model import tiny_tokenizer

from courtside.engines.base import Capabilities, SampleRequest, Sampling, ScoreRequest
from courtside.engines.served.adapters import AdapterTransport
from courtside.engines.served.engine import ServedEngine
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.probe import probe_servers
from courtside.engines.served.shared_folder import SharedFolder
from courtside.engines.served.student import ServedStudent
from courtside.engines.served.weight_sync import WeightSync
from courtside.recipe.server import ServerConfig

PROMPT = (3, 4)
SAMPLING = Sampling(max_new_tokens=3)
SCORED = ScoreRequest(token_ids=(3, 4, 5), scored=(False, True, True))


def make_engine(*urls: str, first_wait: float = 0.01, **settings: Any) -> ServedEngine:
    config = ServerConfig(urls=urls, model="tiny", **settings)
    pool = ReplicaPool(config, field="teacher.server", first_wait=first_wait)
    return ServedEngine(
        pool, probe_servers(pool, probe_ids=PROMPT), name="tiny", tokenizer=tiny_tokenizer(),
        eos_ids=frozenset({1}), vocab_size=258, context_length=512,
    )  # fmt: skip


def requests(n: int) -> list[SampleRequest]:
    return [SampleRequest(prompt_ids=(3, 4, i), seed=i) for i in range(n)]


class LocalStandIn:
    context_length = 512
    capabilities = Capabilities(
        top_k=258, hidden_states=True, branches=True, weight_updates=True, mixed_sampling=True
    )


def make_sync(
    engine: ServedEngine, folder: Path, trainer: Callable[[], float], *, max_staleness: int = 0
) -> WeightSync:
    def save(work: Path) -> None:
        (work / "adapter_model.safetensors").write_text(json.dumps(trainer()))

    shared = SharedFolder(folder, field=engine.pool.field)
    return WeightSync(
        engine.pool, engine.facts.route, AdapterTransport(engine.pool, shared, save),
        max_difference=0.05, score=lambda: (trainer(),) * 2, probes=[SCORED],
        max_staleness=max_staleness,
    )  # fmt: skip


def make_student(engine: ServedEngine, sync: WeightSync) -> ServedStudent:
    return ServedStudent(
        engine.pool, engine.facts, local=LocalStandIn(), name="tiny", tokenizer=engine.tokenizer,
        sync=sync, eos_ids=engine.eos_ids, vocab_size=258, context_length=512,
    )  # fmt: skip


class AdapterEngine(ServedEngine):
    adapter = ""

    @property
    def model(self) -> str:
        return self.adapter


def sample_with(engine: ServedEngine, adapter: str, n: int = 1) -> list[Any]:
    other = AdapterEngine(
        engine.pool, engine.facts, name="tiny", tokenizer=engine.tokenizer, eos_ids=engine.eos_ids,
        vocab_size=engine.vocab_size, context_length=engine.context_length,
    )  # fmt: skip
    other.adapter = adapter
    return other.sample(requests(n), SAMPLING)
