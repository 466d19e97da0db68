"""The training head against one whole graph in float64: gradients, values and metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from support.linear_divergence_reference import divergence_by_hand
from torch import Tensor, nn
from torch.testing import assert_close

from courtside.engines.lm_head import LMHead
from courtside.losses.fused.types import DivergenceSpec, Support
from courtside.recipe.losses import Loss
from courtside.training.head import backward_through_head
from courtside.training.loss_terms import LossTerm, divergence_spec
from courtside.training.metrics import MetricAccumulator, record_losses
from courtside.training.token_batch import TokenBatch

N, VOCAB_SIZE = 11, 29
ALL, FIRST, LAST, SOME = [1.0] * N, [1.0] * 6 + [0.0] * 5, [0.0] * 6 + [1.0] * 5, [0.5, 0, 2] * 4
KL = {"kind": "divergence"}
TOP_K = {**KL, "support": {"kind": "top_k", "k": 4, "of": "joint"}}
GAP = {"kind": "policy_gradient"}
REWARD = {"kind": "policy_gradient", "advantage": "reward", "ratio": "none"}
MIXES: dict[str, list[tuple[dict[str, Any], list[float]]]] = {
    "reverse KL": [(KL, ALL)],
    "by turn": [({**KL, "weight": 0.3}, SOME[:N])],
    "JSD": [({**KL, "divergence": "jsd", "beta": 0.4}, ALL)],
    "skewed": [({**KL, "divergence": "skew_forward_kl", "alpha": 0.1}, ALL)],
    "top k": [(TOP_K, ALL)],
    "top k, capped": [({**TOP_K, "clip": 0.05}, FIRST)],
    "against the reference": [({**KL, "against": "reference"}, ALL)],
    "two, each on its own": [(KL, FIRST), ({**TOP_K, "name": "b", "against": "reference"}, LAST)],
    "with cross-entropy": [(KL, FIRST), ({"kind": "cross_entropy", "weight": 0.1}, ALL)],
    "sampled tokens only": [({"kind": "cross_entropy"}, LAST), (REWARD, ALL)],
    "importance ratios": [({**GAP, "truncate": 1.1}, ALL), (KL, FIRST)],
    "gated ratios": [({**GAP, "ratio_gate": (0.6, 1.8)}, ALL), (KL, LAST)],
    "clipped": [({**GAP, "clip": (0.1, 0.1)}, ALL)],
    "clip-higher, dual clip": [
        ({**REWARD, "ratio": "importance", "clip": (0.1, 0.3), "dual_clip": 1.2}, ALL),
        (KL, FIRST),
    ],
    "gated": [
        ({**KL, "gate": {"temperature": 0.7}}, ALL),
        ({**GAP, "gate": {"temperature": 2.0, "direction": "rejected"}}, FIRST),
        ({"kind": "cross_entropy"}, LAST),
    ],
    "unlikely tokens": [({**GAP, "advantage": "unlikely", "unlikely_below": 0.2}, ALL)],
    "baseline": [({**GAP, "baseline": True}, ALL)],
    "baseline on some": [({**GAP, "baseline": True}, FIRST), (REWARD | {"name": "b"}, LAST)],
    "baseline beside a divergence": [({**GAP, "baseline": True}, ALL), (TOP_K, FIRST)],
    "preference": [({"kind": "preference"}, ALL)],
    "contrast of two hints": [
        ({**GAP, "advantage": "hint_contrast", "weight": 0.5}, ALL),
        ({**GAP, "name": "b"}, FIRST),
    ],
    "contrasted target": [
        ({**KL, "contrast": 0.8}, FIRST),
        ({**KL, "name": "b"}, LAST),
        ({**GAP}, ALL),
    ],
    "contrasted JSD": [({**KL, "divergence": "jsd", "beta": 0.4, "contrast": 2.0}, ALL)],
}
NOT_MIXES: dict[str, list[tuple[dict[str, Any], list[float]]]] = {
    "a cap on all tokens": [({**KL, "clip": 0.1}, ALL)],
    "extrapolated": [({**KL, "extrapolate": 1.5}, ALL)],
    "entropy-aware": [({**KL, "entropy_aware": {"threshold": 1.0}}, ALL)],
    "two on one position": [(KL, ALL), ({**KL, "name": "b", "divergence": "forward_kl"}, LAST)],
    "extrapolated, entropy-aware": [
        ({**KL, "extrapolate": 0.6, "entropy_aware": {"threshold": 2.5}}, SOME[:N])
    ],
    "extrapolated with cross-entropy": [
        ({**KL, "extrapolate": 1.5}, FIRST), ({"kind": "cross_entropy"}, ALL)
    ],
    "three on one position": [
        (KL, ALL), ({**TOP_K, "name": "b"}, FIRST),
        ({**KL, "name": "c", "against": "reference", "clip": 0.2}, SOME[:N]),
        ({**GAP, "truncate": 1.1}, LAST),
    ],
    "gated, capped": [({**KL, "clip": 0.1, "gate": {"direction": "rejected"}}, SOME[:N])],
    "contrasted, entropy-aware": [
        ({**KL, "contrast": 0.5, "entropy_aware": {"threshold": 2.5}}, ALL), ({**GAP}, LAST)
    ],
    "baseline where the reference is": [
        ({**GAP, "baseline": True}, ALL), ({**KL, "against": "reference"}, LAST)
    ],
}  # fmt: skip


def make_terms(losses: list[tuple[dict[str, Any], list[float]]]) -> list[LossTerm]:
    parts = []
    for options, weights in losses:
        loss = TypeAdapter(Loss).validate_python(options)
        parts.append(
            LossTerm(
                name=loss.name or loss.kind,
                loss=loss,
                weight={"t": tuple(weights)},
                denominator=7,
                advantage={},
            )
        )
    return parts


def make_head(size: int, seed: int, **options: Any) -> LMHead:
    torch.manual_seed(seed)
    module = nn.Linear(size, VOCAB_SIZE + 2, bias=bool(options.get("softcap"))).double()
    return LMHead(module, vocab_size=VOCAB_SIZE, **{"softcap": None, "scale": 1.0, **options})


def make_batch(terms: list[LossTerm], **options: Any) -> TokenBatch:
    torch.manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    teacher_logp_N = -normal(N).abs() - 1
    teacher_logp_N[2] = math.nan if options.pop("silent", False) else -1.0
    return TokenBatch(
        hidden_ND=normal(N, 5),
        ids_N=torch.randint(VOCAB_SIZE, (N,)),
        temperature_N=torch.rand(N, dtype=torch.float64) + 0.7,
        sampler_logp_N=-normal(N).abs() - 2.5,
        by_student_N=torch.arange(N) % 3 != 0,
        teacher_logp_N=teacher_logp_N,
        reference_logp_N=-normal(N).abs() - 1,
        teacher_hidden_ND=normal(N, 7),
        reference_hidden_ND=normal(N, 5),
        weight_CN={c.name: torch.tensor(c.weight["t"], dtype=torch.float64) for c in terms},
        advantage_CN={c.name: normal(N) for c in terms},
        teacher_head=make_head(7, 1, **options),
        reference_head=make_head(5, 2, **options),
        wrong_logp_N=-normal(N).abs() - 1,
        wrong_hidden_ND=normal(N, 7),
    )


def run(losses: list[tuple[dict[str, Any], list[float]]], **options: Any) -> dict[str, Any]:
    terms = make_terms(losses)
    batch = make_batch(terms, **options)
    options.pop("silent", None)
    head = make_head(5, 0, **options)
    metrics = MetricAccumulator()
    gradient_ND, logp_N, losses = backward_through_head(batch, head, terms, chunk=4)
    record_losses(losses, metrics)
    return {
        "hidden": gradient_ND,
        "logp": logp_N,
        "head": head.module.weight.grad,
        "bias": None if head.module.bias is None else head.module.bias.grad,
        "values": metrics.losses,
        "metrics": metrics.means(),
    }


# ── the reference: one graph over whole distributions ────────────────────────────────────────────


def naive(losses: list[tuple[dict[str, Any], list[float]]], **options: Any) -> dict[str, Any]:
    terms = make_terms(losses)
    batch = make_batch(terms, **options)
    options.pop("silent", None)
    head = make_head(5, 0, **options)
    hidden_ND = batch.hidden_ND.requires_grad_()

    def log_probs(module: LMHead, states_ND: Tensor | None) -> Tensor:
        assert states_ND is not None
        return (module(states_ND) / batch.temperature_N[:, None]).log_softmax(-1)

    p_NV = log_probs(head, hidden_ND)
    q_NV = log_probs(batch.teacher_head, batch.teacher_hidden_ND).detach()
    ref_NV = log_probs(batch.reference_head, batch.reference_hidden_ND).detach()
    wrong_NV = log_probs(batch.teacher_head, batch.wrong_hidden_ND).detach()
    logp_N = p_NV.gather(-1, batch.ids_N[:, None])[:, 0]
    kl_N, entropy_N, teacher_entropy_N = (
        x.sum(-1).detach() for x in (p_NV.exp() * (p_NV - q_NV), -p_NV.exp() * p_NV,
                                     -q_NV.exp() * q_NV)
    )  # fmt: skip
    total, values, watched = p_NV.sum() * 0, {}, {}
    compared_N = torch.zeros(N, dtype=torch.bool)
    for term in terms:
        loss, weight_N = term.loss, batch.weight_CN[term.name]
        on_N = weight_N > 0
        if getattr(loss, "gate", None) is not None:
            sign = {"endorsed": 1, "rejected": -1}[loss.gate.direction]
            gap_N = (batch.teacher_logp_N - batch.sampler_logp_N) / loss.gate.temperature
            gate_N = 1 / (1 + (-sign * gap_N).exp())
            weight_N = weight_N * gate_N
            watched[f"{term.name}/gate"] = [gate_N[on_N]]
        ratio_N = (logp_N - batch.sampler_logp_N).exp()
        if loss.kind == "divergence":
            target_NV = ref_NV if loss.against == "reference" else q_NV
            compared_N |= on_N & (loss.against == "teacher")
            if loss.extrapolate != 1:
                lam = loss.extrapolate
                target_NV = (lam * q_NV + (1 - lam) * ref_NV).log_softmax(-1)
            if loss.contrast is not None:
                log_ratio_NV = q_NV - wrong_NV
                target_NV = (q_NV + loss.contrast * log_ratio_NV).log_softmax(-1)
            p_MV, t_MV = p_NV[on_N], target_NV[on_N]
            loss_M = divergence_by_hand(p_MV, t_MV, spec_of(loss))
            if loss.entropy_aware is not None:
                sure_M = -(t_MV.exp() * t_MV).sum(-1) <= loss.entropy_aware.threshold
                forward_M = (t_MV.exp() * (t_MV - p_MV)).sum(-1).masked_fill(sure_M, 0.0)
                loss_M = loss_M + loss.entropy_aware.weight * forward_M
            if loss.support.kind == "top_k":
                add_support(watched, p_MV.detach(), t_MV, loss.support)
        elif loss.kind == "policy_gradient":
            advantage_N = batch.advantage_CN.get(term.name)
            if loss.advantage == "unlikely":
                advantage_N = -(batch.sampler_logp_N.exp() < loss.unlikely_below).to(logp_N.dtype)
            if loss.advantage == "hint_contrast":
                advantage_N = batch.teacher_logp_N - batch.wrong_logp_N
            if loss.advantage == "teacher_gap":
                advantage_N = (batch.teacher_logp_N - batch.sampler_logp_N).nan_to_num()
                advantage_N = advantage_N + (kl_N if loss.baseline else 0)
                compared_N |= on_N & loss.baseline
            if loss.ratio == "none":
                loss_N = -advantage_N * logp_N
            elif loss.clip is not None:
                clipped_N = ratio_N.clamp(1 - loss.clip[0], 1 + loss.clip[1])
                surrogate_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
                if loss.dual_clip is not None:
                    bound_N = loss.dual_clip * advantage_N
                    is_bounded_N = (advantage_N < 0) & (surrogate_N < bound_N)
                    assert is_bounded_N.any(), "a bound that acts"
                    surrogate_N = torch.where(is_bounded_N, bound_N, surrogate_N)
                loss_N = -surrogate_N
            else:
                ratio_N = ratio_N.detach().clamp(max=loss.truncate or math.inf)
                if loss.ratio_gate is not None:
                    is_inside_N = (ratio_N > loss.ratio_gate[0]) & (ratio_N < loss.ratio_gate[1])
                    assert is_inside_N.any() and not is_inside_N.all(), "a gate that acts"
                    ratio_N = ratio_N * is_inside_N
                loss_N = -ratio_N * advantage_N * logp_N
            loss_M = loss_N[on_N]
        elif loss.kind == "preference":
            loss_M = (batch.advantage_CN[term.name] * logp_N)[on_N]
        else:
            loss_M = -logp_N[on_N]
        mean = (loss_M * weight_N[on_N]).sum() / term.denominator
        total = total + loss.weight * mean
        if loss.kind != "preference":
            values[term.name] = float(mean.detach())
    total.backward()
    if bool(compared_N.any()):
        for name, x_N in (("kl", kl_N), ("entropy/student", entropy_N),
                          ("entropy/teacher", teacher_entropy_N)):  # fmt: skip
            watched[name] = [x_N[compared_N]]
    has_teacher_N = ~batch.teacher_logp_N.isnan()
    ours_N = batch.by_student_N
    gap_N, drift_N = batch.teacher_logp_N - logp_N.detach(), logp_N.detach() - batch.sampler_logp_N
    watched["kl_estimate"] = [(batch.sampler_logp_N - batch.teacher_logp_N)[ours_N & has_teacher_N]]
    watched["kl_estimate/reference"] = [(batch.sampler_logp_N - batch.reference_logp_N)[ours_N]]
    watched["teacher_gap/mean"] = [gap_N[has_teacher_N]]
    watched["teacher_gap/negative"] = [(gap_N[has_teacher_N] < 0).double()]
    watched["sampler/logp_diff"] = [drift_N[ours_N].abs()]
    metrics = {name: float(torch.cat(parts).mean()) for name, parts in watched.items()}
    metrics["sampler/ratio_max"] = float(drift_N[ours_N].exp().max())
    return {
        "hidden": hidden_ND.grad,
        "logp": logp_N.detach(),
        "head": head.module.weight.grad,
        "bias": None if head.module.bias is None else head.module.bias.grad,
        "values": values,
        "metrics": metrics,
    }


def spec_of(loss: Any) -> DivergenceSpec:
    options = {"beta": loss.beta, "alpha": loss.alpha}
    parameters = {name: value for name, value in options.items() if value is not None}
    on = loss.support
    support = Support(k=on.k, of=on.of, form=on.form) if on.kind == "top_k" else None
    return DivergenceSpec(
        name=loss.divergence, parameters=parameters, support=support, clip=loss.clip
    )


def add_support(watched: dict[str, Any], p_MV: Tensor, q_MV: Tensor, support: Any) -> None:
    for p_V, q_V in zip(p_MV, q_MV, strict=True):
        student, teacher = ({*x_V.topk(support.k).indices.tolist()} for x_V in (p_V, q_V))
        chosen = {"student": student, "teacher": teacher, "joint": student | teacher}[support.of]
        for who, x_V in (("student", p_V), ("teacher", q_V)):
            mass = x_V[sorted(chosen)].exp().sum()
            watched.setdefault(f"topk_mass/{who}", []).append(mass[None])
        share = torch.tensor([len(student & teacher) / support.k], dtype=torch.float64)
        watched.setdefault("topk_overlap", []).append(share)


# ── equality ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("losses", [*MIXES, *NOT_MIXES])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": 1.3}], ids=["plain", "capped"])
def test_the_same_as_one_whole_graph(losses: str, options: dict[str, float]) -> None:
    mix = (MIXES | NOT_MIXES)[losses]
    ours, right = run(mix, **options), naive(mix, **options)
    assert ours["values"].keys() == right["values"].keys()
    assert ours["metrics"].keys() == right["metrics"].keys()
    # The overlap is a float32 share; advantages are exact.
    assert_close(ours, right, rtol=1e-7, atol=1e-10)


def test_a_teacher_without_scores_at_some_positions() -> None:
    """Its log-prob is NaN there and its hidden states are anything; no loss is taken there."""
    has_teacher = [1.0, 1.0, 0.0] + [1.0] * 8
    for kind in (KL, GAP):
        mix = [({**kind, "gate": {}}, has_teacher), ({"kind": "cross_entropy"}, ALL)]
        assert_close(run(mix, silent=True), naive(mix, silent=True), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("form", ["tail", "stop_gradient", "renormalized", "naive"])
@pytest.mark.filterwarnings("ignore:.*without a tail")
def test_a_teacher_of_which_only_the_top_k_are_known(form: str) -> None:
    """The same gradients, values and support metrics; none that need its whole distribution."""
    loss = {**KL, "support": {"kind": "top_k", "k": 4, "form": form}}
    mix = [(loss, FIRST), ({"kind": "cross_entropy", "weight": 0.1}, ALL), ({**GAP}, LAST)]
    right = naive(mix)
    terms = make_terms(mix)
    batch, head, metrics = make_batch(terms), make_head(5, 0), MetricAccumulator()
    logits_NV = batch.teacher_head(batch.teacher_hidden_ND) / batch.temperature_N[:, None]
    top = logits_NV.log_softmax(-1).topk(6, dim=-1)
    batch = replace(
        batch, teacher_hidden_ND=None, teacher_head=None,
        teacher_top_ids_NK=top.indices, teacher_top_logp_NK=top.values.detach(),
    )  # fmt: skip
    gradient_ND, logp_N, losses = backward_through_head(batch, head, terms, chunk=4)
    record_losses(losses, metrics)
    assert_close(gradient_ND, right["hidden"], rtol=1e-8, atol=1e-10)
    assert_close(head.module.weight.grad, right["head"], rtol=1e-8, atol=1e-10)
    assert_close(logp_N, right["logp"], rtol=1e-8, atol=1e-10)
    assert_close(metrics.losses, right["values"], rtol=1e-8, atol=1e-10)
    del right["metrics"]["kl"], right["metrics"]["entropy/teacher"]
    assert_close(metrics.means(), right["metrics"], rtol=1e-7, atol=1e-10)


def test_a_parameter_by_name_and_a_divergence_from_another_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's file: Σ_v |π − q|^order with its own parameter, and a plain function of terms."""
    (tmp_path / "power_divergence.py").write_text(
        "from courtside.losses.divergences import Divergence, Parameter\n"
        "def terms(student_logp, teacher_logp, *, order=2.0):\n"
        "    return (student_logp.exp() - teacher_logp.exp()).abs() ** order\n"
        "power = Divergence(name='power', terms=terms,\n"
        "                   parameters={'order': Parameter(low=1, high=4)})\n"
    )
    monkeypatch.chdir(tmp_path)
    loss = {**KL, "divergence": "power_divergence:power", "parameters": {"order": 3.0}}
    terms = make_terms([(loss, ALL)])
    batch, head = make_batch(terms), make_head(5, 0)
    metrics = MetricAccumulator()
    gradient_ND, _, losses = backward_through_head(batch, head, terms, chunk=4)
    record_losses(losses, metrics)
    hidden_ND = batch.hidden_ND.requires_grad_()
    p_NV, q_NV = (
        (module(x_ND) / batch.temperature_N[:, None]).softmax(-1)
        for module, x_ND in ((head, hidden_ND), (batch.teacher_head, batch.teacher_hidden_ND))
    )
    mean = ((p_NV - q_NV.detach()).abs() ** 3).sum() / 7
    (right_ND,) = torch.autograd.grad(mean, hidden_ND)
    assert_close(gradient_ND, right_ND, rtol=1e-8, atol=1e-12)
    assert metrics.losses["divergence"] == pytest.approx(float(mean.detach()), rel=1e-9)
    plain = divergence_spec(
        make_terms([({**KL, "divergence": "power_divergence:terms"}, ALL)])[0].loss
    )
    assert plain.parameters == {}
    refusals = {"power_divergence:power": "needs order", "power_divergence:no": "cannot"}
    for wrong, says in {**refusals, "no_such_module:x": "cannot be imported"}.items():
        with pytest.raises(ValueError, match=says):
            divergence_spec(make_terms([({**KL, "divergence": wrong}, ALL)])[0].loss)


