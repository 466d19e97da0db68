"""What `head_gpu.py` and `head_variants.py` run: inputs, the floor, ours, the peers, the checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from workload import SEED

from courtside.losses.full_vocabulary import divergence as full
from courtside.losses.fused.linear_divergence import (
    ChunkPlan,
    choose_backend,
    fused_linear_divergence,
    load_backend,
)
from courtside.losses.fused.types import (
    Backend,
    DivergenceSpec,
    HeadGradient,
    HeadLoss,
    HeadLossSpec,
    Projection,
    RawLogits,
    Support,
)
from courtside.losses.policy_gradient import SampledTokenLoss
from courtside.losses.top_k import top_k_divergence
from courtside.types import LowRank

SHAPES = {
    "qwen3-8b": (8192, 4096, 151936),
    "qwen3-0.6b": (4096, 1024, 151936),
    "qwen3-1.7b": (8192, 2048, 151936),
    "smollm2": (16384, 576, 49152),
    "tiny": (48, 16, 200),
}
"""Rows, hidden size, vocabulary size."""
REVERSE = DivergenceSpec(name="reverse_kl")
KINDS = {
    "reverse KL": REVERSE,
    "forward KL": DivergenceSpec(name="forward_kl"),
    "JSD 0.5": DivergenceSpec(name="jsd", parameters={"beta": 0.5}),
    "top 64, tail": DivergenceSpec(
        name="reverse_kl", support=Support(k=64, of="teacher", form="tail")
    ),
}
MORE_KINDS = {
    "skewed reverse 0.1": DivergenceSpec(name="skew_reverse_kl", parameters={"alpha": 0.1}),
    "skewed forward 0.1": DivergenceSpec(name="skew_forward_kl", parameters={"alpha": 0.1}),
    "top 64 of both, tail": DivergenceSpec(
        name="reverse_kl", support=Support(k=64, of="joint", form="tail")
    ),
}
ADAPTED = ("hidden", "down", "up")
"""What an adapter's gradients are called."""
CHECKED_ROWS = 128
RANK = 16
"""Of the adapter on a frozen head."""
LIMIT = 3e-2
"""Of ‖ours − float64‖ / ‖float64‖: logits of bfloat16 have three digits, whoever computes them."""
EXACT_LIMIT = 4e-3
"""The same from the same logits: what is left is the rounding of the gradient to bfloat16."""


def cross_entropy(weight_N: Tensor) -> SampledTokenLoss:
    return SampledTokenLoss(weight_N=weight_N, advantage_N=torch.ones_like(weight_N))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    student: Projection
    teacher: Projection
    ids_N: Tensor
    backend: Backend

    def spec(self, divergence: DivergenceSpec | None) -> HeadLossSpec:
        ones_N = torch.ones(len(self.ids_N), device=self.ids_N.device)
        return HeadLossSpec(
            ids_N=self.ids_N,
            temperature_N=ones_N,
            divergence=divergence,
            weight_N=None if divergence is None else ones_N / len(ones_N),
            sampled=() if divergence is not None else (cross_entropy(ones_N / len(ones_N)),),
        )

    def first(self, num_rows: int) -> Inputs:
        def cut(side: Projection) -> Projection:
            return replace(side, hidden_ND=side.hidden_ND[:num_rows])

        return replace(
            self, student=cut(self.student), teacher=cut(self.teacher), ids_N=self.ids_N[:num_rows]
        )

    def adapted(self) -> Inputs:
        """With an adapter on the student's head that has moved away from nothing."""
        hidden_ND, weight_VD = self.student.hidden_ND, self.student.weight_VD
        generator = torch.Generator(hidden_ND.device).manual_seed(SEED + 1)

        def normal(*dims: int) -> Tensor:
            values = torch.randn(*dims, generator=generator, device=hidden_ND.device)
            return (values / dims[1] ** 0.5).to(weight_VD.dtype)

        low = LowRank(
            down_RD=normal(RANK, hidden_ND.shape[1]), up_VR=normal(len(weight_VD), RANK), scale=2.0
        )
        return replace(self, student=replace(self.student, low_rank=low))


def make_inputs(
    shape: tuple[int, int, int], device: torch.device, backend: Backend | None = None
) -> Inputs:
    """Logits of a standard deviation of 2; a teacher that is another head on other states."""
    num_rows, size, vocab_size = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*dims: int, scale: float) -> Tensor:
        return (torch.randn(*dims, generator=generator, device=device) * scale).to(dtype)

    student, teacher = (
        Projection(
            hidden_ND=normal(num_rows, size, scale=1.0),
            weight_VD=normal(vocab_size, size, scale=2.0 / size**0.5),
        )
        for _ in range(2)
    )
    ids_N = torch.randint(vocab_size, (num_rows,), generator=generator, device=device)
    backend = backend or choose_backend(student.weight_VD)
    return Inputs(student=student, teacher=teacher, ids_N=ids_N, backend=backend)


