"""The fused head's kernels against the same graph: on a GPU, or in Triton's interpreter on a CPU.

The interpreter has to be asked for before Triton is first imported, by whomever.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.linear_divergence_reference import (
    ENDS,
    FULL,
    ON_SUPPORT,
    TOTAL_VARIATION_ON_SUPPORT,
    WITHOUT_CLOSED_FORM,
    Case,
    differences,
    exact_case,
    expected,
    label,
    make_case,
    run_case,
    zero_gradient,
)
from torch.testing import assert_close

import courtside
from courtside.errors import RunError
from courtside.losses.fused.linear_divergence import (
    ChunkPlan,
    choose_backend,
    fused_linear_divergence,
)
from courtside.losses.fused.torch_backend import CLOSED_FORM_GRADIENTS
from courtside.losses.fused.types import (
    CLOSED_FORMS,
    DivergenceSpec,
    Support,
    TopKTarget,
)
from courtside.losses.policy_gradient import SampledTokenLoss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="kernels need Triton: pip install triton")
# `conftest.py` sees to it; a kernel that nobody interprets would be tested by nobody.
assert DEVICE == "cuda" or not isinstance(triton.language.max, triton.runtime.JITFunction)
from courtside.losses.fused import triton_launch  # noqa: E402
from courtside.losses.fused.kernels import FORMS  # noqa: E402
from courtside.losses.fused.topk_kernels import num_select_warps  # noqa: E402
from courtside.losses.fused.triton_backend import TritonVocabularyPass  # noqa: E402
from courtside.losses.fused.triton_launch import Tiling  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*without a tail"),
    # Of tokens past the end of a row, in the interpreter; they are never stored.
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]
EVERY = [
    divergence
    for divergence in (*FULL, *ENDS, *ON_SUPPORT, *TOTAL_VARIATION_ON_SUPPORT)
    if divergence.support is not None or divergence.closed_form is not None
]
SMALL = ChunkPlan(chunk=4, part=3)
TILE = 32 * 4
"""Tokens in a tile of float32 on one warp, the smallest there is."""


def make_pass(**options: Any) -> Any:
    """Small tiles, so that small vocabularies have several."""
    tiling = Tiling(**{"num_warps": 1, **options.pop("tiling", {})})
    return partial(TritonVocabularyPass, tiling=tiling, **options)


run = partial(run_case, plan=SMALL, backend=make_pass())


def small(dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    return make_case(**{"num_rows": 5, **options}).to(dtype, DEVICE)


@pytest.mark.parametrize("divergence", [*EVERY, None], ids=lambda d: label(d) if d else "sampled")
def test_everything_is_what_autograd_gives(divergence: DivergenceSpec | None) -> None:
    case = small(vocab_size=TILE + 37)
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("vocab_size", [2, 3, 64, TILE - 1, TILE, TILE + 1, 2 * TILE, 3 * TILE + 5])
@pytest.mark.parametrize("divergence", [FULL[0], FULL[2], None], ids=str)
def test_vocabularies_that_fill_no_tile_or_several(
    vocab_size: int, divergence: DivergenceSpec | None
) -> None:
    case = small(vocab_size=vocab_size, num_rows=3)
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("head", [{}, {"scale": 1.7, "softcap": 2.0}], ids=["plain", "capped"])
@pytest.mark.parametrize(
    "divergence", [d for d in ON_SUPPORT if d.name == "reverse_kl"] + ON_SUPPORT[::7], ids=label
)
def test_tokens_selected_by_their_groups(divergence: DivergenceSpec, head: dict[str, Any]) -> None:
    """Of a vocabulary that is large enough for it; small ones are sorted."""
    vocab_size = 4 * TILE + 37
    assert divergence.support is not None
    assert num_select_warps(vocab_size, divergence.support.k, least=1, width=4) is not None
    case = small(vocab_size=vocab_size, **head)
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("divergence", [d for d in ON_SUPPORT if d.name == "reverse_kl"], ids=label)
def test_tokens_that_both_sides_have_and_that_were_sampled(divergence: DivergenceSpec) -> None:
    """A teacher that hardly differs, and the student's most likely token as the sampled one."""
    case = small()
    student = case.student
    noise_VD = torch.randn(student.weight_VD.shape, generator=torch.Generator().manual_seed(3))
    teacher = replace(student, weight_VD=student.weight_VD + 0.2 * noise_VD.to(student.weight_VD))
    ids_N = (student.hidden_ND @ student.weight_VD.t()).argmax(-1)
    case = replace(case, teacher=teacher, ids_N=ids_N)
    ours, into = run(case, divergence)
    assert ours.divergence is not None and ours.divergence.overlap_N is not None
    assert 0 < float(ours.divergence.overlap_N.mean()) < 1
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("divergence", [*FULL, ON_SUPPORT[0], ON_SUPPORT[-1], None], ids=str)
@pytest.mark.parametrize(
    "head",
    [
        {"scale": 1.7, "bias": True},
        {"softcap": 2.0, "scale": 0.8},
        {"ranks": (2, 0), "scale": 1.7},
        {"ranks": (3, 2)},
    ],
)
def test_scale_bias_cap_and_adapter(
    divergence: DivergenceSpec | None, head: dict[str, Any]
) -> None:
    case = small(**head)
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("divergence", [*FULL, *ON_SUPPORT[::5], None], ids=str)
def test_from_exact_logits_bfloat16_rounds_only_the_gradients(
    divergence: DivergenceSpec | None,
) -> None:
    case = exact_case(num_rows=6).to(torch.bfloat16, DEVICE)
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert into.weight_VD.dtype == torch.float32
    # Twice what rounding to the nearest leaves: the interpreter cuts the digits off.
    assert max(off["hidden_ND"], off["weight_VD"]) < 6e-3, off
    del off["hidden_ND"], off["weight_VD"], off["bias_V"]
    assert max(off.values()) < 1e-5, off


