"""Full-vocabulary divergences against the textbook, token by token; their edges and limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import references as textbook
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import by_position, of_ours
from strategies import logit_pairs
from torch import Tensor
from torch.testing import assert_close

from courtside.losses.divergences import Divergence, divergence_names, find_divergence, register
from courtside.losses.full_vocabulary import divergence, entropy

close = partial(assert_close, rtol=1e-9, atol=1e-12)
CLIPS = st.sampled_from([None, 0.01, 0.3])
SHARES = st.sampled_from([1e-3, 0.1, 0.5, 0.7, 0.99])
INNER = [("reverse_kl", {}), ("forward_kl", {}), ("jsd", {"beta": 0.3}),
         ("skew_forward_kl", {"alpha": 0.2}), ("skew_reverse_kl", {"alpha": 0.2}),
         ("total_variation", {})]  # fmt: skip


def agree(
    ours: Callable[[Tensor, Tensor], Tensor],
    reference: Callable[[list[Tensor], list[Tensor]], Tensor],
    pair: tuple[Tensor, Tensor],
) -> None:
    value_T, gradient_TV = of_ours(ours, *pair)
    expected_T, expected_gradient_TV = by_position(reference, *pair)
    close(value_T, expected_T)
    close(gradient_TV, expected_gradient_TV)


@given(logit_pairs(masks="student_more"), CLIPS)
def test_reverse_kl(pair: tuple[Tensor, Tensor], clip: float | None) -> None:
    agree(
        partial(divergence, name="reverse_kl", clip=clip),
        partial(textbook.reverse_kl, clip=clip),
        pair,
    )


@given(logit_pairs(masks="teacher_more"), CLIPS)
def test_forward_kl(pair: tuple[Tensor, Tensor], clip: float | None) -> None:
    agree(
        partial(divergence, name="forward_kl", clip=clip),
        partial(textbook.forward_kl, clip=clip),
        pair,
    )


@given(logit_pairs(masks="independent"), SHARES, CLIPS)
def test_jsd(pair: tuple[Tensor, Tensor], beta: float, clip: float | None) -> None:
    agree(
        partial(divergence, name="jsd", beta=beta, clip=clip),
        partial(textbook.jsd, beta=beta, clip=clip),
        pair,
    )


@given(logit_pairs(masks="independent"), SHARES, CLIPS)
def test_skew_forward_kl(pair: tuple[Tensor, Tensor], alpha: float, clip: float | None) -> None:
    agree(
        partial(divergence, name="skew_forward_kl", alpha=alpha, clip=clip),
        partial(textbook.skew_forward_kl, alpha=alpha, clip=clip),
        pair,
    )


@given(logit_pairs(masks="independent"), SHARES, CLIPS)
def test_skew_reverse_kl(pair: tuple[Tensor, Tensor], alpha: float, clip: float | None) -> None:
    agree(
        partial(divergence, name="skew_reverse_kl", alpha=alpha, clip=clip),
        partial(textbook.skew_reverse_kl, alpha=alpha, clip=clip),
        pair,
    )


@given(logit_pairs(masks="independent"), CLIPS)
def test_total_variation(pair: tuple[Tensor, Tensor], clip: float | None) -> None:
    agree(
        partial(divergence, name="total_variation", clip=clip),
        partial(textbook.total_variation, clip=clip),
        pair,
    )


@given(logit_pairs(masks="independent"))
def test_entropy(pair: tuple[Tensor, Tensor]) -> None:
    logits_TV = pair[0].requires_grad_()
    ours_T = entropy(logits_TV.log_softmax(-1))
    (gradient_TV,) = torch.autograd.grad(ours_T.sum(), logits_TV)
    expected_T = torch.stack([textbook.entropy(textbook.softmax_by_hand(row)) for row in logits_TV])
    (expected_gradient_TV,) = torch.autograd.grad(expected_T.sum(), logits_TV)
    close(ours_T, expected_T)
    close(gradient_TV, expected_gradient_TV)


@pytest.mark.parametrize(("name", "extra"), INNER)
def test_gradcheck(name: str, extra: dict[str, float]) -> None:
    student_TV = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    teacher_logp_TV = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    assert torch.autograd.gradcheck(
        lambda s: divergence(s.log_softmax(-1), teacher_logp_TV, name=name, **extra), student_TV
    )


@pytest.mark.parametrize(("name", "extra"), INNER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divergence_keeps_dtype_and_is_zero_at_the_teacher(
    name: str, extra: dict[str, float], dtype: torch.dtype
) -> None:
    student_TV, teacher_TV = torch.randn(2, 4, 7, dtype=dtype).log_softmax(-1).unbind()
    value_T = divergence(student_TV, teacher_TV, name=name, **extra)
    assert value_T.dtype == dtype
    assert bool((value_T > 1e-3).all())
    nothing_T = divergence(student_TV, student_TV, name=name, **extra)
    assert_close(nothing_T, torch.zeros(4, dtype=dtype), atol=1e-6, rtol=0)
    clipped_T = divergence(student_TV, teacher_TV, name=name, clip=0.02, **extra)
    assert bool((clipped_T < value_T).all())


# ── tokens of probability zero ────────────────────────────────────────────────────────────────────


def test_infinite_where_the_mathematics_is_infinite() -> None:
    sure = torch.tensor([[1.0, 0.0]], dtype=torch.float64).log()
    unsure = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    assert divergence(unsure, sure, name="reverse_kl").item() == math.inf
    assert divergence(sure, unsure, name="forward_kl").item() == math.inf
    assert divergence(sure, unsure, name="skew_forward_kl", alpha=0.0).item() == math.inf
    close(divergence(sure, unsure, name="reverse_kl").item(), math.log(2))
    disjoint = torch.tensor([[0.0, 1.0]], dtype=torch.float64).log()
    close(divergence(sure, disjoint, name="jsd", beta=0.5).item(), math.log(2))


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_a_capped_infinite_token_gives_the_cap_and_no_gradient(name: str) -> None:
    one_sided = torch.tensor([[1.0, 0.5, -torch.inf]], dtype=torch.float64)
    everywhere = torch.tensor([[0.0, 0.2, 0.4]], dtype=torch.float64)
    pair = (everywhere, one_sided) if name == "reverse_kl" else (one_sided, everywhere)
    reference = getattr(textbook, name)
    agree(partial(divergence, name=name, clip=0.2), partial(reference, clip=0.2), pair)


def test_a_probability_that_underflows_counts_as_zero() -> None:
    student = torch.tensor([[0.0, -2000.0]], dtype=torch.float64)
    teacher = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64)
    for ours in (partial(divergence, name="reverse_kl"), partial(divergence, name="jsd", beta=0.5)):
        value_T, gradient_TV = of_ours(ours, student, teacher)
        close(value_T, torch.zeros(1, dtype=torch.float64))
        close(gradient_TV, torch.zeros(1, 2, dtype=torch.float64))


# ── limits ───────────────────────────────────────────────────────────────────────────────────────


def a_pair() -> tuple[Tensor, Tensor]:
    student_TV, teacher_TV = torch.randn(2, 3, 6, dtype=torch.float64).unbind()
    return student_TV, teacher_TV


def test_jsd_tends_to_forward_and_reverse_kl_and_is_defined_as_them_at_the_ends() -> None:
    pair = a_pair()
    forward_T, forward_gradient_TV = of_ours(partial(divergence, name="forward_kl"), *pair)
    reverse_T, reverse_gradient_TV = of_ours(partial(divergence, name="reverse_kl"), *pair)
    tiny = 1e-6
    near_zero_T, near_zero_gradient_TV = of_ours(partial(divergence, name="jsd", beta=tiny), *pair)
    near_one_T, near_one_gradient_TV = of_ours(
        partial(divergence, name="jsd", beta=1 - tiny), *pair
    )
    loosely = partial(assert_close, rtol=1e-4, atol=1e-5)
    loosely(near_zero_T / tiny, forward_T)
    loosely(near_zero_gradient_TV / tiny, forward_gradient_TV)
    loosely(near_one_T / tiny, reverse_T)
    loosely(near_one_gradient_TV / tiny, reverse_gradient_TV)
    for beta, expected in ((0.0, forward_T), (1.0, reverse_T)):
        close(of_ours(partial(divergence, name="jsd", beta=beta), *pair)[0], expected)
    # The scale jumps at the ends, as documented: D itself vanishes there.
    assert float(near_zero_T.max()) < 1e-4 < 1e-2 < float(forward_T.min())


def test_skewed_forms_are_the_plain_ones_at_zero_and_vanish_quadratically_at_one() -> None:
    student_TV, teacher_TV = a_pair()
    student_p_TV, teacher_p_TV = student_TV.softmax(-1), teacher_TV.softmax(-1)
    for name in ("forward", "reverse"):
        skewed = partial(divergence, name=f"skew_{name}_kl")
        plain_T, plain_gradient_TV = of_ours(
            partial(divergence, name=f"{name}_kl"), student_TV, teacher_TV
        )
        ours_T, gradient_TV = of_ours(partial(skewed, alpha=0.0), student_TV, teacher_TV)
        close(ours_T, plain_T)
        close(gradient_TV, plain_gradient_TV)
        first, second = (
            (teacher_p_TV, student_p_TV) if name == "forward" else (student_p_TV, teacher_p_TV)
        )
        chi_square_T = ((second - first).square() / first).sum(-1)
        near_T = skewed(student_TV.log_softmax(-1), teacher_TV.log_softmax(-1), alpha=1 - 1e-4)
        assert_close(near_T / 1e-8, chi_square_T / 2, rtol=1e-2, atol=0)
        close(of_ours(partial(skewed, alpha=1.0), student_TV, teacher_TV)[0], 0 * plain_T)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "reverse_kl", "beta": 0.5}, "beta"),
        ({"name": "jsd"}, "beta"),
        ({"name": "jsd", "beta": 0.5, "alpha": 0.5}, "alpha"),
        ({"name": "jsd", "beta": 1.5}, "beta = 1.5"),
        ({"name": "skew_forward_kl"}, "alpha"),
        ({"name": "skew_reverse_kl", "alpha": -0.1}, "alpha = -0.1"),
        ({"name": "kl"}, "reverse_kl"),
    ],
)
def test_options_that_do_not_belong_are_refused(arguments: dict[str, float], says: str) -> None:
    logp_TV = torch.zeros(1, 2, dtype=torch.float64).log_softmax(-1)
    with pytest.raises(ValueError, match=says):
        divergence(logp_TV, logp_TV, **arguments)


def test_a_name_is_registered_once_and_an_unknown_one_is_refused() -> None:
    for name in divergence_names():
        assert find_divergence(name).name == name
        register(find_divergence(name))  # the same again, as a second import does
    with pytest.raises(ValueError, match="two divergences are registered as 'jsd'"):
        register(Divergence(name="jsd", terms=find_divergence("jsd").terms))


def test_half_precision_log_probabilities_are_refused() -> None:
    logp_TV = torch.zeros(1, 2, dtype=torch.bfloat16).log_softmax(-1)
    with pytest.raises(AssertionError, match="fp32"):
        divergence(logp_TV, logp_TV, name="reverse_kl")
