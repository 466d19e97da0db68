"""Whole tensors and this rank's shards of them. A plain tensor is its own whole."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a shard, without communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_whole(tensor: Tensor) -> Tensor:
    """A shard's whole tensor; every rank must ask for it. Others are whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(shards: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Gather all shards into plain tensors of these names, whose addresses stay."""
    assert shards.keys() == targets.keys()
    for name, shard in shards.items():
        targets[name].copy_(gather_whole(shard.detach()))


class GatheredTensors:
    """Whole tensors of shards, in memory only while ranks score (`engines.sharded`)."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self.shards = shards
        self.whole: dict[str, Tensor] = {}

    def gather(self) -> None:
        self.whole = {name: gather_whole(shard) for name, shard in self.shards.items()}

    def release(self) -> None:
        self.whole = {}


def copy_into(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a shard, which takes its own part, or into a plain tensor."""
    if isinstance(tensor, DTensor):
        shard = shard_like(tensor, whole)
        assert isinstance(shard, DTensor)
        tensor.to_local().copy_(shard.to_local())
    else:
        tensor.copy_(whole)


def shard_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's shard of a whole tensor with the parameter's shape, without communication."""
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    return distribute_tensor(
        whole.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )
