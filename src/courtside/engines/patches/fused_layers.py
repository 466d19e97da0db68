"""RMSNorm, RoPE and SwiGLU layers of a model by fused kernels, as patches of their `forward`.

Each replacement computes what the layer computes (`layer_ops` compares them on an example). Whether
a norm may output a lower precision, or two matmuls may be fused into one, depends on the model's
code, not on the names of its layers: a trace of one small forward pass observes every torch call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from courtside.engines.lm_head import LMHead
from courtside.engines.patches import layer_ops
from courtside.engines.patches.layer_ops import (
    ROTARY,
    find_rotary_modules,
    match_rms_norm,
    match_swiglu_mlp,
    wrap_rotary,
)
from courtside.engines.patches.patch import Patch


class FusedLayers:
    """`dtype`: that of the matmuls under autocast; None: that of the weights."""

    @torch.no_grad()
    def __init__(self, model: Any, head: LMHead, dtype: torch.dtype | None):
        self.dtype = dtype
        head_modules = set(head.module.modules())
        self.linear = [m for m in model.modules() if type(m) is nn.Linear and m not in head_modules]
        norms = [n for m in model.modules() if (n := match_rms_norm(m, dtype)) is not None]
        self.norms = {norm.module: norm for norm in norms}
        self.trace = Trace(model, self.norms, self.linear)
        self.autocast_norms = self.trace.linear_only_norms if dtype is not None else set()
        """Norms that may output `dtype`: every consumer would cast the output to it."""
        self.mlps = {m: f for m in model.modules() if (f := match_swiglu_mlp(m)) is not None}
        self.rotary = find_rotary_modules(model)

    def patches(self) -> Iterator[Patch]:
        """They nest: student and engine may each patch the same layers, to the same effect."""
        for module, norm in self.norms.items():
            dtype = self.dtype if module in self.autocast_norms else None
            yield Patch(module, "forward", partial(norm.forward, dtype=dtype), nests=True)
        for mlp, forward in self.mlps.items():
            yield Patch(mlp, "forward", forward, nests=True)
        for module in self.rotary:  # Python modules, which models of one kind share
            yield Patch(module, ROTARY, wrap_rotary(vars(module)[ROTARY]), nests=True)


def find_fused_layers(model: Any, head: LMHead, dtype: torch.dtype | None) -> FusedLayers | None:
    """None where no kernels run; the model's layers are as fast there."""
    if not layer_ops.can_run_kernels(model.get_input_embeddings().weight):
        return None
    return FusedLayers(model, head, dtype)


class Trace:
    """Which tensors flow between a model's norms and linear layers."""

    def __init__(self, model: Any, norms: Iterable[nn.Module], linear: Sequence[nn.Linear]):
        self.inputs: dict[nn.Linear, list[Tensor]] = {module: [] for module in linear}
        """Input of each call of a linear layer."""
        self._nonlinear_norms: set[nn.Module] = set()
        self._by_weight = {id(module.weight): module for module in linear}
        self._norm_outputs: dict[int, tuple[nn.Module, Tensor]] = {}
        """By id; the reference keeps the id from being reused."""
        hooks = [norm.register_forward_hook(self._record_output) for norm in norms]
        vocab_size = model.get_input_embeddings().weight.shape[0]
        ids = torch.arange(4, device=model.device)[None] % vocab_size
        try:
            with torch.no_grad(), _Observer(self._record_call):
                model.base_model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        input_ids = {id(x) for inputs in self.inputs.values() for x in inputs}
        self.linear_only_norms = {
            norm for output_id, (norm, _) in self._norm_outputs.items() if output_id in input_ids
        } - self._nonlinear_norms
        """Norms whose output only linear layers consume."""
        self._norm_outputs.clear()

    def share_input(self, modules: Sequence[nn.Linear]) -> bool:
        """Whether each module is called once, all with the same tensor."""
        inputs = [self.inputs[module] for module in modules]
        return all(len(each) == 1 and each[0] is inputs[0][0] for each in inputs)

    def _record_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._norm_outputs[id(output)] = module, output

    def _record_call(self, func: Any, args: Sequence[Any]) -> None:
        if func is F.linear and (module := self._by_weight.get(id(args[1]))) is not None:
            self.inputs[module].append(args[0])
            return
        for x in _tensors(args):
            if id(x) in self._norm_outputs:
                self._nonlinear_norms.add(self._norm_outputs[id(x)][0])


class _Observer(TorchFunctionMode):
    def __init__(self, record: Callable[[Any, Sequence[Any]], None]):
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # .shape and the like consume nothing
            self.record(func, (*args, *kwargs.values()))
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
