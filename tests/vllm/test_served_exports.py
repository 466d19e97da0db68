"""vLLM on a CPU serves what `courtside export` wrote, by the command that it printed.

Log-probs of prompts are those of the student in the training loop, up to float32 rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.vllm_server import PYTHON, run_vllm

from courtside.api import serving_command
from courtside.chat.template import ChatTemplate
from courtside.engines.loading import load_tokenizer
from courtside.types import Message

ROUNDING = 1e-3
"""Nats a token, as docs/export.md states it; seen are up to 5e-5."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make test` sets it up"),
]


def distance(ours: Any, served: Any) -> float:
    pairs = [pair for a, b in zip(ours, served, strict=True) for pair in zip(a, b, strict=True)]
    return max(abs(a - b) for a, b in pairs)


def test_merged_weights(exports, merged_server):
    check_whole_weights("merged", exports, merged_server)


def test_full_weights(exports, tmp_path):
    exported = exports.by_name["full"]
    command = serving_command(exported.run, exported.folder)
    with run_vllm(command, tmp_path / "log") as server:
        check_whole_weights("full", exports, server)


def check_whole_weights(name, exports, server):
    served = server.prompt_logps(name, exports.prompts)
    messages = [{"role": "user", "content": "Grüezi! What is 3 + 4?"}]
    rendered = server.post("/tokenize", {"model": name, "messages": messages})["tokens"]
    assert distance(exports.by_name[name].logps, served) < ROUNDING
    assert distance(exports.base_logps, served) > 0.05, "the step is not in the export"
    tokenizer = load_tokenizer("smollm2-135m")
    template = ChatTemplate(tokenizer, name="smollm2-135m", eos_ids=[tokenizer.eos_token_id])
    question = (Message(role="user", content="Grüezi! What is 3 + 4?"),)
    assert tuple(rendered) == template.prompt_ids(question)


def test_an_adapter_at_the_start_and_at_run_time(exports, adapter_server):
    exported = exports.by_name["adapter"]
    base = serving_command(exported.run, exported.folder).split()[2]
    at_start = adapter_server.prompt_logps("adapter", exports.prompts)
    adapter_server.post("/v1/load_lora_adapter",
                        {"lora_name": "later", "lora_path": str(exported.folder)})  # fmt: skip
    later = adapter_server.prompt_logps("later", exports.prompts)
    adapter_server.post("/v1/unload_lora_adapter", {"lora_name": "later"})
    base = adapter_server.prompt_logps(base, exports.prompts)
    assert distance(exported.logps, at_start) < ROUNDING
    assert distance(exported.logps, later) < ROUNDING
    assert distance(exports.base_logps, base) < ROUNDING
    assert distance(base, at_start) > 0.05, "the adapter does nothing"


def test_an_adapter_that_was_trained_on_4_bits(exports, adapter_server, tmp_path):
    """On the exported base it is the student of the run; on the files' base it is another model."""
    exported = exports.by_name["quantized"]
    command = serving_command(exported.run, exported.folder, base=exports.quantized_base)
    with run_vllm(command, tmp_path / "log") as server:
        served = server.prompt_logps("quantized", exports.prompts)
        base = server.prompt_logps(str(exports.quantized_base), exports.prompts)
    assert distance(exported.logps, served) < ROUNDING
    assert distance(base, served) > 0.05, "the adapter does nothing"
    adapter_server.post("/v1/load_lora_adapter",
                        {"lora_name": "quantized", "lora_path": str(exported.folder)})  # fmt: skip
    on_files = adapter_server.prompt_logps("quantized", exports.prompts)
    adapter_server.post("/v1/unload_lora_adapter", {"lora_name": "quantized"})
    assert distance(exported.logps, on_files) > 0.05, "4 bits cost nothing"
