"""Which tensors flow between a model's norms and linear layers, traced in one small forward pass.

Whether a norm may output a lower precision, or two matmuls may be fused into one, depends on the
model's code, not on the names of its layers. So every torch call of the pass is observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Trace:
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
