"""Linear layers on which a LoRA adapter would act in some passes only, or in none."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from courtside.errors import ModelError


def find_bare_layers(model: Any) -> list[str]:
    """Names of linear layers whose weight another layer's forward pass reads and multiplies itself.

    Mixers of Mamba do that for their time steps, and hand the weights of their last layers to fused
    kernels, in training alone. An adapter would train there without effect, or the sampler would
    have an effect that training does not see.
    """
    names = []
    for parent_name, parent in model.named_modules():
        children = {n: c for n, c in parent.named_children() if isinstance(c, nn.Linear)}
        if children:
            source = inspect.getsource(inspect.unwrap(type(parent).forward))
            # Not self.lm_head.weight.dtype or .device, which multiply nothing.
            read = set(re.findall(r"\bself\.(\w+)\.weight\b(?!\.d)", source))
            names += [f"{parent_name}.{name}" for name in children if name in read]
    return names


def check_targets(model: Any, bare_layers: list[str], target_modules: object) -> None:
    """Refuse adapters that a user's list has put on such layers; `model`: with its adapters."""
    for name in bare_layers:
        if hasattr(model.get_submodule(name), "lora_A"):
            raise ModelError(
                f"student.lora.target_modules = {target_modules!r}: {name} cannot have an adapter, "
                "because its layer multiplies the bare weight. Use 'all-linear', which leaves such "
                "layers out, or other names"
            )