def test_chunks_are_chosen_where_none_are_given() -> None:
    terms = make_terms(MIXES["reverse KL"])
    whole = backward_through_head(make_batch(terms), make_head(5, 0), terms, chunk=None)
    assert_close(whole[0], naive(MIXES["reverse KL"])["hidden"], rtol=1e-8, atol=1e-10)


def test_a_frozen_head_gets_no_gradient() -> None:
    terms, head = make_terms(MIXES["reverse KL"]), make_head(5, 0)
    head.module.requires_grad_(False)
    backward_through_head(make_batch(terms), head, terms, chunk=4)
    assert head.module.weight.grad is None


def test_autocast_makes_bfloat16_logits_and_float32_gradients() -> None:
    terms, head = make_terms(MIXES["reverse KL"]), make_head(5, 0)
    head.module.float()
    batch = make_batch(terms)
    batch.teacher_head.module.float()
    right = naive(MIXES["reverse KL"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradient_ND, _, _ = backward_through_head(batch, head, terms, chunk=4)
    grad_VD = head.module.weight.grad
    assert grad_VD.dtype == torch.float32
    for ours, exact in ((gradient_ND, right["hidden"]), (grad_VD, right["head"])):
        assert 1e-4 < float((ours - exact).norm() / exact.norm()) < 3e-2