@pytest.mark.parametrize("divergence", FULL, ids=label)
def test_bfloat16_is_as_close_as_its_logits(divergence: DivergenceSpec) -> None:
    case = small(torch.bfloat16, vocab_size=300, sizes=(16, 24), spread=2.0)
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-2, off


@pytest.mark.parametrize("divergence", [*FULL, None], ids=str)
@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_what_is_common_to_a_row_costs_no_digits(
    divergence: DivergenceSpec | None, shift: float
) -> None:
    case = exact_case(num_rows=4, vocab_size=TILE + 9)
    student = replace(case.student, hidden_ND=case.student.hidden_ND + shift)
    teacher = replace(case.teacher, hidden_ND=case.teacher.hidden_ND - shift)
    ones_N = torch.ones_like(case.temperature_N)
    case = replace(case, student=student, teacher=teacher, temperature_N=ones_N)
    case = case.to(torch.float32, DEVICE)
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("divergence", [*FULL, None], ids=str)
def test_logits_of_ten_thousand_and_far_apart_stay_finite(
    divergence: DivergenceSpec | None,
) -> None:
    case = small(vocab_size=TILE + 9, spread=1e4)
    ours, into = run(case, divergence)
    for values in (ours.hidden_gradient_ND, into.weight_VD, ours.statistics.student_logp_N,
                  ours.statistics.student_entropy_N, ours.statistics.reverse_kl_N):  # fmt: skip
        assert values is not None and bool(values.isfinite().all())


@pytest.mark.parametrize("divergence", [*FULL, *ON_SUPPORT[::5]], ids=label)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_teacher_of_nan_without_weight_does_not_leak(
    divergence: DivergenceSpec, sampled: bool
) -> None:
    case = small()
    right, right_head = run(case, divergence, sampled=sampled)
    off_N = case.weight_N == 0
    case.teacher.hidden_ND[off_N] = torch.nan
    ours, head = run(case, divergence, sampled=sampled)
    assert bool(ours.statistics.teacher_logp_N[off_N].isnan().all())
    assert ours.divergence is not None and right.divergence is not None
    # Where the sampled token is on the support, it is rounded in another place: no exact equality.
    close = partial(assert_close, rtol=1e-5, atol=1e-7)
    close(ours.divergence.value_N, right.divergence.value_N)
    close(ours.hidden_gradient_ND, right.hidden_gradient_ND)
    close(head.weight_VD, right_head.weight_VD)
    if not sampled:
        assert not ours.hidden_gradient_ND[off_N].any()


