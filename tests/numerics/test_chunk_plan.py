"""The fused head's memory: how many rows at once, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.linear_divergence_reference import FULL, ON_SUPPORT, make_case, zero_gradient
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from courtside.losses.fused import linear_divergence
from courtside.losses.fused.linear_divergence import (
    ChunkPlan,
    choose_backend,
    fused_linear_divergence,
    plan_chunks,
)
from courtside.losses.fused.types import DivergenceSpec, HeadLossSpec, Projection, Support


class _Largest(TorchDispatchMode):
    """The most elements that any operation gave."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("divergence", [*FULL, ON_SUPPORT[-1], None], ids=str)
def test_no_more_than_a_chunk_of_logits_exists(divergence: DivergenceSpec | None) -> None:
    case = make_case(num_rows=64, vocab_size=64, sizes=(3, 3))
    with _Largest() as largest:
        spec = case.spec(divergence)
        plan = ChunkPlan(chunk=8, part=4)
        fused_linear_divergence(
            case.student, case.teacher, spec, head_gradient=zero_gradient(case), plan=plan
        )
    assert largest.numel == 8 * 64


@pytest.mark.parametrize("teacher", [True, False])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("num_rows", [1, 100, 1024, 100_000])
def test_a_plan_keeps_to_its_budget(num_rows: int, trained: bool, teacher: bool) -> None:
    student = Projection(
        hidden_ND=torch.empty(num_rows, 0), weight_VD=torch.empty(49152, 0, dtype=torch.float32)
    )
    plan = plan_chunks(student, teacher=teacher, trained=trained)
    assert held(plan, teacher) * 49152 * 4 <= linear_divergence.CPU_BYTES
    check_chunks(plan, num_rows, tile=16)


def held(plan: ChunkPlan, teacher: bool) -> int:
    """Rows of logits that exist at once."""
    return plan.chunk + (plan.part if teacher else 0)


def check_chunks(plan: ChunkPlan, num_rows: int, *, tile: int) -> None:
    assert plan.part <= plan.chunk and plan.chunk % tile == 0
    num_chunks = -(-num_rows // plan.chunk)
    assert plan.chunk * num_chunks < num_rows + num_chunks * tile, "chunks of about equal size"


@pytest.mark.parametrize("teacher", [True, False])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("num_rows", [1, 4096, 8192, 100_000])
@pytest.mark.parametrize(
    ("size", "vocab_size"), [(4096, 151936), (2048, 151669), (1024, 151936), (576, 49152)]
)
def test_a_plan_for_a_gpu(
    size: int, vocab_size: int, num_rows: int, trained: bool, teacher: bool
) -> None:
    """At most 4608 rows of logits where the head trains, 2048 where not; a head that is small for a
    GPU gets half a GiB. 4096 rows, which fit, are one chunk."""
    student = Projection(
        hidden_ND=torch.empty(num_rows, size, device="meta", dtype=torch.bfloat16),
        weight_VD=torch.empty(vocab_size, size, device="meta", dtype=torch.bfloat16),
    )
    plan = plan_chunks(student, teacher=teacher, trained=trained, device="cuda")
    row_bytes = 2 * (-(-vocab_size // 64) * 64)
    allowed = row_bytes * (4608 if trained else 2048)
    assert held(plan, teacher) * row_bytes <= max(allowed, 2**29)
    check_chunks(plan, num_rows, tile=128)
    assert num_rows != 4096 or not trained or plan.chunk == 4096
    if teacher and trained and num_rows == 100_000:
        assert plan.chunk >= 3 * plan.part, "most of the memory is for what adds to the gradient"


def test_torch_is_chosen_on_a_cpu() -> None:
    assert choose_backend(torch.empty(2, 2)) == "torch"


def test_refusals_have_reasons() -> None:
    case = make_case()
    half = case.to(torch.float16)
    with pytest.raises(ValueError, match=r"float16.*bfloat16"):
        fused_linear_divergence(half.student, half.teacher, half.spec(FULL[0]))
    too_many = DivergenceSpec(name="reverse_kl", support=Support(k=24, of="teacher", form="tail"))
    with pytest.raises(ValueError, match="k = 24: the vocabulary has 23 tokens"):
        fused_linear_divergence(case.student, case.teacher, case.spec(too_many))
    with pytest.raises(ValueError, match="'jsd' needs beta"):
        DivergenceSpec(name="jsd")
    with pytest.raises(ValueError, match="alpha belongs to 'skew_forward_kl' and"):
        DivergenceSpec(name="reverse_kl", parameters={"alpha": 0.1})
    with pytest.raises(ValueError, match="between 0 and 1"):
        DivergenceSpec(name="jsd", parameters={"beta": 1.5})
    with pytest.raises(AssertionError, match="needs a teacher"):
        fused_linear_divergence(case.student, None, case.spec(FULL[0]))
    with pytest.raises(AssertionError, match="has weights"):
        HeadLossSpec(ids_N=case.ids_N, temperature_N=case.temperature_N, divergence=FULL[0])
