"""A LoRA run, one on a base in 4 bits and a full run of the embedded model, exported, and our own
log-probs of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.vllm_server import Server, run_vllm

from courtside.api import export, serving_command, train
from courtside.assemble import assemble
from courtside.engines.base import ScoreRequest
from courtside.engines.loading import load_model, load_tokenizer
from courtside.engines.local import LocalEngine
from courtside.recipe.load import parse_recipe
from courtside.run_state import restore
from courtside.training import checkpoints

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n",
    "Grüße aus Zürich: 3 + 4 = 7, 30 + 40 = 70, 300 + 400 = 700.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    run: Path
    folder: Path
    logps: tuple[tuple[float, ...], ...]
    """Of the tokens of each text but the first, by the student as the loop uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exports:
    by_name: Mapping[str, Export]
    """merged, adapter, full, quantized (an adapter, trained on 4 bits)"""
    quantized_base: Path
    prompts: tuple[tuple[int, ...], ...]
    base_logps: tuple[tuple[float, ...], ...]
    """Before training."""


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    folder = tmp_path_factory.mktemp("exports")
    tokenizer = load_tokenizer("smollm2-135m")
    prompts = tuple(tuple(tokenizer(text)["input_ids"]) for text in TEXTS)
    lora, full, quantized = (folder / f"{name}-run" for name in ("lora", "full", "quantized"))
    lora_logps = _train(lora, {"rank": 8}, prompts)
    quantized_logps = _train(quantized, {"rank": 8, "base_dtype": "nf4"}, prompts)
    full_logps = _train(full, None, prompts)
    model = load_model("smollm2-135m", dtype=torch.float32, device=torch.device("cpu"))
    return Exports(
        by_name={
            "merged": Export(run=lora, folder=export(lora, folder / "merged"), logps=lora_logps),
            "adapter": Export(
                run=lora, folder=export(lora, folder / "adapter", adapter=True), logps=lora_logps
            ),
            "full": Export(run=full, folder=export(full, folder / "full"), logps=full_logps),
            "quantized": Export(
                run=quantized,
                folder=export(quantized, folder / "quantized", adapter=True),
                logps=quantized_logps,
            ),
        },
        quantized_base=export(quantized, folder / "quantized-base", base=True),
        prompts=prompts,
        base_logps=score(LocalEngine(model, tokenizer, name="smollm2-135m"), prompts),
    )


SERVING = (
    "--enable-scale-out", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
)  # fmt: skip
"""What `courtside serve` adds."""


@pytest.fixture(scope="session")
def merged_server(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(exports, "merged", tmp_path_factory.mktemp("merged") / "log")


@pytest.fixture(scope="session")
def adapter_server(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("adapter") / "log"
    yield from _serve(exports, "adapter", log, "--max-loras", "3")


@pytest.fixture(scope="session")
def untied(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The full run's export with an LM head of its own. On a CPU vLLM 0.32 packs the head when it
    starts, and a reload of a tied one, whose weight is the embedding's, leaves that as it was."""
    folder = tmp_path_factory.mktemp("untied") / "untied"
    shutil.copytree(exports.by_name["full"].folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


@pytest.fixture(scope="session")
def full_server(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Takes all weights, by routes that an environment variable switches on."""
    command = f"vllm serve {untied} --served-model-name full"
    with run_vllm(command, tmp_path_factory.mktemp("full") / "log", *SERVING) as server:
        yield server


def _serve(exports: Exports, name: str, log: Path, *options: str) -> Iterator[Server]:
    """By the command that `courtside export` printed."""
    exported = exports.by_name[name]
    command = serving_command(exported.run, exported.folder)
    assert command is not None
    with run_vllm(command, log, *SERVING, *options) as server:
        yield server


def _train(run: Path, lora: Any, prompts: Any) -> tuple[tuple[float, ...], ...]:
    """One step on given answers, large enough to see."""
    recipe = parse_recipe(
        {
            "student": {"model": "smollm2-135m"} | ({"lora": lora} if lora else {}),
            "tasks": {"kind": "arithmetic"},
            "rollout": {"student_fraction": 0.0, "max_new_tokens": 4},
            "losses": [{"kind": "cross_entropy"}],
            "train": {"steps": 1, "prompts_per_step": 2, "learning_rate": 1e-2 if lora else 1e-4},
            "evaluate": {"num_tasks": 1},
        }
    )
    train(recipe, run)
    parts = assemble(recipe)
    restore(parts, checkpoints.load(checkpoints.latest(run / "checkpoints")))
    return score(parts.engine, prompts)


def score(engine: Any, prompts: Any) -> tuple[tuple[float, ...], ...]:
    requests = [
        ScoreRequest(token_ids=ids, scored=(False,) + (True,) * (len(ids) - 1), temperature=1.0)
        for ids in prompts
    ]
    return tuple(tuple(scored.logp_T.tolist()) for scored in engine.score(requests))
