"""transformers 4.57 loads what `courtside export` wrote and computes the same log-probs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from courtside.engines.loading import load_tokenizer, resolve_model

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(
    os.environ.get("COURTSIDE_TRANSFORMERS4_PYTHON", ROOT / ".venv-transformers4/bin/python")
)
ROUNDING = 1e-3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no .venv-transformers4: `make test` sets it up"
    ),
]


@pytest.mark.parametrize("name", ["merged", "adapter", "full"])
def test_the_same_log_probs(name, exports):
    exported = exports.by_name[name]
    base = [resolve_model("smollm2-135m")] if name == "adapter" else []
    texts = ["Grüße  aus Zürich", "<|im_end|> 3 + 4"]
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("transformers4_logps.py"), exported.folder, *base],
        input=json.dumps({"prompts": exports.prompts, "texts": texts}),
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout)
    assert answer["version"].startswith("4.57.")
    for ours, logps in zip(exported.logps, answer["logps"], strict=True):
        assert logps == pytest.approx(ours, abs=ROUNDING)
    tokenizer = load_tokenizer("smollm2-135m")
    assert answer["ids"] == [tokenizer(text)["input_ids"] for text in texts]
    question = [{"role": "user", "content": "Hi"}]
    assert answer["chat"] == tokenizer.apply_chat_template(
        question, add_generation_prompt=True, tokenize=False
    )
