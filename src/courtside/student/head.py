"""The losses over the vocabulary, a chunk of positions at a time.

[positions × words] exists for one chunk only, forward and backward: each chunk's gradient with
respect to its hidden states is kept (small), its logits are dropped (large), and the model's
backward pass starts from the collected gradients. The result is that of one big graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from courtside.config import DivergenceLoss, Loss
from courtside.engines.base import Head
from courtside.losses.full import divergence, entropy, entropy_aware, extrapolated, reverse_kl
from courtside.losses.reduce import reduce_sum_over
from courtside.losses.top_k import overlap, support_mass, top_k_divergence, top_k_ids
from courtside.student.components import Component
from courtside.student.rows import Rows
from courtside.student.sampled import sampled_loss, watch
from courtside.student.tally import Tally


def chunk_size(num_words: int, device: torch.device) -> int:
    """Positions a chunk: 16 MiB of float32 logits on a CPU with its small caches, 256 on a GPU."""
    elements = 2**26 if device.type == "cuda" else 2**22
    return max(16, elements // num_words)


def backward_through_head(
    rows: Rows, head: Head, components: Sequence[Component], *, chunk: int, tally: Tally
) -> tuple[Tensor, Tensor]:
    """∂loss/∂hidden_ND (gradients of the head's own weights are accumulated in place), and the
    student's log-probs of the tokens."""
    # Reserved at once: what outlives a chunk must not lie between its temporaries, or the freed
    # [chunk, V] blocks never join again and the heap grows chunk by chunk.
    gradient_ND = torch.empty_like(rows.hidden_ND)
    logp_N = rows.temperature_N.new_empty(len(rows), dtype=head_dtype(rows.hidden_ND))
    start = 0
    for part in rows.split(chunk):
        leaf_ND = part.hidden_ND.detach().requires_grad_()
        loss, chunk_logp_N = chunk_loss(replace(part, hidden_ND=leaf_ND), head, components, tally)
        loss.backward()
        assert leaf_ND.grad is not None
        gradient_ND[start : start + len(part)] = leaf_ND.grad
        logp_N[start : start + len(part)] = chunk_logp_N.detach()
        start += len(part)
    return gradient_ND, logp_N


def head_dtype(hidden_ND: Tensor) -> torch.dtype:
    """Of log-probs: float32, or better where the model is."""
    return torch.promote_types(hidden_ND.dtype, torch.float32)


def chunk_loss(
    rows: Rows, head: Head, components: Sequence[Component], tally: Tally
) -> tuple[Tensor, Tensor]:
    """Weighted sum of all components over these rows, each over its own denominator."""
    logits_NV = head(rows.hidden_ND) / rows.temperature_N[:, None]
    spoken = {
        against: words
        for against in ("teacher", "reference")
        if (words := _words(rows, components, against)) is not None
    }
    if spoken:
        logp_NV = logits_NV.log_softmax(-1)
        logp_N = logp_NV.gather(-1, rows.ids_N[:, None]).squeeze(-1)
    else:
        logp_NV = None
        chosen_N = logits_NV.gather(-1, rows.ids_N[:, None]).squeeze(-1)
        logp_N = chosen_N - logits_NV.logsumexp(-1)
    watch(rows, logp_N, tally)
    if logp_NV is not None and "teacher" in spoken:
        words_N, words_MV = spoken["teacher"]
        _watch_words(_only(logp_NV.detach(), words_N), words_MV, tally)

    total = rows.hidden_ND.sum() * 0.0
    for component in components:
        on_N = rows.weight_CN[component.name] > 0
        if not bool(on_N.any()):
            continue
        # Its own rows only, picked before the loss: others may hold NaN (no teacher spoke there),
        # and a NaN that is masked out afterwards is still NaN in the gradient.
        own = rows if bool(on_N.all()) else rows.only(on_N)
        logp_MV: Tensor | None = None
        teacher_MV: Tensor | None = None
        against = _against(component.loss)
        if against is not None:
            assert logp_NV is not None
            words_N, words_MV = spoken[against]
            logp_MV, teacher_MV = _only(logp_NV, on_N), _only(words_MV, on_N[words_N])
        loss_M = _component_loss(component, own, _only(logp_N, on_N), logp_MV, teacher_MV, tally)
        mean = reduce_sum_over(loss_M, own.weight_CN[component.name], component.denominator)
        if component.loss.kind != "preference":  # its value is of pairs: see `step`
            tally.value(component.name, mean)
        total = total + component.loss.weight * mean
    return total, logp_N


def _only(values_N: Tensor, on_N: Tensor) -> Tensor:
    """Without a copy where all rows are wanted: [N, V] is large."""
    return values_N if bool(on_N.all()) else values_N[on_N]


def _against(loss: Loss) -> str | None:
    """Whose whole distributions a loss looks at; None: only the sampled tokens."""
    if loss.kind == "divergence":
        return loss.against
    return "teacher" if loss.kind == "policy_gradient" and loss.baseline else None


def _words(
    rows: Rows, components: Sequence[Component], against: str
) -> tuple[Tensor, Tensor] | None:
    """The rows that some loss compares with this one, and its distributions there; None: none."""
    on_N = torch.zeros_like(rows.by_student_N)
    for component in components:
        if _against(component.loss) == against:
            on_N = on_N | (rows.weight_CN[component.name] > 0)
    if not bool(on_N.any()):
        return None
    own = rows if bool(on_N.all()) else rows.only(on_N)
    if against == "teacher":
        return on_N, _distributions(own, own.teacher_hidden_ND, own.teacher_head)
    return on_N, _distributions(own, own.reference_hidden_ND, own.reference_head)


@torch.no_grad()
def _distributions(rows: Rows, hidden_ND: Tensor | None, head: Head | None) -> Tensor:
    assert hidden_ND is not None and head is not None, "no loss asks where nobody spoke"
    return (head(hidden_ND) / rows.temperature_N[:, None]).log_softmax(-1)


def _component_loss(
    component: Component,
    rows: Rows,
    logp_N: Tensor,
    logp_NV: Tensor | None,
    teacher_NV: Tensor | None,
    tally: Tally,
) -> Tensor:
    loss = component.loss
    if loss.kind != "divergence":
        kl_N = None
        if loss.kind == "policy_gradient" and loss.baseline:
            assert logp_NV is not None and teacher_NV is not None
            kl_N = reverse_kl(logp_NV.detach(), teacher_NV)
        return sampled_loss(component, rows, logp_N, kl_N)
    assert logp_NV is not None and teacher_NV is not None
    return _divergence(loss, rows, logp_NV, teacher_NV, tally)


def _divergence(
    loss: DivergenceLoss, rows: Rows, logp_NV: Tensor, teacher_NV: Tensor, tally: Tally
) -> Tensor:
    if loss.support.kind == "top_k":
        with torch.no_grad():
            ids_NK, keep_NK = top_k_ids(logp_NV, teacher_NV, k=loss.support.k, of=loss.support.of)
        student_NK, teacher_NK = logp_NV.gather(-1, ids_NK), teacher_NV.gather(-1, ids_NK)
        tally.mean("mass/student", support_mass(student_NK.detach(), keep_NK))
        tally.mean("mass/teacher", support_mass(teacher_NK, keep_NK))
        tally.mean("overlap", overlap(logp_NV.detach(), teacher_NV, loss.support.k))
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
        teacher_NV = extrapolated(teacher_NV, reference_NV, loss.extrapolate)
    loss_N = divergence(
        logp_NV, teacher_NV, name=loss.divergence, beta=loss.beta, alpha=loss.alpha, clip=loss.clip
    )
    if loss.entropy_aware is not None:
        loss_N = loss_N + entropy_aware(
            logp_NV, teacher_NV, loss.entropy_aware.threshold, loss.entropy_aware.weight
        )
    return loss_N


@torch.no_grad()
def _watch_words(logp_NV: Tensor, teacher_NV: Tensor, tally: Tally) -> None:
    """Over the rows where a loss compares whole distributions, however they are chunked."""
    # Products summed on the way instead of [N, V] terms that are summed afterwards.
    p_NV = logp_NV.exp()
    entropy_N = -torch.linalg.vecdot(p_NV, logp_NV)
    cross_N = -torch.linalg.vecdot(p_NV, teacher_NV)
    teacher_N = -torch.linalg.vecdot(torch.exp(teacher_NV, out=p_NV), teacher_NV)
    if bool((entropy_N + cross_N + teacher_N).isnan().any()):  # 0 · log 0, which means 0
        entropy_N, teacher_N = entropy(logp_NV), entropy(teacher_NV)
        cross_N = reverse_kl(logp_NV, teacher_NV) + entropy_N
    tally.mean("kl", cross_N - entropy_N)
    tally.mean("entropy/student", entropy_N)
    tally.mean("entropy/teacher", teacher_N)
