"""The losses as in a paper, for tests: no code is shared with the package, and nothing is clever.

One whole forward pass a trajectory, full logits, one mean over all tokens of a component.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from courtside.types import Scored, Trajectory


def logp_of(model: Any, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
    """(log-probs of the vocabulary, of the sampled token) at each completion token."""
    ids = torch.tensor(trajectory.token_ids)
    at = torch.tensor([i for i, chosen in enumerate(trajectory.completion_mask) if chosen])
    logits_LV = model(input_ids=ids[None]).logits[0]
    logp_TV = (logits_LV[at - 1] / trajectory.temperature).log_softmax(-1)
    return logp_TV, logp_TV[range(len(at)), ids[at]]


def naive_divergence(p_TV: Tensor, q_TV: Tensor, loss: dict[str, Any], ref_TV: Tensor) -> Tensor:
    """p student, q teacher: log-probs."""
    name, support = loss.get("divergence", "reverse_kl"), loss.get("support", {"kind": "full"})
    lam = loss.get("extrapolate", 1.0)
    if lam != 1:
        q_TV = (lam * q_TV + (1 - lam) * ref_TV).log_softmax(-1)
    if support["kind"] == "top_k":
        rows = []
        for p_V, q_V in zip(p_TV, q_TV, strict=True):
            top_ids = {
                "teacher": set(q_V.topk(support["k"]).indices.tolist()),
                "student": set(p_V.topk(support["k"]).indices.tolist()),
            }
            top_ids["joint"] = top_ids["teacher"] | top_ids["student"]
            chosen = sorted(top_ids[support["of"]])
            p_S, q_S = p_V[chosen], q_V[chosen]
            if support["form"] == "tail":
                p_S = torch.cat([p_S, (1 - p_S.exp().sum()).log()[None]])
                q_S = torch.cat([q_S, (1 - q_S.exp().sum()).log()[None]])
            if support["form"] == "renormalized":
                p_S, q_S = p_S.log_softmax(-1), q_S.log_softmax(-1)
            if support["form"] == "stop_gradient":
                rows.append((p_S.exp() * (p_S.detach() - q_S)).sum())
            else:
                rows.append(divergence_terms(p_S, q_S, name, loss).sum())
        return torch.stack(rows)
    total_T = divergence_terms(p_TV, q_TV, name, loss).sum(-1)
    if "entropy_aware" in loss:
        entropy_T = -(q_TV.exp() * q_TV).sum(-1)
        unsure_T = (entropy_T > loss["entropy_aware"]["threshold"]).double()
        forward_T = (q_TV.exp() * (q_TV - p_TV)).sum(-1)
        total_T = total_T + loss["entropy_aware"]["weight"] * unsure_T * forward_T
    return total_T


def divergence_terms(p: Tensor, q: Tensor, name: str, loss: dict[str, Any]) -> Tensor:
    """What each token of the vocabulary adds."""
    P, Q = p.exp(), q.exp()
    if name == "reverse_kl":
        terms = P * (p - q)
    elif name == "forward_kl":
        terms = Q * (q - p)
    elif name == "jsd":
        beta = loss["beta"]
        m = (beta * Q + (1 - beta) * P).log()
        terms = beta * Q * (q - m) + (1 - beta) * P * (p - m)
    elif name == "total_variation":
        terms = (P - Q).abs() / 2
    elif name == "skew_forward_kl":
        terms = Q * (q - (loss["alpha"] * Q + (1 - loss["alpha"]) * P).log())
    else:
        terms = P * (p - (loss["alpha"] * P + (1 - loss["alpha"]) * Q).log())
    if "clip" in loss:
        assert (terms > loss["clip"]).any() and (terms < loss["clip"]).any(), "a clip that acts"
        terms = terms.clamp(max=loss["clip"])
    return terms


def naive_policy_gradient(
    loss: dict[str, Any], s: Scored, group: list[Scored], logps: dict[str, Tensor]
) -> Tensor:
    mu_T = torch.tensor(s.trajectory.sampler_logp, dtype=torch.float64)
    p_T = logps["p_T"]
    if loss.get("advantage") == "reward":
        rewards = [g.trajectory.grade.score for g in group
                   if g.trajectory.task.id == s.trajectory.task.id]  # fmt: skip
        mean = sum(rewards) / len(rewards)
        advantage = s.trajectory.grade.score - mean
        if loss.get("group_baseline") == "leave_one_out":
            other_rewards = sum(rewards) - s.trajectory.grade.score
            advantage = s.trajectory.grade.score - other_rewards / max(1, len(rewards) - 1)
            advantage *= len(rewards) > 1
        if loss.get("scale_by_std"):
            advantage /= (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
        advantage_T = torch.full_like(mu_T, advantage)
        if "reference_kl" in loss:  # the weight of that reward
            advantage_T = advantage_T - loss["reference_kl"] * (mu_T - logps["ref_T"])
    else:
        lam = loss.get("extrapolate", 1.0)
        advantage_T = lam * logps["q_T"] + (1 - lam) * logps["ref_T"] - mu_T
        if loss.get("baseline"):
            advantage_T = advantage_T + (logps["p_TV"].exp() * (logps["p_TV"] - logps["q_TV"])).sum(
                -1
            )
    advantage_T = advantage_T.detach()
    ratio_T = (p_T - mu_T).exp()
    if loss.get("ratio") == "none":
        return -advantage_T * p_T
    if "clip" in loss:
        low, high = loss["clip"]
        surrogate_T = torch.min(
            ratio_T * advantage_T, ratio_T.clamp(1 - low, 1 + high) * advantage_T
        )
        if "dual_clip" in loss:
            bound_T = loss["dual_clip"] * advantage_T
            is_bounded_T = (advantage_T < 0) & (surrogate_T < bound_T)
            surrogate_T = torch.where(is_bounded_T, bound_T, surrogate_T)
        return -surrogate_T
    if "ratio_gate" in loss:
        low, high = loss["ratio_gate"]
        return -ratio_T.detach() * ((ratio_T >= low) & (ratio_T <= high)) * advantage_T * p_T
    if "truncate" in loss:
        return -ratio_T.detach().clamp(max=loss["truncate"]) * advantage_T * p_T
    return -ratio_T * advantage_T


def naive_loss(
    losses: list[dict[str, Any]],
    scored: list[Scored],
    model: Any,
    teachers: dict[str, Any],
    ref: Any,
) -> tuple[Tensor, dict[str, float]]:
    """The whole objective of a step, in one graph; and the value of each component."""
    total, values = torch.zeros((), dtype=torch.float64), {}
    for loss in losses:
        on = loss.get("on", "all")
        group = [s for s in scored if on in ("all", s.trajectory.source)]
        if on == "chosen":
            group = [s for s in scored if s.trajectory.preference == "better"]
        if loss["kind"] in ("divergence", "policy_gradient") and loss.get("advantage") != "reward":
            group = [s for s in group if s.target is not None]
        if loss["kind"] == "preference":
            pairs = [(scored[i], scored[i + 1]) for i in range(0, len(scored), 2)]
            margins = []
            for better, worse in pairs:
                gains = [logp_of(model, s.trajectory)[1].sum()
                         - logp_of(ref, s.trajectory)[1].sum().detach()
                         for s in (better, worse)]  # fmt: skip
                margins.append(gains[0] - gains[1])
            if loss.get("form") == "ipo":
                mean = ((torch.stack(margins) - 1 / (2 * loss["beta"])) ** 2).mean()
            else:
                mean = -logsigmoid(loss["beta"] * torch.stack(margins)).mean()
        else:
            terms = []
            for s in group:
                p_TV, p_T = logp_of(model, s.trajectory)
                logps = {"p_TV": p_TV, "p_T": p_T}
                with torch.no_grad():
                    if s.target is not None:
                        logps["q_TV"], logps["q_T"] = logp_of(
                            teachers[s.target.teacher], s.trajectory
                        )
                    logps["ref_TV"], logps["ref_T"] = logp_of(ref, s.trajectory)
                if loss["kind"] == "cross_entropy":
                    terms.append(-p_T)
                elif loss["kind"] == "divergence":
                    terms.append(naive_divergence(p_TV, logps["q_TV"], loss, logps["ref_TV"]))
                else:
                    terms.append(naive_policy_gradient(loss, s, group, logps))
            mean = naive_mean(loss, group, terms)
        values[loss.get("name", loss["kind"])] = float(mean.detach())
        total = total + loss.get("weight", 1.0) * mean
    return total, values


def naive_mean(loss: dict[str, Any], group: list[Scored], terms: list[Tensor]) -> Tensor:
    """Of the tokens' losses of each trajectory, as `normalize` says."""
    if "gate" in loss:
        gates = [naive_gate(loss["gate"], s) for s in group]
        terms = [gate_T * term_T for gate_T, term_T in zip(gates, terms, strict=True)]
    if "route_weights" in loss:
        routes = {}
        for s, term_T in zip(group, terms, strict=True):
            members, parts = routes.setdefault(s.target.teacher.partition(":")[0], ([], []))
            members.append(s)
            parts.append(term_T)
        plain = {k: v for k, v in loss.items() if k != "route_weights"}
        weights = loss["route_weights"]
        total = sum(1.0 if weights == "equal" else weights[route] for route in routes)
        return sum(
            (1.0 if weights == "equal" else weights[route]) / total * naive_mean(plain, *columns)
            for route, columns in routes.items()
        )
    normalize = loss.get("normalize", "token")
    if normalize == "token":
        return torch.cat(terms).mean()
    if normalize == "sequence":
        return torch.stack([term_T.mean() for term_T in terms]).mean()
    if normalize == "constant":
        return torch.cat(terms).sum() / (loss["normalize_tokens"] * len(terms))
    turns = [
        term_T[torch.tensor(s.trajectory.turn_of) == turn].mean()
        for s, term_T in zip(group, terms, strict=True)
        for turn in sorted(set(s.trajectory.turn_of))
    ]
    return torch.stack(turns).mean()


def naive_gate(gate: dict[str, Any], s: Scored) -> Tensor:
    assert s.target is not None and s.trajectory.sampler_logp is not None
    mu_T = torch.tensor(s.trajectory.sampler_logp, dtype=torch.float64)
    sign = -1 if gate.get("direction") == "rejected" else 1
    gap_T = s.target.logp_T.double().cpu() - mu_T
    return 1 / (1 + (-sign * gap_T / gate.get("temperature", 1.0)).exp())
