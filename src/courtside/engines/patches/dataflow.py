"""What a pass of a model does with the results of its norms, and what its linear layers read.

Seen by watching every call of torch in one small pass: whether a result may be rounded early, or
two layers computed at once, is a fact about the model's code, not about its layers' names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Trace:
    """`reads`: what each linear layer was given. `elsewhere`: norms with a result that something
    else than those layers looked at."""

    def __init__(self, model: Any, norms: Iterable[nn.Module], linear: Sequence[nn.Linear]):
        self.reads: dict[nn.Linear, list[Tensor]] = {module: [] for module in linear}
        self.elsewhere: set[nn.Module] = set()
        self._by_weight = {id(module.weight): module for module in linear}
        self._made: dict[int, tuple[nn.Module, Tensor]] = {}
        """Results by identity; held, so that no other tensor gets it."""
        hooks = [norm.register_forward_hook(self._keep) for norm in norms]
        vocab_size = model.get_input_embeddings().weight.shape[0]
        ids = torch.arange(4, device=model.device)[None] % vocab_size
        try:
            with torch.no_grad(), _Watch(self._see):
                model.base_model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        read = {id(x) for inputs in self.reads.values() for x in inputs}
        self.feeds_linear = {
            norm for made, (norm, _) in self._made.items() if made in read
        } - self.elsewhere
        """Norms whose results only those layers read."""
        self._made.clear()

    def read_the_same(self, modules: Sequence[nn.Linear]) -> bool:
        """One tensor, once, all of them."""
        inputs = [self.reads[module] for module in modules]
        return all(len(each) == 1 and each[0] is inputs[0][0] for each in inputs)

    def _keep(self, module: nn.Module, args: Any, out: Any) -> None:
        self._made[id(out)] = module, out

    def _see(self, func: Any, args: Sequence[Any]) -> None:
        if func is F.linear and (module := self._by_weight.get(id(args[1]))) is not None:
            self.reads[module].append(args[0])
            return
        for x in _tensors(args):
            if id(x) in self._made:
                self.elsewhere.add(self._made[id(x)][0])


class _Watch(TorchFunctionMode):
    def __init__(self, see: Callable[[Any, Sequence[Any]], None]):
        super().__init__()
        self.see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # .shape and the like
            self.see(func, (*args, *kwargs.values()))
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
