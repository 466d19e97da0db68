"""The losses over the vocabulary, a chunk of positions at a time.

[positions × words] exists for one chunk only, forward and backward: each chunk's gradient with
respect to its hidden states is kept (small), its logits are dropped (large), and the model's
backward pass starts from the collected gradients. The result is that of one big graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from courtside.engines.lm_head import LMHead
from courtside.engines.transfer import tensor_on
from courtside.losses.divergences import (
    divergence,
    entropy,
    entropy_aware,
    extrapolate_logprobs,
    reverse_kl,
)
from courtside.losses.reduce import reduce_sum_over
from courtside.losses.top_k import overlap, support_mass, top_k_divergence, top_k_ids
from courtside.recipe import DivergenceLoss, Loss
from courtside.training.loss_terms import LossTerm
from courtside.training.metrics import MetricAccumulator
from courtside.training.token_batch import TokenBatch
from courtside.training.token_losses import record_token_metrics, sampled_token_loss


def backward_through_head(
    rows: TokenBatch,
    head: LMHead,
    components: Sequence[LossTerm],
    *,
    chunk: int,
    metrics: MetricAccumulator,
) -> tuple[Tensor, Tensor]:
    """∂loss/∂hidden_ND (gradients of the head's own weights are accumulated in place), and the
    student's log-probs of the tokens."""
    # Reserved at once: what outlives a chunk must not lie between its temporaries, or the freed
    # [chunk, V] blocks never join again and the heap grows chunk by chunk.
    gradient_ND = torch.empty_like(rows.hidden_ND)
    logp_N = rows.temperature_N.new_empty(len(rows), dtype=head_dtype(rows.hidden_ND))
    watched_N3 = logp_N.new_zeros(len(rows), 3)
    on = _trained_rows(rows, components)
    compared = _compared_rows(components, on, "teacher")
    start = 0
    for part in rows.split(chunk):
        here = slice(start, start + len(part))
        leaf_ND = part.hidden_ND.detach().requires_grad_()
        own = {name: on_N[here] for name, on_N in on.items()}
        loss, logp_N[here], watched_M3 = _chunk_loss(
            replace(part, hidden_ND=leaf_ND), head, components, own, metrics
        )
        if watched_M3 is not None:
            _put(watched_M3, watched_N3[here], compared[here])
        loss.backward()
        assert leaf_ND.grad is not None
        gradient_ND[here] = leaf_ND.grad
        start += len(part)
    record_token_metrics(rows, logp_N, metrics)
    if any(compared):
        _watch_words(rows, head, compared, watched_N3, chunk=chunk, metrics=metrics)
    return gradient_ND, logp_N


def head_dtype(hidden_ND: Tensor) -> torch.dtype:
    """Of log-probs: float32, or better where the model is."""
    return torch.promote_types(hidden_ND.dtype, torch.float32)


# ── which rows train what ────────────────────────────────────────────────────────────────────────


def _trained_rows(rows: TokenBatch, components: Sequence[LossTerm]) -> dict[str, list[bool]]:
    """By component. Asked once for all chunks: each answer waits for a GPU."""
    on_CN = torch.stack([rows.weight_CN[c.name] > 0 for c in components]).tolist()
    return {c.name: on_N for c, on_N in zip(components, on_CN, strict=True)}


def _compared_rows(
    components: Sequence[LossTerm], on: Mapping[str, Sequence[bool]], against: str
) -> list[bool]:
    """The rows that some loss compares with the whole distributions of this one."""
    masks = [on[c.name] for c in components if _against(c.loss) == against]
    return [any(row) for row in zip(*masks, strict=True)]


def _places(on_N: Sequence[bool], device: torch.device) -> Tensor | None:
    """None: all, which needs no copy, and [N, V] is large."""
    if all(on_N):
        return None
    return tensor_on([i for i, on in enumerate(on_N) if on], dtype=torch.long, device=device)


def _only(values_N: Tensor, places_M: Tensor | None) -> Tensor:
    return values_N if places_M is None else values_N[places_M]


def _against(loss: Loss) -> str | None:
    """Whose whole distributions a loss looks at; None: only the sampled tokens."""
    if loss.kind == "divergence":
        return loss.against
    return "teacher" if loss.kind == "policy_gradient" and loss.baseline else None


# ── losses of one chunk ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Whole distributions of a teacher or of the reference, on the rows that are compared."""

    on_N: Sequence[bool]
    places_M: Tensor | None
    logp_MV: Tensor

    def of(self, on_N: Sequence[bool]) -> Tensor:
        """On some of the rows."""
        own = [wanted for wanted, here in zip(on_N, self.on_N, strict=True) if here]
        return _only(self.logp_MV, _places(own, self.logp_MV.device))


def _chunk_loss(
    rows: TokenBatch,
    head: LMHead,
    components: Sequence[LossTerm],
    on: Mapping[str, Sequence[bool]],
    metrics: MetricAccumulator,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weighted sum of all components over these rows, each over its own denominator; the sampled
    tokens' log-probs; and what is watched of whole distributions, where there are any."""
    logits_NV = head(rows.hidden_ND) / rows.temperature_N[:, None]
    words = {
        against: found
        for against in ("teacher", "reference")
        if (found := _words(rows, _compared_rows(components, on, against), against)) is not None
    }
    if words:
        logp_NV = logits_NV.log_softmax(-1)
        logp_N = logp_NV.gather(-1, rows.ids_N[:, None]).squeeze(-1)
    else:
        logp_NV = None
        chosen_N = logits_NV.gather(-1, rows.ids_N[:, None]).squeeze(-1)
        logp_N = chosen_N - logits_NV.logsumexp(-1)
    watched_M3 = None
    if logp_NV is not None and "teacher" in words:
        own_MV = _only(logp_NV.detach(), words["teacher"].places_M)
        watched_M3 = _quick_entropies(own_MV, words["teacher"].logp_MV)

    total = rows.hidden_ND.sum() * 0.0
    for component in components:
        on_N = on[component.name]
        if not any(on_N):
            continue
        # Its own rows only, picked before the loss: others may hold NaN (no teacher spoke there),
        # and a NaN that is masked out afterwards is still NaN in the gradient.
        places_M = _places(on_N, logp_N.device)
        own = rows if places_M is None else rows.only(places_M)
        logp_MV: Tensor | None = None
        teacher_MV: Tensor | None = None
        against = _against(component.loss)
        if against is not None:
            assert logp_NV is not None
            logp_MV, teacher_MV = _only(logp_NV, places_M), words[against].of(on_N)
        loss_M = _component_loss(
            component, own, _only(logp_N, places_M), logp_MV, teacher_MV, metrics
        )
        mean = reduce_sum_over(loss_M, own.weight_CN[component.name], component.denominator)
        if component.loss.kind != "preference":  # its value is of pairs: see `step`
            metrics.add_loss(component.name, mean)
        total = total + component.loss.weight * mean
    return total, logp_N.detach(), watched_M3


def _words(rows: TokenBatch, on_N: Sequence[bool], against: str) -> _Words | None:
    """None: no row is compared."""
    if not any(on_N):
        return None
    places_M = _places(on_N, rows.ids_N.device)
    own = rows if places_M is None else rows.only(places_M)
    hidden_MD, head = own.teacher_hidden_ND, own.teacher_head
    if against == "reference":
        hidden_MD, head = own.reference_hidden_ND, own.reference_head
    return _Words(on_N=on_N, places_M=places_M, logp_MV=_distributions(own, hidden_MD, head))


@torch.no_grad()
def _distributions(rows: TokenBatch, hidden_ND: Tensor | None, head: LMHead | None) -> Tensor:
    assert hidden_ND is not None and head is not None, "no loss asks where nobody spoke"
    return (head(hidden_ND) / rows.temperature_N[:, None]).log_softmax(-1)


def _component_loss(
    component: LossTerm,
    rows: TokenBatch,
    logp_N: Tensor,
    logp_NV: Tensor | None,
    teacher_NV: Tensor | None,
    metrics: MetricAccumulator,
) -> Tensor:
    loss = component.loss
    if loss.kind != "divergence":
        kl_N = None
        if loss.kind == "policy_gradient" and loss.baseline:
            assert logp_NV is not None and teacher_NV is not None
            kl_N = reverse_kl(logp_NV.detach(), teacher_NV)
        return sampled_token_loss(component, rows, logp_N, kl_N)
    assert logp_NV is not None and teacher_NV is not None
    return _divergence(loss, rows, logp_NV, teacher_NV, metrics)


def _divergence(
    loss: DivergenceLoss,
    rows: TokenBatch,
    logp_NV: Tensor,
    teacher_NV: Tensor,
    metrics: MetricAccumulator,
) -> Tensor:
    if loss.support.kind == "top_k":
        with torch.no_grad():
            ids_NK, keep_NK = top_k_ids(logp_NV, teacher_NV, k=loss.support.k, of=loss.support.of)
        student_NK, teacher_NK = logp_NV.gather(-1, ids_NK), teacher_NV.gather(-1, ids_NK)
        metrics.mean("mass/student", support_mass(student_NK.detach(), keep_NK))
        metrics.mean("mass/teacher", support_mass(teacher_NK, keep_NK))
        metrics.mean("overlap", overlap(logp_NV.detach(), teacher_NV, loss.support.k))
        return top_k_divergence(
            student_NK,
            teacher_NK,
            keep_NK,
            name=loss.divergence,
            form=loss.support.form,
            beta=loss.beta,
            alpha=loss.alpha,
            clip=loss.clip,
        )
    if loss.extrapolate != 1.0:
        reference_NV = _distributions(rows, rows.reference_hidden_ND, rows.reference_head)
        teacher_NV = extrapolate_logprobs(teacher_NV, reference_NV, loss.extrapolate)
    loss_N = divergence(
        logp_NV, teacher_NV, name=loss.divergence, beta=loss.beta, alpha=loss.alpha, clip=loss.clip
    )
    if loss.entropy_aware is not None:
        loss_N = loss_N + entropy_aware(
            logp_NV, teacher_NV, loss.entropy_aware.threshold, loss.entropy_aware.weight
        )
    return loss_N


# ── what is worth watching of whole distributions ────────────────────────────────────────────────


@torch.no_grad()
def _watch_words(
    rows: TokenBatch,
    head: LMHead,
    on_N: Sequence[bool],
    watched_N3: Tensor,
    *,
    chunk: int,
    metrics: MetricAccumulator,
) -> None:
    """Over the rows where a loss compares whole distributions, however they are chunked."""
    bad = watched_N3.isnan().any(-1).tolist()  # looked at once for all chunks
    for start in range(0, len(rows), chunk):
        if any(bad[start : start + chunk]):
            # 0 · log 0, which means 0. Its logits are gone, and are made again.
            here = slice(start, start + chunk)
            watched = _entropies(rows.cut(here.start, here.stop), head, on_N[here])
            _put(watched, watched_N3[here], on_N[here])
    own_M3 = _only(watched_N3, _places(on_N, watched_N3.device))
    student_M, cross_M, teacher_M = own_M3.unbind(-1)
    metrics.mean("kl", cross_M - student_M)
    metrics.mean("entropy/student", student_M)
    metrics.mean("entropy/teacher", teacher_M)


def _put(own_M3: Tensor, watched_N3: Tensor, on_N: Sequence[bool]) -> None:
    places_M = _places(on_N, watched_N3.device)
    watched_N3[slice(None) if places_M is None else places_M] = own_M3


@torch.no_grad()
def _quick_entropies(logp_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Of the student, of the teacher for the student, of the teacher; NaN where some word has no
    chance at all."""
    # Products summed on the way instead of [N, V] terms that are summed afterwards.
    p_NV = logp_NV.exp()
    entropy_N = -torch.linalg.vecdot(p_NV, logp_NV)
    cross_N = -torch.linalg.vecdot(p_NV, teacher_NV)
    teacher_N = -torch.linalg.vecdot(torch.exp(teacher_NV, out=p_NV), teacher_NV)
    return torch.stack([entropy_N, cross_N, teacher_N], dim=-1)


def _entropies(rows: TokenBatch, head: LMHead, on_N: Sequence[bool]) -> Tensor:
    """The same three, with zeros where words have no chance."""
    words = _words(rows, on_N, "teacher")
    assert words is not None
    logits_NV = head(rows.hidden_ND) / rows.temperature_N[:, None]
    logp_MV = _only(logits_NV.log_softmax(-1), words.places_M)
    entropy_M = entropy(logp_MV)
    cross_M = reverse_kl(logp_MV, words.logp_MV) + entropy_M
    return torch.stack([entropy_M, cross_M, entropy(words.logp_MV)], dim=-1)
