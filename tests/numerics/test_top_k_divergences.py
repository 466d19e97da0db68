"""Divergences on k tokens: the support itself, each form against the textbook, the edges."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import references as textbook
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import by_position, of_ours
from strategies import logit_pairs
from support.top_k_supports import overlap
from torch import Tensor
from torch.testing import assert_close

from courtside.losses import top_k
from courtside.losses.full_vocabulary import divergence
from courtside.losses.top_k import support_mass, top_k_divergence, top_k_ids

close = partial(assert_close, rtol=1e-8, atol=1e-11)
OPTIONS = [("reverse_kl", {}), ("forward_kl", {}), ("jsd", {"beta": 0.3}),
           ("skew_forward_kl", {"alpha": 0.2}), ("skew_reverse_kl", {"alpha": 0.2}),
           ("total_variation", {})]  # fmt: skip
OF = ("teacher", "student", "joint")
pytestmark = pytest.mark.filterwarnings("ignore:.*without a tail")


def on_support(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, k: int, of: str, form: str, **options: Any
) -> Tensor:
    ids_TK, keep_TK = top_k_ids(student_logp_TV, teacher_logp_TV, k=k, of=of)
    return top_k_divergence(
        student_logp_TV.gather(-1, ids_TK), teacher_logp_TV.gather(-1, ids_TK), keep_TK,
        form=form, **options,
    )  # fmt: skip


def support_by_hand(student: list[Tensor], teacher: list[Tensor], k: int, of: str) -> list[int]:
    def best(p: list[Tensor]) -> list[int]:
        return sorted(range(len(p)), key=lambda v: -textbook.number(p[v]))[:k]

    supports = {"teacher": best(teacher), "student": best(student)}
    return sorted({*supports["teacher"], *supports["student"]} if of == "joint" else supports[of])


def reference(
    student: list[Tensor], teacher: list[Tensor], *, k: int, of: str, form: str, name: str,
    **options: float | None,
) -> Tensor:  # fmt: skip
    support = support_by_hand(student, teacher, k, of)
    if form == "stop_gradient" and name == "reverse_kl":
        terms = []
        for v in support:
            p, q = student[v], teacher[v]
            # The value of p·log(p/q); the gradient of p alone, times the constant log(p/q).
            terms.append(p * textbook.number(torch.log(p / q)))
        return textbook.capped_sum(terms, options.get("clip"))
    if form == "tail":
        student, teacher = (textbook.bucketed(p, support) for p in (student, teacher))
    elif form == "renormalized":
        student, teacher = (textbook.renormalized(p, support) for p in (student, teacher))
    else:
        student, teacher = ([p[v] for v in support] for p in (student, teacher))
    return getattr(textbook, name)(student, teacher, **options)


def forms_of(name: str) -> tuple[str, ...]:
    plain = name in ("reverse_kl", "forward_kl")
    return ("tail", "renormalized", "stop_gradient", "naive") if plain else ("tail", "renormalized")


@pytest.mark.parametrize(
    ("name", "options", "form"), [(n, o, f) for n, o in OPTIONS for f in forms_of(n)]
)
@settings(max_examples=25)
@given(data=st.data())
def test_every_form_is_its_textbook_formula(
    name: str, options: dict[str, float], form: str, data: st.DataObject
) -> None:
    of = data.draw(st.sampled_from(OF))
    pair = data.draw(logit_pairs(max_scale=1.0))
    k = data.draw(st.integers(1, pair[0].shape[-1]))
    clip = data.draw(st.sampled_from([None, 0.02]))
    if form == "tail" and k == pair[0].shape[-1]:
        return  # An empty tail has no gradient to compare: see the test of the whole vocabulary.
    arguments = dict(k=k, of=of, form=form, name=name, clip=clip, **options)
    value_T, gradient_TV = of_ours(partial(on_support, **arguments), *pair)
    expected_T, expected_gradient_TV = by_position(partial(reference, **arguments), *pair)
    close(value_T, expected_T)
    close(gradient_TV, expected_gradient_TV)


@settings(max_examples=10)
@given(logit_pairs(max_scale=5.0), st.sampled_from(OF))
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_support_of_the_whole_vocabulary_gives_the_full_divergence(
    name: str, options: dict[str, float], pair: tuple[Tensor, Tensor], of: str
) -> None:
    expected_T, expected_gradient_TV = of_ours(partial(divergence, name=name, **options), *pair)
    for form in forms_of(name):
        ours = partial(on_support, k=pair[0].shape[-1], of=of, form=form, name=name, **options)
        value_T, gradient_TV = of_ours(ours, *pair)
        assert_close(value_T, expected_T, rtol=1e-9, atol=1e-11)
        # The empty tail leaves a gradient of rounding size.
        assert_close(gradient_TV, expected_gradient_TV, rtol=1e-6, atol=1e-9)


def test_tail_against_gradcheck() -> None:
    student_TV = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    teacher_TV = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    for name, options in OPTIONS:
        ours = partial(on_support, k=2, of="teacher", form="tail", name=name, **options)
        assert torch.autograd.gradcheck(
            lambda logits_TV, f=ours: f(logits_TV.log_softmax(-1), teacher_TV), student_TV
        )


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_thin_tail_is_not_rounded_away(name: str, options: dict[str, float]) -> None:
    """Tails of 6e-6 and 3e-4: far below what the support holds, far above the floor."""
    student_TV = torch.tensor([[6.0, 5.0, -6.0, -7.0]], dtype=torch.float64)
    teacher_TV = torch.tensor([[5.0, 5.5, -2.5, -4.0]], dtype=torch.float64)
    arguments = dict(k=2, of="teacher", form="tail", name=name, **options)
    value_T, gradient_TV = of_ours(partial(on_support, **arguments), student_TV, teacher_TV)
    expected_T, expected_gradient_TV = by_position(
        partial(reference, **arguments), student_TV, teacher_TV
    )
    close(value_T, expected_T)
    assert_close(gradient_TV, expected_gradient_TV, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("of", OF)
def test_tail_stays_finite_and_useful_where_one_side_is_certain(
    name: str, dtype: torch.dtype, of: str
) -> None:
    certain = torch.tensor([80.0, 0.0, -1.0, 0.5, 0.0], dtype=dtype)
    elsewhere = torch.tensor([0.0, 80.0, -1.0, 0.5, -torch.inf], dtype=dtype)
    vague = torch.tensor([0.0, 0.3, -1.0, 0.5, 0.0], dtype=dtype)
    options = {"beta": 0.5} if name == "jsd" else {}
    rows = [(certain, certain), (certain, vague), (vague, certain), (certain, elsewhere)]
    for student_V, teacher_V in rows:
        ours = partial(on_support, k=2, of=of, form="tail", name=name, **options)
        value_T, gradient_TV = of_ours(ours, student_V[None], teacher_V[None])
        assert value_T.dtype == dtype
        assert bool(value_T.isfinite().all()) and bool(gradient_TV.isfinite().all())
        assert float(value_T) > -1e-5
        assert float(gradient_TV.abs().max()) < 60  # Nothing like 1/epsilon.
        if student_V is teacher_V:
            assert_close(value_T, torch.zeros(1, dtype=dtype), atol=1e-5, rtol=0)


def test_a_student_certain_of_tokens_the_teacher_lacks_is_still_moved_by_the_tail() -> None:
    """Below the floor of the tail the gradient goes on, so that the forward KL is not stuck."""
    student_TV = torch.tensor([[40.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    teacher_TV = torch.tensor([[0.0, 0.0, 9.0, 9.0]], dtype=torch.float64)
    ours = partial(on_support, k=1, of="student", form="tail", name="forward_kl")
    _, gradient_TV = of_ours(ours, student_TV, teacher_TV)
    assert float(gradient_TV[0, 1:].max()) < 0


@given(logit_pairs(masks="independent"), st.data())
def test_masked_tokens_never_give_nan(pair: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, pair[0].shape[-1]))
    of = data.draw(st.sampled_from(OF))
    name, options = data.draw(st.sampled_from(OPTIONS[2:]))
    ours = partial(on_support, k=k, of=of, form="tail", name=name, **options)
    value_T, gradient_TV = of_ours(ours, *pair)
    assert bool(value_T.isfinite().all()) and bool(gradient_TV.isfinite().all())


# ── the support ──────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30)
@given(logit_pairs(max_vocab_size=9), st.data())
def test_support_overlap_and_mass_by_hand(pair: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    student_TV, teacher_TV = (logits.log_softmax(-1) for logits in pair)
    k = data.draw(st.integers(1, student_TV.shape[-1]))
    share_T = overlap(student_TV, teacher_TV, k)
    for of in OF:
        ids_TK, keep_TK = top_k_ids(student_TV, teacher_TV, k=k, of=of)
        assert ids_TK.shape == keep_TK.shape == (len(student_TV), 2 * k if of == "joint" else k)
        mass_T = support_mass(student_TV.gather(-1, ids_TK), keep_TK)
        for t in range(len(student_TV)):
            student, teacher = (textbook.softmax_by_hand(x[t]) for x in pair)
            expected = support_by_hand(student, teacher, k, of)
            assert sorted(ids_TK[t][keep_TK[t]].tolist()) == expected
            close(mass_T[t], torch.stack([student[v] for v in expected]).sum())
            both = {*support_by_hand(student, teacher, k, "student")} & {
                *support_by_hand(student, teacher, k, "teacher")
            }
            close(share_T[t].item(), len(both) / k)


def test_the_naive_bias_shows_in_the_masses_on_the_support() -> None:
    teacher_TK = torch.tensor([[0.5, 0.3, 0.9]], dtype=torch.float64).log()
    keep_TK = torch.tensor([[True, True, False]])
    ratio_T = support_mass(teacher_TK - 1, keep_TK) / support_mass(teacher_TK, keep_TK)
    close(ratio_T, torch.tensor([1 / math.e], dtype=torch.float64))


# ── warnings and refusals ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "form", "says"),
    [
        ("reverse_kl", "naive", r"\+1 per token .* 1/e of the teacher's mass"),
        ("forward_kl", "naive", "renormalized"),
        ("forward_kl", "stop_gradient", "renormalized"),
    ],
)
def test_forms_with_a_wrong_fixed_point_warn_once_with_the_reason(
    name: str, form: str, says: str
) -> None:
    top_k._warn_of_bias.cache_clear()
    logp_TV = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    ours = partial(on_support, logp_TV, logp_TV, k=2, of="teacher", form=form, name=name)
    with pytest.warns(UserWarning, match=says):
        ours()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours()
        for right in ("tail", "renormalized"):
            on_support(logp_TV, logp_TV, k=2, of="teacher", form=right, name=name)
        on_support(logp_TV, logp_TV, k=2, of="teacher", form="stop_gradient", name="reverse_kl")


@pytest.mark.parametrize("form", ["stop_gradient", "naive"])
@pytest.mark.parametrize(("name", "options"), OPTIONS[2:])
def test_mixtures_are_refused_without_a_tail(
    name: str, options: dict[str, float], form: str
) -> None:
    logp_TV = torch.zeros(1, 3, dtype=torch.float64).log_softmax(-1)
    with pytest.raises(ValueError, match=f"{form}.*tail"):
        on_support(logp_TV, logp_TV, k=2, of="teacher", form=form, name=name, **options)


def test_unknown_forms_supports_and_too_large_k_are_refused() -> None:
    logp_TV = torch.zeros(1, 3, dtype=torch.float64).log_softmax(-1)
    ours = partial(on_support, logp_TV, logp_TV, name="reverse_kl")
    with pytest.raises(ValueError, match="bucket"):
        ours(k=2, of="teacher", form="bucket")
    with pytest.raises(ValueError, match="both"):
        ours(k=2, of="both", form="tail")
    with pytest.raises(ValueError, match="3 tokens"):
        ours(k=4, of="teacher", form="tail")
