"""Tokens that a model excludes by a bias of −inf, as padding of a vocabulary: on both backends.

The reference is the textbook over the tokens that are left, or with a probability that underflows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.linear_divergence_reference import (
    FULL,
    ON_SUPPORT,
    WITHOUT_CLOSED_FORM,
    Case,
    differences,
    exclude,
    expected,
    label,
    make_case,
    run_case,
)
from torch.testing import assert_close

from courtside.losses.fused.linear_divergence import ChunkPlan
from courtside.losses.fused.torch_backend import TorchVocabularyPass
from courtside.losses.fused.types import DivergenceSpec, Support
from courtside.losses.top_k import top_k_divergence

triton_backend = pytest.importorskip("courtside.losses.fused.triton_backend")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*without a tail"),
]
BACKENDS: dict[str, Any] = {
    "torch": TorchVocabularyPass,
    "triton": partial(
        triton_backend.TritonVocabularyPass, tiling=triton_backend.Tiling(num_warps=1)
    ),
}
SIZE, PADDED = 23, 27
ON_TEACHERS = ON_SUPPORT[:5]
run = partial(run_case, plan=ChunkPlan(chunk=4, part=3))


def padded_case() -> Case:
    """In float32, with four tokens more than both sides give any probability."""
    return exclude(make_case(num_rows=5, vocab_size=PADDED), [*range(SIZE, PADDED)])


def cut(case: Case) -> Case:
    """Without the excluded tokens."""
    ids_N = case.ids_N % SIZE
    sides = (replace(side, weight_VD=side.weight_VD[:SIZE], bias_V=side.bias_V[:SIZE])
             for side in (case.student, case.teacher))  # fmt: skip
    student, teacher = sides
    return replace(case, student=student, teacher=teacher, ids_N=ids_N)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "divergence", [*FULL, *ON_TEACHERS, *WITHOUT_CLOSED_FORM[:2], None],
    ids=lambda d: label(d) if d else "sampled",
)  # fmt: skip
def test_tokens_that_both_sides_exclude_do_not_exist(
    divergence: DivergenceSpec | None, backend: str
) -> None:
    if divergence in WITHOUT_CLOSED_FORM and backend == "triton":
        return  # it runs in torch
    case = padded_case()
    case = replace(case, ids_N=case.ids_N % SIZE).to(torch.float32)
    ours, into = run(case, divergence, backend=BACKENDS[backend])
    assert into.weight_VD is not None and into.bias_V is not None
    assert not into.weight_VD[SIZE:].any() and not into.bias_V[SIZE:].any()
    into = replace(into, weight_VD=into.weight_VD[:SIZE], bias_V=into.bias_V[:SIZE])
    off = differences(ours, into, expected(cut(case), divergence))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("side", "divergence"),
    [
        *(("student", d) for d in (FULL[0], *FULL[2:], ON_TEACHERS[0], ON_TEACHERS[3])),
        *(("teacher", d) for d in (*FULL[1:4], FULL[4], ON_TEACHERS[0], ON_TEACHERS[1])),
    ],
    ids=lambda x: x if isinstance(x, str) else label(x),
)  # fmt: skip
def test_tokens_that_one_side_excludes(side: str, divergence: DivergenceSpec, backend: str) -> None:
    """Where the divergence is finite: as a logit of −2000 in float64, whose probability is 0."""
    case = make_case(num_rows=5, vocab_size=SIZE)
    case = replace(case, ids_N=case.ids_N % 7).to(torch.float32)
    ours, into = run(exclude(case, [9, 20], sides=side), divergence, backend=BACKENDS[backend])
    right = expected(exclude(case, [9, 20], sides=side, logit=-2000.0), divergence)
    off = differences(ours, into, right)
    # KL(π‖q) and entropies: 0·(−2000) there, and the teacher's exclusion makes KL(π‖q) infinite.
    if side == "teacher":
        assert bool((ours.statistics.reverse_kl_N == torch.inf).all())
        del off["reverse_kl_N"]
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("side", "divergence"), [("student", FULL[1]), ("teacher", FULL[0])])
def test_an_infinite_divergence_is_infinite(
    side: str, divergence: DivergenceSpec, backend: str
) -> None:
    """A run stops on it; it would be no gradient to follow."""
    case = make_case(num_rows=5, vocab_size=SIZE)
    case = replace(case, ids_N=case.ids_N % 7).to(torch.float32)
    ours, _ = run(exclude(case, [9, 20], sides=side), divergence, backend=BACKENDS[backend])
    assert ours.divergence is not None
    on_N = case.weight_N > 0
    assert bool((ours.divergence.value_N[on_N] == torch.inf).all())
    assert not ours.divergence.value_N[~on_N].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sampled_token_that_its_teacher_excludes(backend: str) -> None:
    case = make_case(num_rows=5, vocab_size=SIZE)
    case = replace(case, ids_N=torch.full_like(case.ids_N, 9)).to(torch.float32)
    ours, into = run(exclude(case, [9], sides="teacher"), FULL[2], backend=BACKENDS[backend])
    right = expected(exclude(case, [9], sides="teacher", logit=-2000.0), FULL[2])
    assert bool((ours.statistics.teacher_logp_N == -torch.inf).all())
    off = differences(ours, into, right)
    del off["teacher_logp_N"], off["reverse_kl_N"]
    assert max(off.values()) < 2e-5, off


# ── a support of which nothing is left ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of", ["teacher", "student"])
@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jsd"])
def test_a_renormalized_support_that_the_other_side_excludes(
    name: str, of: Any, backend: str
) -> None:
    """Nothing can be compared: the divergence adds nothing to the sampled tokens' gradient."""
    case = make_case(num_rows=5, vocab_size=SIZE)
    case = replace(case, ids_N=case.ids_N % 7)
    other = "student" if of == "teacher" else "teacher"
    case = exclude(exclude(case, [9, 14, 20], sides=of, logit=80.0), [9, 14, 20], sides=other)
    case = case.to(torch.float32)
    support = Support(k=3, of=of, form="renormalized")
    parameters = {"beta": 0.3} if name == "jsd" else {}
    divergence = DivergenceSpec(name=name, parameters=parameters, support=support)
    ours, into = run(case, divergence, backend=BACKENDS[backend])
    plain, plain_head = run(case, None, backend=BACKENDS[backend])
    assert ours.divergence is not None and not ours.divergence.value_N.any()
    mass_N, other_mass_N = ours.divergence.student_mass_N, ours.divergence.teacher_mass_N
    assert mass_N is not None and other_mass_N is not None
    assert not (mass_N if of == "teacher" else other_mass_N).any()
    assert_close(ours.hidden_gradient_ND, plain.hidden_gradient_ND)
    assert_close(into.weight_VD, plain_head.weight_VD)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jsd", "total_variation"])
