"""Shapes of common open models, for plans without their files. Facts of their public configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from courtside.errors import ModelError
from courtside.planning.shapes import ModelShape

_QWEN3 = {"head_dim": 128, "num_kv_heads": 8, "vocab_size": 151936, "head_norms": True}
_LLAMA3 = {"num_kv_heads": 8, "vocab_size": 128256}
_SMOLLM2 = {"head_dim": 64, "vocab_size": 49152, "tied": True}
_GEMMA3 = {"head_dim": 256, "vocab_size": 262208, "tied": True, "num_norms": 4, "head_norms": True}

_GEMMA3_1B = {**_GEMMA3, "vocab_size": 262144}


def _preset(
    name: str, layers: int, width: int, heads: int, inner: int, /, **more: Any
) -> tuple[str, ModelShape]:
    shape = ModelShape(
        name=name, num_layers=layers, hidden_size=width, num_heads=heads, intermediate_size=inner,
        **more,
    )  # fmt: skip
    return name, shape


PRESETS: Mapping[str, ModelShape] = dict(
    [
        _preset("smollm2-135m", 30, 576, 9, 1536, num_kv_heads=3, **_SMOLLM2),
        _preset("smollm2-360m", 32, 960, 15, 2560, num_kv_heads=5, **_SMOLLM2),
        _preset("smollm2-1.7b", 24, 2048, 32, 8192, num_kv_heads=32, **_SMOLLM2),
        _preset("qwen3-0.6b", 28, 1024, 16, 3072, tied=True, **_QWEN3),
        _preset("qwen3-1.7b", 28, 2048, 16, 6144, tied=True, **_QWEN3),
        _preset("qwen3-4b", 36, 2560, 32, 9728, tied=True, **_QWEN3),
        _preset("qwen3-8b", 36, 4096, 32, 12288, tied=False, **_QWEN3),
        _preset("qwen3-14b", 40, 5120, 40, 17408, tied=False, **_QWEN3),
        _preset("qwen3-32b", 64, 5120, 64, 25600, tied=False, **_QWEN3),
        _preset("llama-3.2-1b", 16, 2048, 32, 8192, head_dim=64, tied=True, **_LLAMA3),
        _preset("llama-3.2-3b", 28, 3072, 24, 8192, head_dim=128, tied=True, **_LLAMA3),
        _preset("llama-3.1-8b", 32, 4096, 32, 14336, head_dim=128, tied=False, **_LLAMA3),
        _preset("llama-3.1-70b", 80, 8192, 64, 28672, head_dim=128, tied=False, **_LLAMA3),
        _preset("gemma-3-1b", 26, 1152, 4, 6912, num_kv_heads=1, **_GEMMA3_1B),
        _preset("gemma-3-4b", 34, 2560, 8, 10240, num_kv_heads=4, **_GEMMA3),
        _preset("gemma-3-12b", 48, 3840, 16, 15360, num_kv_heads=8, **_GEMMA3),
        _preset("gemma-3-27b", 62, 5376, 32, 21504, num_kv_heads=16, **_GEMMA3 | {"head_dim": 128}),
    ]
)  # fmt: skip


def find_preset(name: str, option: str) -> ModelShape:
    """`option`: the name of the option or argument that gave it."""
    key = name.lower().rsplit("/", 1)[-1]
    if key not in PRESETS:
        raise ModelError(f"{option} {name!r} is not known. Known: {', '.join(PRESETS)}")
    return PRESETS[key]


def match_preset(model: str) -> ModelShape | None:
    """The preset that a hub id means: `Qwen/Qwen3-8B-Base`, `meta-llama/Llama-3.1-8B-Instruct`."""
    key = model.lower().rsplit("/", 1)[-1]
    for suffix in ("", "-base", "-instruct", "-it", "-pt"):
        stem = key.removesuffix(suffix) if suffix else key
        if stem in PRESETS:
            return PRESETS[stem]
    return None