# ── what is timed ────────────────────────────────────────────────────────────────────────────────


def matmuls(inputs: Inputs, *, trained: bool = True) -> Callable[[], None]:
    """The floor, into memory that is there already."""
    student, other = inputs.student, inputs.teacher
    logits_NV = student.hidden_ND.new_empty(len(inputs.ids_N), len(student.weight_VD))
    gradient_VD = torch.empty_like(student.weight_VD)
    gradient_ND = torch.empty_like(student.hidden_ND)

    def run() -> None:
        torch.mm(student.hidden_ND, student.weight_VD.t(), out=logits_NV)
        torch.mm(other.hidden_ND, other.weight_VD.t(), out=logits_NV)
        torch.mm(logits_NV, student.weight_VD, out=gradient_ND)
        if trained:
            torch.mm(logits_NV.t(), student.hidden_ND, out=gradient_VD)

    return run


def ours(
    inputs: Inputs,
    divergence: DivergenceSpec | None = REVERSE,
    *,
    plan: ChunkPlan | None = None,
    trained: bool = True,
    narrow: bool = False,
) -> tuple[HeadLoss, HeadGradient | None]:
    """`narrow`: the head's gradient in the dtype of the head, as the peers have it. A head with an
    adapter is frozen."""
    weight_VD, into = inputs.student.weight_VD, None
    if (low := inputs.student.low_rank) is not None:
        into = HeadGradient(
            down_RD=torch.zeros_like(low.down_RD, dtype=torch.float32),
            up_VR=torch.zeros_like(low.up_VR, dtype=torch.float32),
        )
    elif trained:
        dtype = weight_VD.dtype if narrow else torch.float32
        into = HeadGradient(weight_VD=torch.zeros_like(weight_VD, dtype=dtype))
    return fused_linear_divergence(
        inputs.student,
        None if divergence is None else inputs.teacher,
        inputs.spec(divergence),
        head_gradient=into,
        plan=plan,
        backend=inputs.backend,
    ), into


def plain(inputs: Inputs) -> tuple[Tensor, Tensor]:
    hidden_ND = inputs.student.hidden_ND.detach().requires_grad_()
    weight_VD = inputs.student.weight_VD.detach().requires_grad_()
    logp_NV = (hidden_ND @ weight_VD.t()).float().log_softmax(-1)
    with torch.no_grad():
        teacher_NV = inputs.teacher.hidden_ND @ inputs.teacher.weight_VD.t()
        teacher_NV = teacher_NV.float().log_softmax(-1)
    loss = (logp_NV.exp() * (logp_NV - teacher_NV)).sum(-1).mean()
    gradients = torch.autograd.grad(loss, (hidden_ND, weight_VD))
    return gradients[0], gradients[1]


def plain_adapted(inputs: Inputs) -> tuple[Tensor, ...]:
    """A frozen head and the adapter's two matmuls: gradients by hidden states, down and up."""
    low = inputs.student.low_rank
    assert low is not None
    leaves = [
        x.detach().requires_grad_() for x in (inputs.student.hidden_ND, low.down_RD, low.up_VR)
    ]
    logits_NV = leaves[0] @ inputs.student.weight_VD.t()
    logits_NV = logits_NV + (leaves[0] @ leaves[1].t() * low.scale) @ leaves[2].t()
    logp_NV = logits_NV.float().log_softmax(-1)
    with torch.no_grad():
        teacher_NV = inputs.teacher.hidden_ND @ inputs.teacher.weight_VD.t()
        teacher_NV = teacher_NV.float().log_softmax(-1)
    loss = (logp_NV.exp() * (logp_NV - teacher_NV)).sum(-1).mean()
    return torch.autograd.grad(loss, leaves)


def liger(chunk: int, *, compiled: bool) -> Callable[[Inputs], tuple[Tensor, Tensor]] | None:
    """Its reverse KL in chunks of so many rows; None: `liger_kernel` cannot be imported."""
    if find_spec("liger_kernel") is None:
        return None
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    # beta = 1 is its reverse KL; the loss on labels is off.
    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, chunk_size=chunk, compiled=compiled
    )

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        hidden_ND = inputs.student.hidden_ND.detach().requires_grad_()
        weight_VD = inputs.student.weight_VD.detach().requires_grad_()
        value = loss(
            hidden_ND, weight_VD, inputs.teacher.hidden_ND, inputs.teacher.weight_VD, inputs.ids_N
        )
        gradients = torch.autograd.grad(value, (hidden_ND, weight_VD))
        return gradients[0], gradients[1]

    return run


