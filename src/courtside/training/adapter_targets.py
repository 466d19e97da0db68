"""Linear layers on which a LoRA adapter would act in some passes only, or in none."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from courtside.errors import ModelError


def find_bare_layers(model: Any) -> list[str]:
    """Names of linear layers whose weight another layer reads and multiplies itself, and of those
    that are linear by their class alone.

    Mixers of Mamba do the first for their time steps, and hand the weights of their last layers to
    fused kernels, in training alone; Gemma 3n clips coefficients so. An adapter would train there
    without effect, or the sampler would have an effect that training does not see. Routers of
    experts are of the second kind: what they return is no product.
    """
    names = []
    for parent_name, parent in model.named_modules():
        children = {n: c for n, c in parent.named_children() if isinstance(c, nn.Linear)}
        names += [f"{parent_name}.{name}" for name, m in children.items() if _computes_more(m)]
        if children:
            source = _read_source(parent)
            # Not self.lm_head.weight.dtype or .device, which multiply nothing.
            read = set(re.findall(r"\bself\.(\w+)\.weight\b(?!\.d)", source))
            names += [f"{parent_name}.{name}" for name in children if name in read]
    return names


def _computes_more(module: nn.Linear) -> bool:
    """Of a model's own class; quantized layers have a forward pass of their own, too."""
    has_rule = type(module).forward is not nn.Linear.forward
    return has_rule and type(module).__module__.startswith("transformers.models.")


def _read_source(parent: nn.Module) -> str:
    """A whole model's class also ties and initializes weights."""
    is_layer = type(parent).__module__.startswith("transformers.models.") and not hasattr(
        parent, "config_class"
    )
    cls = type(parent)
    return inspect.getsource(cls if is_layer else inspect.unwrap(cls.forward))


def check_targets(model: Any, bare_layers: list[str], target_modules: object) -> None:
    """Refuse adapters that a user's list has put on such layers; `model`: with its adapters."""
    for name in bare_layers:
        if hasattr(model.get_submodule(name), "lora_A"):
            raise ModelError(
                f"student.lora.target_modules = {target_modules!r}: {name} cannot have an adapter, "
                "because its layer multiplies the bare weight. Use 'all-linear', which leaves such "
                "layers out, or other names"
            )