@pytest.mark.parametrize("divergence", [FULL[0], FULL[2], ON_SUPPORT[0]], ids=label)
def test_a_teacher_of_nan_with_weight_gives_nan(divergence: DivergenceSpec) -> None:
    case = small()
    case.teacher.hidden_ND[0] = torch.nan
    ours, _ = run(case, divergence)
    assert ours.divergence is not None
    assert bool(ours.divergence.value_N[0].isnan()) and bool(
        ours.hidden_gradient_ND[0].isnan().all()
    )
    assert bool(ours.hidden_gradient_ND[1:].isfinite().all())


@pytest.mark.parametrize("divergence", [FULL[0], FULL[4], ON_SUPPORT[-1], None], ids=str)
@pytest.mark.parametrize("plan", [ChunkPlan(chunk=1, part=1), ChunkPlan(chunk=9, part=9)], ids=str)
def test_chunks_do_not_change_anything(divergence: DivergenceSpec | None, plan: ChunkPlan) -> None:
    case = small(vocab_size=TILE + 5)
    whole, whole_head = run(case, divergence)
    ours, head = run(case, divergence, plan=plan)
    assert_close(ours.hidden_gradient_ND, whole.hidden_gradient_ND, rtol=1e-5, atol=1e-7)
    assert_close(head.weight_VD, whole_head.weight_VD, rtol=1e-5, atol=1e-7)
    assert_close(ours.statistics.reverse_kl_N, whole.statistics.reverse_kl_N)


@pytest.mark.parametrize("divergence", [None, FULL[1], FULL[3], ON_SUPPORT[0]], ids=str)
def test_a_coefficient_may_depend_on_the_statistics(divergence: DivergenceSpec | None) -> None:
    """The statistics run, then the gradient run: an importance ratio and a baseline."""
    case = small()
    rows = len(case.ids_N)
    loss = SampledTokenLoss(
        weight_N=torch.full_like(case.coefficient_N, 1 / 7),
        advantage_N=case.coefficient_N,
        sampler_logp_N=torch.full_like(case.coefficient_N, -2.5),
        baseline=True,
    )
    spec = replace(case.spec(divergence), sampled=(loss,))
    ours = fused_linear_divergence(
        case.student, case.teacher, spec, plan=SMALL, backend=make_pass()
    )
    plain = expected(case, None)
    advantage_N = case.coefficient_N.double().cpu() + plain.reverse_kl_N
    fixed_N = -(plain.student_logp_N + 2.5).exp() * advantage_N / 7
    assert fixed_N.shape == (rows,)
    right = expected(replace(case, coefficient_N=fixed_N), divergence)
    assert_close(ours.hidden_gradient_ND.double().cpu(), right.hidden_ND, rtol=1e-4, atol=1e-6)


def test_there_is_a_kernel_for_every_closed_form_and_torch_for_the_others() -> None:
    assert {*CLOSED_FORMS} == FORMS.keys() == CLOSED_FORM_GRADIENTS.keys()
    if DEVICE == "cuda":
        weight_VD = torch.empty(2, 2, device=DEVICE)
        assert choose_backend(weight_VD, FULL[0]) == "triton"
        assert choose_backend(weight_VD, TOTAL_VARIATION_ON_SUPPORT[0]) == "triton"
        for divergence in WITHOUT_CLOSED_FORM:
            assert choose_backend(weight_VD, divergence) == "torch"


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("head", [{}, {"scale": 1.7, "softcap": 2.0}], ids=["plain", "capped"])
@pytest.mark.parametrize(
    "divergence",
    [d for d in (*ON_SUPPORT, *TOTAL_VARIATION_ON_SUPPORT) if d.support.of == "teacher"],
    ids=label,
)
def test_a_teacher_of_which_only_the_top_k_are_known(
    divergence: DivergenceSpec, head: dict[str, Any], with_kernels: bool
) -> None:
    case = small(vocab_size=4 * TILE + 37, **head)
    vocab_size, teacher = len(case.student.weight_VD), case.teacher
    logits_NV = teacher.hidden_ND.double() @ teacher.weight_VD[:vocab_size].double().t()
    logits_NV = logits_NV * teacher.scale
    if teacher.softcap is not None:
        logits_NV = teacher.softcap * torch.tanh(logits_NV / teacher.softcap)
    top = (logits_NV / case.temperature_N[:, None]).log_softmax(-1).topk(5, dim=-1)
    target = TopKTarget(ids_NK=top.indices, logp_NK=top.values.float())
    into = zero_gradient(case)
    ours = fused_linear_divergence(
        case.student, target, case.spec(divergence), head_gradient=into, plan=SMALL,
        backend=make_pass(top_k_kernels=with_kernels),
    )  # fmt: skip
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-5, off
    right, _ = run(case, divergence)
    assert ours.divergence is not None and right.divergence is not None
    assert_close(ours.divergence.overlap_N, right.divergence.overlap_N)
    assert_close(ours.divergence.teacher_mass_N, right.divergence.teacher_mass_N)


