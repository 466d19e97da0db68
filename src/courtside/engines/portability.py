"""Rewrites what transformers 5 saved so that transformers 4.57 and vLLM load the same model.

transformers 4 ignores `rope_parameters` without a word and computes with its default RoPE base,
knows no `TokenizersBackend`, and takes `extra_special_tokens` as a mapping only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MACHINE_SETTINGS = ("backend", "is_local", "local_files_only")
"""What transformers 5 writes about the way in which the tokenizer was loaded."""


def make_portable(folder: Path, base_config: Mapping[str, Any]) -> None:
    """Rewrite the folder's config.json and tokenizer_config.json, where it has them.

    `base_config` is the config.json of the base model, which still has the fields that
    transformers 5 renamed or dropped.
    """
    _rewrite(folder / "config.json", lambda config: add_legacy_fields(config, base_config))
    _rewrite(folder / "tokenizer_config.json", rename_tokenizer_class)


def add_legacy_fields(config: dict[str, Any], base_config: Mapping[str, Any]) -> dict[str, Any]:
    """>>> add_legacy_fields({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, {})
    {'rope_parameters': {'rope_theta': 5.0, 'rope_type': 'default'}, 'rope_theta': 5.0}
    """
    dropped = {"_name_or_path", "quantization_config", "torch_dtype", "transformers_version"}
    legacy = {key: value for key, value in base_config.items() if key not in dropped}
    rope = config.get("rope_parameters")
    # One RoPE for all layers; several have names of their own in each architecture.
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        settings = ("rope_theta", "partial_rotary_factor")
        legacy |= {key: rope[key] for key in settings if key in rope}
        if rope.get("rope_type", "default") != "default":
            legacy["rope_scaling"] = {k: v for k, v in rope.items() if k not in settings}
    return legacy | config


def rename_tokenizer_class(config: dict[str, Any]) -> dict[str, Any]:
    """>>> rename_tokenizer_class({"tokenizer_class": "TokenizersBackend", "is_local": True})
    {'tokenizer_class': 'PreTrainedTokenizerFast'}
    """
    config = {key: value for key, value in config.items() if key not in MACHINE_SETTINGS}
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config


def _rewrite(file: Path, change: Any) -> None:
    if file.is_file():
        config = change(json.loads(file.read_text("utf-8")))
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
