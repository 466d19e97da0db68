"""The student's weights, gradients and optimizer state as shards over the ranks (FSDP2).

Trainer and sampler are two models. The trainer's layers are `fully_shard`ed: each is gathered for
its own forward and backward pass, and its gradient is reduce-scattered (or once for all passes of a
step, see `zero_stage`). Embeddings, final norm and
LM head are gathered for the whole step, because the fused head takes the plain weight, and their
gradient is reduce-scattered in the last pass. The sampler is a plain copy that samples and scores;
it takes over the trained weights after each step. So rollouts have no collectives, and engines and
CUDA graphs see an ordinary model at fixed addresses.

Frozen models may be sharded, too: large teachers, the reference, and moving averages, which are in
the same shards as the trained weights. How ranks score with them is in `engines/sharded.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from courtside.engines.compatibility import disable_activation_checkpointing
from courtside.engines.lm_head import LMHead
from courtside.errors import ModelError
from courtside.ranks import Ranks
from courtside.training.head import allocate_head_gradient
from courtside.training.shards import copy_whole, local_rows
from courtside.training.weights import StudentWeights


class ShardedWeights(StudentWeights):
    """The trainer's model; `sampler` has the same weights, whole."""

    def __init__(self, sampler: StudentWeights, mesh: DeviceMesh, *, zero_stage: int):
        """`zero_stage`: see `ShardingConfig`."""
        self.sampler, self.device, self.autocast = sampler, sampler.device, sampler.autocast
        self.adapter = None  # the sampler's is switched off and on, never the trainer's
        self.model, self.mesh = _copy_to_host(sampler.model), mesh
        disable_activation_checkpointing(sampler.model)
        self._zero_stage, reshards = zero_stage, zero_stage == 3
        self._root, self._layers = _shard(self.model, mesh, self.autocast, reshards=reshards)
        for module in (self._root, *self._layers):
            # Sums over the ranks: the denominators of the losses are those of the whole step.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._root.set_reshard_after_backward(False, recurse=zero_stage == 1)
        self._trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if self.autocast is not None and sampler.adapter is None:
            _cast_linear_weights(sampler.model, self.autocast)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The shards: DTensors, whatever is gathered at the moment."""
        return self._trained

    @contextmanager
    def gather_head(self) -> Iterator[None]:
        self._root.unshard()
        try:
            yield
        finally:
            for module in (self._root, *self._layers):
                module.reshard()

    @contextmanager
    def gather_layers(self) -> Iterator[None]:
        """For probes, which compare modules by their parameters."""
        for layer in self._layers:
            layer.set_reshard_after_forward(False)
            layer.unshard()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.reshard()
                layer.set_reshard_after_forward(self._zero_stage == 3)

    def start_pass(self, head: LMHead, *, is_last: bool) -> None:
        # The ranks reduce a gradient together, so all of them have it in the last pass.
        self._root.set_requires_gradient_sync(is_last, recurse=self._zero_stage == 1)
        allocate_head_gradient(head)

    @torch.no_grad()
    def publish(self) -> None:
        copy_whole(self._trained, {n: p.data for n, p in self.sampler.trained.items()})

    def copy(self) -> Any:
        """A separate frozen model in shards, with the sampler's weights and their dtypes."""
        model = _copy_to_host(self.sampler.model).eval().requires_grad_(False)
        shard_for_scoring(model, self.mesh, self.autocast)
        return model

    @torch.no_grad()
    def copy_trained(self) -> tuple[Any, dict[str, Tensor]]:
        """A separate frozen model in the same shards as the trained weights, in their dtypes; and
        those shards."""
        model = _copy_to_host(self.sampler.model, {n: p.dtype for n, p in self._trained.items()})
        model.eval().requires_grad_(False)
        shard_for_scoring(model, self.mesh, self.autocast)
        shards = {n: p.data for n, p in model.named_parameters() if n in self._trained}
        for name, shard in shards.items():
            local_rows(shard).copy_(local_rows(self._trained[name]))
        return model, shards


def make_mesh(ranks: Ranks, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (ranks.size,))


def shard_for_scoring(model: Any, mesh: DeviceMesh, autocast: torch.dtype | None) -> None:
    """Shard a frozen model in place, layer by layer. It may be in host memory: a layer goes to the
    device when it is sharded."""
    _shard(model, mesh, autocast, reshards=True)


def _copy_to_host(model: Any, dtypes: Mapping[str, torch.dtype] | None = None) -> Any:
    """A copy with its parameters in host memory: `fully_shard` takes those of one layer after the
    other to the device, which never holds two whole models. `dtypes`: by name, where they change.
    """
    dtypes = dtypes or {}
    copies = {
        id(p): nn.Parameter(
            p.detach().to("cpu", dtypes.get(name), copy=True), requires_grad=p.requires_grad
        )
        for name, p in model.named_parameters()
    }
    return copy.deepcopy(model, memo=copies)


class PassRoot(nn.Module):
    """The module that a forward pass enters first: it hands passes on to the model's decoder.

    FSDP takes the first of its modules that is called for the root of the pass. Were that a layer,
    each layer would be a pass to it: gathered when the one before has been computed, and not
    meanwhile. It has the weights outside of the layers."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self._decode = model.base_model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._decode(*args, **kwargs)

    def take_passes(self) -> None:
        """Passes through the decoder come here first, and whoever has the model can gather it."""

        @wraps(self._decode)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        self.model.base_model.forward = forward
        self.model.unshard, self.model.reshard = self.unshard, self.reshard


def _shard(
    model: Any, mesh: DeviceMesh, autocast: torch.dtype | None, *, reshards: bool
) -> tuple[FSDPModule, list[FSDPModule]]:
    """Shard the model in place; returns the root of its passes and its decoder layers."""
    layers: list[Any] = list(_find_layers(model))
    # Gathered in the dtype of the shards, and cast by autocast alone, as in a single process.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    root: Any = fully_shard(PassRoot(model), mesh=mesh, reshard_after_forward=False)
    root.take_passes()
    # One pass tells the layers what their root is.
    device_type = mesh.device_type
    with torch.no_grad(), torch.autocast(device_type, autocast, enabled=autocast is not None):
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
        model.base_model(input_ids=ids, use_cache=False)
    for module in (root, *layers):
        module.reshard()
    return root, layers


def _find_layers(model: Any) -> nn.ModuleList:
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ModelError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers, so it cannot be "
        "sharded over several processes. Train with one process; for a teacher sharding.teachers = "
        "'whole' is enough"
    )


def _cast_linear_weights(model: Any, dtype: torch.dtype) -> None:
    """What autocast would cast in every forward pass of the sampler, cast once."""
    tied = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not tied:
            module.weight.data = module.weight.data.to(dtype)
