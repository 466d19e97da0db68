"""GPUs of a recipe's vLLM servers: which there are, and what one of them holds.

A replica (an address) takes its GPUs by tensor parallelism within a machine; replicas share the
requests. What vLLM itself takes is an assumption: 0.9 of the memory (its default), of which 2 GiB
are activations and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from courtside.errors import PlanError
from courtside.planning.gpus import GIB, Device
from courtside.planning.models import read_shape
from courtside.planning.presets import find_preset
from courtside.planning.shapes import ModelShape
from courtside.planning.workload import GPUS_PER_MACHINE, ServerGpus, Workload
from courtside.recipe import Recipe


def find_rollout_servers(
    recipe: Recipe, num_gpus: int | None, student: ModelShape, device: Device
) -> ServerGpus | None:
    if num_gpus is None:
        return None
    server = recipe.rollout.server
    if server is None:
        raise PlanError(
            f"--rollout-gpus {num_gpus}: the recipe samples in the training process. Set "
            "rollout.server, or leave it out"
        )
    return _make("--rollout-gpus", num_gpus, len(server.urls), student, device)


def find_teacher_servers(
    recipe: Recipe, num_gpus: int | None, teacher_shape: str | None, device: Device
) -> ServerGpus | None:
    if num_gpus is None:
        return None
    teachers = recipe.server_teachers
    models = {teacher.model for teacher in teachers}
    if len(models) != 1:
        raise PlanError(
            f"--teacher-gpus {num_gpus}: the recipe has {len(models)} models of kind 'server' as "
            "teachers, and one can be planned. Leave it out"
        )
    (model,) = models
    option = "--teacher-shape"
    shape = (
        read_shape(model, option=option)
        if teacher_shape is None
        else find_preset(teacher_shape, option)
    )
    num_replicas = len({url for teacher in teachers for url in teacher.server.urls})
    return _make("--teacher-gpus", num_gpus, num_replicas, shape, device)


def _make(
    option: str, num_gpus: int, num_replicas: int, shape: ModelShape, device: Device
) -> ServerGpus:
    if not device.is_gpu:
        raise PlanError(f"{option} {num_gpus} with --gpu cpu: servers are planned on GPUs")
    if num_gpus < 1 or num_gpus % num_replicas or num_gpus > GPUS_PER_MACHINE * num_replicas:
        raise PlanError(
            f"{option} {num_gpus}: the recipe names {num_replicas} addresses, and each takes the "
            f"same number of GPUs, at most {GPUS_PER_MACHINE}. Give a multiple of {num_replicas}"
        )
    return ServerGpus(shape=shape, num_gpus=num_gpus, num_replicas=num_replicas)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────

MEMORY_SHARE = 0.9
OVERHEAD = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One GPU of a server."""

    role: Literal["rollout", "teacher"]
    servers: ServerGpus
    weight_bytes: float
    cache_tokens: float
    """Of the KV cache of a replica."""
    rows: float
    """Sequences of the planned length that it holds at a time, below 1: none."""

    @property
    def fits(self) -> bool:
        return self.rows >= 1


def plan_servers(work: Workload) -> Iterator[ServerPlan]:
    roles: tuple[tuple[Literal["rollout", "teacher"], ServerGpus | None], ...] = (
        ("rollout", work.rollout_servers),
        ("teacher", work.teacher_servers),
    )
    for role, servers in roles:
        if servers is not None:
            extra = work.lengths.context if role == "teacher" else 0.0
            tokens = server_cache_tokens(work, servers)
            yield ServerPlan(
                role=role,
                servers=servers,
                weight_bytes=weight_bytes(servers),
                cache_tokens=tokens,
                rows=tokens / (work.lengths.sequence + extra),
            )


def weight_bytes(servers: ServerGpus) -> float:
    """In bfloat16."""
    return 2.0 * servers.shape.num_parameters / servers.tensor_parallel


def server_cache_tokens(work: Workload, servers: ServerGpus) -> float:
    cache_bytes = MEMORY_SHARE * work.device.memory - weight_bytes(servers) - OVERHEAD
    per_token = 2.0 * servers.shape.kv_elements_per_token / servers.tensor_parallel
    return max(0.0, cache_bytes / per_token)


def on_servers(work: Workload, servers: ServerGpus) -> Workload:
    """The same step, computed by the GPUs of servers."""
    return replace(
        work,
        num_gpus=servers.num_gpus,
        tensor_parallel=servers.tensor_parallel,
        server_cache_tokens=server_cache_tokens(work, servers),
        rollout_servers=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPlace:
    """GPUs that teachers are on, as the same step computed there."""

    work: Workload
    shape: ModelShape
    share: float
    """Of the tasks."""
    is_served: bool


def list_teacher_places(work: Workload) -> list[TeacherPlace]:
    """Of the teachers whose GPUs are in the plan: this process, servers, or with routes both."""
    places = []
    if work.local_share:
        places.append(
            TeacherPlace(
                work=work, shape=work.models.scorer, share=work.local_share, is_served=False
            )
        )
    if work.teacher_servers is not None:
        servers = work.teacher_servers
        places.append(
            TeacherPlace(
                work=on_servers(work, servers), shape=servers.shape, share=work.served_share,
                is_served=True,
            )
        )  # fmt: skip
    return places