def gradient_bytes(inputs: Inputs, *, trained: bool = True, narrow: bool = False) -> int:
    """Of what a run gives back."""
    hidden_ND, weight_VD = inputs.student.hidden_ND, inputs.student.weight_VD
    item = hidden_ND.element_size()
    return hidden_ND.numel() * item + trained * weight_VD.numel() * (item if narrow else 4)


# ── right before fast ────────────────────────────────────────────────────────────────────────────


def low_logits(inputs: Inputs) -> tuple[Tensor, Tensor]:
    student, teacher = inputs.student, inputs.teacher
    return student.hidden_ND @ student.weight_VD.t(), teacher.hidden_ND @ teacher.weight_VD.t()


def gradient_by_logits(
    logits_NV: Tensor, teacher_NV: Tensor, inputs: Inputs, divergence: DivergenceSpec | None
) -> Tensor:
    """In float64, by autograd, on the support that low precision chooses: the other may differ."""
    leaf_NV = logits_NV.double().requires_grad_()
    logp_NV, logq_NV = leaf_NV.log_softmax(-1), teacher_NV.double().log_softmax(-1)
    if divergence is None:
        value_N = -logp_NV.gather(-1, inputs.ids_N[:, None])[:, 0]
    elif divergence.support is None:
        value_N = full(logp_NV, logq_NV, name=divergence.name, **divergence.parameters)
    else:
        on = divergence.support
        # Of equal logits, which in bfloat16 are many, the token with the lower id.
        sides = (x.sort(dim=-1, descending=True, stable=True).indices for x in low_logits(inputs))
        student_NK, teacher_NK = (ids_NV[:, : on.k] for ids_NV in sides)
        ids_NK, keep_NK = teacher_NK, torch.ones_like(teacher_NK, dtype=torch.bool)
        if on.of == "joint":
            shared_NK = (student_NK[:, :, None] == teacher_NK[:, None, :]).any(-1)
            ids_NK = torch.cat([teacher_NK, student_NK], -1)
            keep_NK = torch.cat([keep_NK, ~shared_NK], -1)
        value_N = top_k_divergence(
            logp_NV.gather(-1, ids_NK), logq_NV.gather(-1, ids_NK), keep_NK,
            name=divergence.name, form=on.form,
        )  # fmt: skip
    (gradient_NV,) = torch.autograd.grad(value_N.mean(), leaf_NV)
    return gradient_NV


def reference(inputs: Inputs, divergence: DivergenceSpec | None) -> tuple[Tensor, Tensor]:
    """Gradients by hidden states and head in float64."""
    logits_NV, teacher_NV = (
        side.hidden_ND.double() @ side.weight_VD.double().t()
        for side in (inputs.student, inputs.teacher)
    )
    gradient_NV = gradient_by_logits(logits_NV, teacher_NV, inputs, divergence)
    hidden_ND = gradient_NV @ inputs.student.weight_VD.double()
    return hidden_ND, gradient_NV.t() @ inputs.student.hidden_ND.double()


def reference_adapted(inputs: Inputs) -> tuple[Tensor, ...]:
    """Gradients by hidden states, down and up in float64."""
    low = inputs.student.low_rank
    assert low is not None
    hidden_ND, down_RD, up_VR = (
        x.double() for x in (inputs.student.hidden_ND, low.down_RD, low.up_VR)
    )
    weight_VD = inputs.student.weight_VD.double() + low.scale * up_VR @ down_RD
    teacher_NV = inputs.teacher.hidden_ND.double() @ inputs.teacher.weight_VD.double().t()
    gradient_NV = gradient_by_logits(hidden_ND @ weight_VD.t(), teacher_NV, inputs, REVERSE)
    gradient_VD = gradient_NV.t() @ hidden_ND * low.scale
    return gradient_NV @ weight_VD, up_VR.t() @ gradient_VD, gradient_VD @ down_RD.t()


def relative(value: Tensor, right: Tensor) -> float:
    return float((value.double() - right).norm() / right.norm())


def off_from_logits(inputs: Inputs, divergence: DivergenceSpec | None) -> float:
    """Of the pass over the vocabulary alone, from the same logits."""
    logits_NV, teacher_NV = low_logits(inputs)
    right_NV = gradient_by_logits(logits_NV, teacher_NV, inputs, divergence)
    raws = [RawLogits(values_NV=v, scale=1.0, softcap=None) for v in (logits_NV, teacher_NV)]
    whole = slice(0, len(inputs.ids_N))
    vocabulary_pass = load_backend(inputs.backend)(raws[0], inputs.spec(divergence), whole)
    vocabulary_pass.run_part(whole, raws[1])
    vocabulary_pass.finish()
    return relative(logits_NV, right_NV)


def errors_of(inputs: Inputs, kinds: dict[str, DivergenceSpec]) -> dict[str, dict[str, float]]:
    """‖found − float64‖ / ‖float64‖ of the gradients of a few rows, by kind."""
    few = inputs.first(CHECKED_ROWS)
    right, result = reference(few, REVERSE), plain(few)
    errors = {
        "plain": {"hidden": relative(result[0], right[0]), "head": relative(result[1], right[1])}
    }
    checked: dict[str, DivergenceSpec | None] = {**kinds, "cross-entropy": None}
    for name, divergence in checked.items():
        # Chunks that do not divide the rows: the seams are checked too.
        mine, into = ours(few, divergence, plan=ChunkPlan(chunk=96, part=40))
        assert into is not None and into.weight_VD is not None
        right = reference(few, divergence)
        errors[name] = {
            "hidden": relative(mine.hidden_gradient_ND, right[0]),
            "head": relative(into.weight_VD, right[1]),
            "from the same logits": off_from_logits(few, divergence),
        }
    adapted = few.adapted()
    mine, into = ours(adapted, REVERSE, plan=ChunkPlan(chunk=96, part=40))
    assert into is not None and into.down_RD is not None and into.up_VR is not None
    for who, gradients in (
        ("plain, adapter", plain_adapted(adapted)),
        ("adapter", (mine.hidden_gradient_ND, into.down_RD, into.up_VR)),
    ):
        pairs = zip(ADAPTED, gradients, reference_adapted(adapted), strict=True)
        errors[who] = {what: relative(result, right) for what, result, right in pairs}
    return errors


def too_far(errors: dict[str, dict[str, float]]) -> list[str]:
    """Which of them are not as close to float64 as bfloat16 allows. On a top-k support, a token
    that is nearly as likely as the last one may take its place: that has no limit here."""
    plain = {"adapter": "plain, adapter"}  # rounded once more, whoever computes it
    limits = {
        ours: 1.05 * max(errors[reference_name].values()) for ours, reference_name in plain.items()
    }
    limits |= dict.fromkeys(plain.values(), float("inf"))
    return [
        name
        for name, error in errors.items()
        if not error.get("from the same logits", 0) < EXACT_LIMIT
        or not ("top" in name or max(error.values()) < limits.get(name, LIMIT))
    ]


def far_rows_error(device: torch.device) -> float:
    """Rows that begin past 2^31 logits, against the same rows alone."""
    inputs = make_inputs((16384, 64, 151936), device)
    whole, _ = ours(inputs, plan=ChunkPlan(chunk=16384, part=16384), trained=False)
    last = replace(
        inputs,
        student=replace(inputs.student, hidden_ND=inputs.student.hidden_ND[-64:]),
        teacher=replace(inputs.teacher, hidden_ND=inputs.teacher.hidden_ND[-64:]),
        ids_N=inputs.ids_N[-64:],
    )
    alone, _ = ours(last, trained=False)
    right_ND = alone.hidden_gradient_ND.double() * 64 / 16384
    return float((whole.hidden_gradient_ND[-64:] - right_ND).norm() / right_ND.norm())


def runs(inputs: Inputs) -> dict[str, tuple[str, int, Callable[[], Any]]]:
    """By name: (its floor, bytes of its gradients, what runs)."""
    whole = gradient_bytes(inputs)
    candidates: dict[str, tuple[str, int, Callable[[], Any]]] = {}
    for name, divergence in KINDS.items():
        if divergence.support is None or divergence.support.k < len(inputs.student.weight_VD):
            candidates[f"ours, {name}"] = ("trained", whole, partial(ours, inputs, divergence))
    candidates["ours, reverse KL, gradient as narrow as the head"] = (
        "trained", gradient_bytes(inputs, narrow=True), partial(ours, inputs, narrow=True),
    )  # fmt: skip
    candidates["ours, reverse KL, head frozen"] = (
        "frozen", gradient_bytes(inputs, trained=False), partial(ours, inputs, trained=False),
    )  # fmt: skip
    narrow = gradient_bytes(inputs, narrow=True)
    candidates["plain logits, reverse KL"] = ("trained", narrow, partial(plain, inputs))
    adapted = inputs.adapted()
    frozen = gradient_bytes(inputs, trained=False)
    numbers = RANK * sum(inputs.student.weight_VD.shape)
    candidates[f"ours, reverse KL, head frozen, adapter of rank {RANK}"] = (
        "frozen", frozen + 4 * numbers, partial(ours, adapted),
    )  # fmt: skip
    item = inputs.student.weight_VD.element_size()
    candidates[f"plain logits, reverse KL, head frozen, adapter of rank {RANK}"] = (
        "frozen", frozen + item * numbers, partial(plain_adapted, adapted),
    )  # fmt: skip
    return candidates