@pytest.mark.parametrize("divergence", ON_SUPPORT[::3], ids=label)
def test_a_support_without_its_kernels(divergence: DivergenceSpec) -> None:
    case = small(vocab_size=4 * TILE + 37)
    ours, into = run(case, divergence, backend=make_pass(top_k_kernels=False))
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-5, off


def test_without_a_teacher_only_the_sampled_tokens_count() -> None:
    case = small()
    into = zero_gradient(case)
    ours = fused_linear_divergence(
        case.student, None, case.spec(None), head_gradient=into, plan=SMALL, backend=make_pass()
    )
    off = differences(ours, into, expected(case, None))
    assert max(off.values()) < 2e-5 and ours.divergence is None
    assert ours.statistics.teacher_logp_N is ours.statistics.reverse_kl_N is None


def test_no_rows() -> None:
    ours, into = run(make_case(num_rows=0).to(torch.float32, DEVICE), FULL[0])
    assert ours.hidden_gradient_ND.shape == (0, 5) and not into.weight_VD.any()


def test_a_token_outside_the_vocabulary_is_nan_and_loads_nothing() -> None:
    case = small()
    case.ids_N[0] = 23
    ours, _ = run(case, FULL[0], sampled=False)
    assert bool(ours.statistics.student_logp_N[0].isnan())
    assert bool(ours.hidden_gradient_ND.isfinite().all())


@pytest.mark.parametrize("tiling", [{"num_warps": 2}, {"lanes_per_thread": 2}], ids=str)
def test_tilings_do_not_change_anything(tiling: dict[str, int]) -> None:
    case = small(vocab_size=3 * TILE + 5)
    ours, into = run(case, FULL[0], backend=make_pass(tiling=tiling))
    off = differences(ours, into, expected(case, FULL[0]))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("divergence", ON_SUPPORT[::4], ids=label)
def test_a_support_out_of_many_tokens(divergence: DivergenceSpec) -> None:
    """So many that the most likely are found by the kernels, too."""
    case = small(vocab_size=4 * TILE + 90, num_rows=4)
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("of", ["teacher", "student", "joint"])
def test_a_support_of_every_token(of: Any) -> None:
    """Of a joint one each token is listed twice, and counts once."""
    case = small(vocab_size=6)
    on = Support(k=6, of=of, form="renormalized")
    ours, into = run(case, DivergenceSpec(name="reverse_kl", support=on))
    off = differences(ours, into, expected(case, FULL[0]))
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("error", [RuntimeError, OSError, triton.errors.TritonError])
def test_a_kernel_that_cannot_run_is_an_error(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never goes another way in silence."""

    class Broken:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def start(*args: Any, **options: Any) -> None:
                raise error("no such target")

            return start

    monkeypatch.setattr(triton_launch, "vocabulary_kernel", Broken())
    with pytest.raises(RunError, match=r"could not be compiled.*no such target.*C compiler"):
        run(small(), FULL[0])


def test_it_compiles_for_a_gpu_without_spilling(tmp_path: Path) -> None:
    """In a process of its own: this one may have the interpreter in place of the compiler."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(courtside.__file__).parents[1])
    script = Path(__file__).with_name("compile_kernels.py")
    values = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert values.returncode == 0, values.stdout + values.stderr