def test_a_renormalized_loss_leaves_out_just_those_positions(name: str) -> None:
    student_TK = torch.tensor([[-1.0, -2.0], [-torch.inf, -torch.inf], [-2.0, -1.5]])
    teacher_TK = torch.tensor([[-0.5, -2.5], [-0.7, -0.9], [-torch.inf, -torch.inf]])
    student_TK.requires_grad_()
    options = {"beta": 0.3} if name == "jsd" else {}
    value_T = top_k_divergence(
        student_TK, teacher_TK, torch.ones(3, 2, dtype=torch.bool), name=name,
        form="renormalized", **options,
    )  # fmt: skip
    (gradient_TK,) = torch.autograd.grad(value_T.sum(), student_TK)
    alone_1K = student_TK[:1].detach().requires_grad_()
    expected_1 = DivergenceSpec(name=name, parameters=options).value(
        alone_1K.log_softmax(-1), teacher_TK[:1].log_softmax(-1), None
    )
    (right_1K,) = torch.autograd.grad(expected_1.sum(), alone_1K)
    assert float(value_T[0].detach()) == pytest.approx(float(expected_1.detach())) != 0
    assert_close(gradient_TK, torch.cat([right_1K, torch.zeros(2, 2)]))
    assert not value_T[1:].detach().any()
