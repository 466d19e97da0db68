"""Whether a model's attention is supported: by its config, and by a small example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from courtside.errors import ModelError

WINDOWED = frozenset(
    ["cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "ministral", "mistral", "olmo3",
     "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"]
)  # fmt: skip
"""Model types whose sliding windows were compared with separate passes, beyond the window."""

NARROWING = ("attention_window", "attention_window_size", "index_topk", "keep_window_size",
             "local_attention", "sliding_windows", "window_size")  # fmt: skip
"""Settings by which attention leaves out keys in some way of the model's own."""


def attn_implementation(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)


def windows_of(model: Any) -> dict[str, int | None]:
    """Kinds of layers, each with the window it looks through."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
    elif getattr(config, "attention_chunk_size", None) is not None:
        kinds = ["chunked_attention"]
    else:
        kinds = ["full_attention" if window is None else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def find_unsupported_attention(model: Any) -> str | None:
    """Why branches of this model cannot share a trunk, as far as its settings say; None: they can.

    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> special_attention(BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=2)))
    'positions cannot be given to it'
    """
    config = model.config.get_text_config()
    if attn_implementation(model) not in ("sdpa", "eager"):
        return f"attn_implementation = {attn_implementation(model)!r} takes no mask of its own"
    if "position_ids" not in signature(model.base_model.forward).parameters:
        return "positions cannot be given to it"
    kinds = windows_of(model)
    strange = sorted(kinds.keys() - {"full_attention", "sliding_attention"})
    if strange:
        return f"it has layers of the kind {strange[0]!r}"
    if "sliding_attention" in kinds and model.config.model_type not in WINDOWED:
        return f"sliding windows of the model type {model.config.model_type!r} are untested here"
    narrowing = [name for name in NARROWING if getattr(config, name, None)]
    if narrowing:
        return f"its {narrowing[0]} leaves out keys in a way of its own"
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "is_heterogeneous", False):
        return "its layers share keys and values or differ from each other"
    moving = sorted(_rope_kinds(config) & {"dynamic", "longrope"})
    if moving:
        return f"its positions depend on the length of the sequence (rope_type = {moving[0]!r})"
    return None


def _rope_kinds(config: Any) -> set[str]:
    found = set()
    todo = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while todo:
        settings = todo.pop()
        if isinstance(settings, Mapping):
            found.add(str(settings.get("rope_type", settings.get("type"))))
            todo.extend(settings.values())
    return found


def refuse_special_attention(model: Any) -> None:
    why = find_unsupported_attention(model)
    if why is not None:
        raise ModelError(
            f"{type(model).__name__} cannot read branches off one trunk: {why}. Score them in "
            "passes of their own: score_branches_separately gives the same numbers"
        )


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Without dropout, and without gradient checkpointing, which discards the KV cache."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def run_probe(model: Any, error: Callable[[], float]) -> str | None:
    """What is wrong with an example whose hidden states are off by `error`; None: nothing."""
    try:
        found = error()
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        return f"a small example fails ({type(e).__name__}: {e})"
    narrow = torch.is_autocast_enabled(model.device.type) or model.dtype.itemsize < 4
    if not found < (0.05 if narrow else 0.01):
        return "on a small example its hidden states are not those of separate passes"
    return None


def distance_from_plain_forward(model: Any, ids: list[int], found_ND: Tensor) -> float:
    """How far the last N hidden states are from those of a pass over these ids alone."""
    out = model.base_model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    alone_ND = out.last_hidden_state[0, -len(found_ND) :].float()
    error_N = (found_ND.float() - alone_ND).norm(dim=-1) / alone_ND.norm(dim=-1)
    # The median: rounding may send a single token to another expert.
    return float(error_N.median())
