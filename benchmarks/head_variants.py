"""What `head_gpu.py` times and checks: the divergence head in all its variants, and its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from workload import SEED

from courtside.losses.full import divergence as full
from courtside.losses.fused import Plan, choose_backend, divergence_head, words_of
from courtside.losses.fused_records import (
    Asked,
    Backend,
    Divergence,
    HeadGradient,
    HeadLoss,
    Projection,
    Raw,
    Support,
)
from courtside.losses.top_k import top_k_divergence, top_k_ids

SHAPES = {
    "qwen3-8b": (8192, 4096, 151936),
    "qwen3-0.6b": (4096, 1024, 151936),
    "smollm2": (8192, 576, 49152),
    "tiny": (32, 16, 200),
}
REVERSE = Divergence(name="reverse_kl")
OTHERS = {
    "forward KL": Divergence(name="forward_kl"),
    "JSD 0.5": Divergence(name="jsd", beta=0.5),
    "skewed reverse 0.1": Divergence(name="skew_reverse_kl", alpha=0.1),
    "skewed forward 0.1": Divergence(name="skew_forward_kl", alpha=0.1),
    "top 64 of the teacher, tail": Divergence(
        name="reverse_kl", support=Support(k=64, of="teacher", form="tail")
    ),
    "top 64 of both, tail": Divergence(
        name="reverse_kl", support=Support(k=64, of="joint", form="tail")
    ),
}
PLANS = [(1024, 1024), (2048, 2048), (2048, 512), (4096, 512), (4096, 1024), (8192, 1024)]
CHECKED_ROWS = 128
LIMIT = 3e-2
"""Of ‖ours − float64‖ / ‖float64‖: logits of bfloat16 have three digits, whoever computes them."""
EXACT_LIMIT = 4e-3
"""The same from the same logits: what is left is the rounding of the gradient to bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    student: Projection
    teacher: Projection
    ids_N: Tensor
    backend: Backend

    def asked(self, divergence: Divergence | None) -> Asked:
        ones_N = torch.ones(len(self.ids_N), device=self.ids_N.device)
        return Asked(
            ids_N=self.ids_N,
            temperature_N=ones_N,
            divergence=divergence,
            weight_N=None if divergence is None else ones_N / len(ones_N),
            sampled=None if divergence is not None else -ones_N / len(ones_N),
        )

    def first(self, num_rows: int) -> Inputs:
        def cut(side: Projection) -> Projection:
            return Projection(hidden_ND=side.hidden_ND[:num_rows], weight_VD=side.weight_VD)

        return replace(
            self, student=cut(self.student), teacher=cut(self.teacher), ids_N=self.ids_N[:num_rows]
        )


def make_inputs(
    shape: tuple[int, int, int], device: torch.device, backend: Backend | None
) -> Inputs:
    """Logits of a standard deviation of 2; a teacher that is another head on other states."""
    num_rows, size, num_words = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*dims: int, scale: float) -> Tensor:
        return (torch.randn(*dims, generator=generator, device=device) * scale).to(dtype)

    student, teacher = (
        Projection(
            hidden_ND=normal(num_rows, size, scale=1.0),
            weight_VD=normal(num_words, size, scale=2.0 / size**0.5),
        )
        for _ in range(2)
    )
    ids_N = torch.randint(num_words, (num_rows,), generator=generator, device=device)
    backend = backend or choose_backend(student.weight_VD)
    return Inputs(student=student, teacher=teacher, ids_N=ids_N, backend=backend)


# ── what is timed ────────────────────────────────────────────────────────────────────────────────


def products(inputs: Inputs, *, teacher: bool = True, trained: bool = True) -> Callable[[], None]:
    """The floor, into memory that is there already."""
    student, other = inputs.student, inputs.teacher
    logits_NV = student.hidden_ND.new_empty(len(inputs.ids_N), len(student.weight_VD))
    gradient_VD = torch.empty_like(student.weight_VD)
    gradient_ND = torch.empty_like(student.hidden_ND)

    def run() -> None:
        torch.mm(student.hidden_ND, student.weight_VD.t(), out=logits_NV)
        if teacher:
            torch.mm(other.hidden_ND, other.weight_VD.t(), out=logits_NV)
        torch.mm(logits_NV, student.weight_VD, out=gradient_ND)
        if trained:
            torch.mm(logits_NV.t(), student.hidden_ND, out=gradient_VD)

    return run


def ours(
    inputs: Inputs,
    divergence: Divergence | None = REVERSE,
    *,
    plan: Plan | None = None,
    trained: bool = True,
    backend: Backend | None = None,
) -> tuple[HeadLoss, HeadGradient | None]:
    into = None
    if trained:
        into = HeadGradient(
            weight_VD=torch.zeros_like(inputs.student.weight_VD, dtype=torch.float32)
        )
    teacher = None if divergence is None else inputs.teacher
    return divergence_head(
        inputs.student,
        teacher,
        inputs.asked(divergence),
        into=into,
        plan=plan,
        backend=backend or inputs.backend,
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


def liger(inputs: Inputs, *, loss: Any) -> tuple[Tensor, Tensor]:
    hidden_ND = inputs.student.hidden_ND.detach().requires_grad_()
    weight_VD = inputs.student.weight_VD.detach().requires_grad_()
    value = loss(
        hidden_ND, weight_VD, inputs.teacher.hidden_ND, inputs.teacher.weight_VD, inputs.ids_N
    )
    gradients = torch.autograd.grad(value, (hidden_ND, weight_VD))
    return gradients[0], gradients[1]


def liger_losses(
    chunks: list[int], *, compiled: bool
) -> dict[str, Callable[[Inputs], tuple[Tensor, Tensor]]]:
    if find_spec("liger_kernel") is None:
        print("liger: skipped, `liger_kernel` cannot be imported (put it on PYTHONPATH)")
        return {}
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    return {
        f"liger, chunk {chunk}": partial(
            liger,
            # beta = 1 is its reverse KL; the loss on labels is off.
            loss=LigerFusedLinearJSDLoss(
                weight_hard_loss=0.0,
                weight_soft_loss=1.0,
                beta=1.0,
                chunk_size=chunk,
                compiled=compiled,
            ),
        )
        for chunk in chunks
    }


# ── right before fast ────────────────────────────────────────────────────────────────────────────


def low_logits(inputs: Inputs) -> tuple[Tensor, Tensor]:
    student, teacher = inputs.student, inputs.teacher
    return student.hidden_ND @ student.weight_VD.t(), teacher.hidden_ND @ teacher.weight_VD.t()


def gradient_by_logits(
    logits_NV: Tensor, teacher_NV: Tensor, inputs: Inputs, divergence: Divergence | None
) -> Tensor:
    """In float64, by autograd, on the support that low precision chooses: the other may differ."""
    leaf_NV = logits_NV.double().requires_grad_()
    logp_NV, logq_NV = leaf_NV.log_softmax(-1), teacher_NV.double().log_softmax(-1)
    if divergence is None:
        value_N = -logp_NV.gather(-1, inputs.ids_N[:, None])[:, 0]
    elif divergence.support is None:
        value_N = full(logp_NV, logq_NV, name=divergence.name, beta=divergence.beta,
                       alpha=divergence.alpha)  # fmt: skip
    else:
        on = divergence.support
        ids_NK, keep_NK = top_k_ids(*low_logits(inputs), k=on.k, of=on.of)
        value_N = top_k_divergence(
            logp_NV.gather(-1, ids_NK), logq_NV.gather(-1, ids_NK), keep_NK,
            name=divergence.name, form=on.form,
        )  # fmt: skip
    (gradient_NV,) = torch.autograd.grad(value_N.mean(), leaf_NV)
    return gradient_NV


def reference(inputs: Inputs, divergence: Divergence | None) -> tuple[Tensor, Tensor]:
    """Gradients by hidden states and head in float64."""
    logits_NV, teacher_NV = (
        side.hidden_ND.double() @ side.weight_VD.double().t()
        for side in (inputs.student, inputs.teacher)
    )
    gradient_NV = gradient_by_logits(logits_NV, teacher_NV, inputs, divergence)
    hidden_ND = gradient_NV @ inputs.student.weight_VD.double()
    return hidden_ND, gradient_NV.t() @ inputs.student.hidden_ND.double()


def relative(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def off_from_logits(inputs: Inputs, divergence: Divergence | None) -> float:
    """Of the pass over the words alone, from the very same logits."""
    logits_NV, teacher_NV = low_logits(inputs)
    right_NV = gradient_by_logits(logits_NV, teacher_NV, inputs, divergence)
    raws = (Raw(values_NV=v, scale=1.0, softcap=None) for v in (logits_NV, teacher_NV))
    words_of(inputs.backend)(*raws, inputs.asked(divergence), slice(0, len(inputs.ids_N)))
    return relative(logits_NV, right_NV)


def check(inputs: Inputs) -> dict[str, dict[str, float]]:
    """‖ours − float64‖ / ‖float64‖ of the gradients of a few rows; ends the run where it is off."""
    few = inputs.first(CHECKED_ROWS)
    right = reference(few, REVERSE)
    found = plain(few)
    errors = {
        "plain": {"hidden": relative(found[0], right[0]), "head": relative(found[1], right[1])}
    }
    for name, divergence in {"reverse KL": REVERSE, **OTHERS, "cross-entropy": None}.items():
        if divergence and divergence.support and divergence.support.k > len(few.student.weight_VD):
            continue
        # Chunks that do not divide the rows: the seams are checked too.
        mine, into = ours(few, divergence, plan=Plan(chunk=96, part=40))
        assert into is not None
        right = reference(few, divergence)
        errors[name] = {
            "hidden": relative(mine.hidden_gradient_ND, right[0]),
            "head": relative(into.weight_VD, right[1]),
            "from the same logits": off_from_logits(few, divergence),
        }
    for name, error in errors.items():
        said = ", ".join(f"{what} {value:.1e}" for what, value in error.items())
        print(f"  off by: {said}: {name}")
    wrong = [
        name
        for name, error in errors.items()
        if not max(error.values()) < LIMIT or not error.get("from the same logits", 0) < EXACT_LIMIT
    ]
    if wrong:
        raise SystemExit(f"not as close to float64 as bfloat16 allows: {wrong}. Nothing was timed")
    return errors


def check_far_rows(device: torch.device) -> float:
    """Rows that begin past 2^31 logits, against the same rows alone."""
    inputs = make_inputs((16384, 64, 151936), device, None)
    whole, _ = ours(inputs, plan=Plan(chunk=16384, part=16384), trained=False)
    last = replace(
        inputs.first(0),
        student=replace(inputs.student, hidden_ND=inputs.student.hidden_ND[-64:]),
        teacher=replace(inputs.teacher, hidden_ND=inputs.teacher.hidden_ND[-64:]),
        ids_N=inputs.ids_N[-64:],
    )
    alone, _ = ours(last, trained=False)
    right_ND = alone.hidden_gradient_ND.double() * 64 / 16384
    found = float((whole.hidden_gradient_ND[-64:] - right_ND).norm() / right_ND.norm())
    print(f"rows past 2^31 logits: off by {found:.1e}")
    if not found < LIMIT:
        raise SystemExit("rows past 2^31 logits are wrong. Nothing was timed")
    return found


# ── all of them ──────────────────────────────────────────────────────────────────────────────────


def variants(
    inputs: Inputs, only: list[str], *, compiled: bool
) -> dict[str, tuple[str, int, Callable[[], Any]]]:
    """By name: (its floor, bytes of its gradients, what runs)."""
    size, head = inputs.student.hidden_ND.numel(), inputs.student.weight_VD.numel()
    item = inputs.student.hidden_ND.element_size()
    mixed, low, frozen = size * item + head * 4, (size + head) * item, size * item
    found: dict[str, tuple[str, int, Callable[[], Any]]] = {}
    if "ours" in only:
        found["ours"] = ("four", mixed, partial(ours, inputs))
        for chunk, part in PLANS:
            if chunk <= len(inputs.ids_N):
                plan = Plan(chunk=chunk, part=part)
                found[f"ours, {chunk}/{part}"] = ("four", mixed, partial(ours, inputs, plan=plan))
        found["ours, head frozen"] = ("frozen", frozen, partial(ours, inputs, trained=False))
        found["ours, sampled words only"] = ("sampled", mixed, partial(ours, inputs, None))
        for name, divergence in OTHERS.items():
            if not divergence.support or divergence.support.k <= len(inputs.student.weight_VD):
                found[f"ours, {name}"] = ("four", mixed, partial(ours, inputs, divergence))
    if "torch" in only:
        found["ours without kernels"] = ("four", mixed, partial(ours, inputs, backend="torch"))
    if "plain" in only:
        found["plain"] = ("four", low, partial(plain, inputs))
    if "liger" in only:
        for name, run in liger_losses([1024, 4096], compiled=compiled).items():
            found[name] = ("four", low, partial(run, inputs))
    return found
