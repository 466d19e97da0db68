"""Names of base models outside this machine, and the command that serves an export with vLLM."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from courtside.engines.builtin_model import BUILTIN_MODEL, HUB_ID
from courtside.engines.loading import resolve_model

HUB_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""


def public_name(model: str) -> str | None:
    """The hub id of a recipe's model; None: a folder that only this machine has.

    >>> public_name("smollm2-135m")
    'HuggingFaceTB/SmolLM2-135M-Instruct'
    """
    if model == BUILTIN_MODEL:
        return HUB_ID
    cached = HUB_CACHE.search(model)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return None if Path(model).expanduser().is_dir() else model


def exact_base(model: str) -> str:
    """Where the base of an adapter is: the embedded model is a quantized copy of the hub's, and
    the adapter belongs to exactly those weights."""
    return resolve_model(model) if model == BUILTIN_MODEL else public_name(model) or model


def vllm_command(
    folder: Path, base: str, path: str, *, context_length: int | None = None
) -> str | None:
    """Serves the export in `folder`, whoever has it at `path`; `base` is that of an adapter, and
    `context_length` the recipe's, which decides the factors of some kinds of RoPE.

    None: vLLM computes no log-probs with an adapter on the LM head.
    """
    name = Path(path).name
    limit = [] if context_length is None else ["--max-model-len", str(context_length)]
    file = folder / "adapter_config.json"
    if not file.is_file():
        return shlex.join(["vllm", "serve", path, "--served-model-name", name, *limit])
    adapter = json.loads(file.read_text("utf-8"))
    if "lm_head" in (adapter["target_modules"] or ()):
        return None
    rank = next((size for size in LORA_RANKS if size >= adapter["r"]), adapter["r"])
    return shlex.join(
        ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(rank),
         "--lora-modules", f"{name}={path}", *limit]
    )  # fmt: skip
