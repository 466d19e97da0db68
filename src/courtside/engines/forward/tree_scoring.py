"""Tree scoring: a trajectory (trunk) and its turns with hints (branches), without recomputation.

A packed forward pass over the trunks retains its KV cache. Branches are then packed into a second
pass: each attends to its trunk up to its splice and to itself, at the position ids that it would
have in a sequence of its own. n hints cost Σ(|hint| + |turn|) tokens instead of n · |trajectory|,
with the scores of n separate passes. The trunk's pass and its graph are unchanged, so that a
training step can score its hints over its own forward pass.

The keys of a layer are gathered once per branch, which `default_max_keys` bounds: more branches
take several passes. Models whose batches cannot be packed score each branch as a sequence
(`stateless.score_branches_separately`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from courtside.engines.base import BranchRequest, BranchScores, Want
from courtside.engines.forward.batching import SequenceSpan, copy_to_device, default_pass_tokens
from courtside.engines.forward.forward import ForwardPasses, forward_packed
from courtside.engines.forward.logprobs import score_positions
from courtside.engines.forward.varlen import VARLEN_ATTENTION, forward_varlen, make_varlen_layout
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.attention import cast_attention_inputs
from courtside.engines.patches.patch import apply_patches, patch_attention
from courtside.engines.probes import distance_from_plain_forward, eval_mode, run_probe
from courtside.errors import ModelError
from courtside.types import Branch

PlacedBranch = tuple[SequenceSpan, Branch]
"""A branch, and the span of its trunk in the packed row."""


def default_max_keys(device: torch.device) -> int:
    """Gathered keys of one pass. With 8 KV heads of 128 in 16 bits they take 0.5 GiB on a GPU, and
    a multiple where they must be repeated for grouped queries."""
    return 2**17 if device.type == "cuda" else 2**15


# ── trunks ───────────────────────────────────────────────────────────────────────────────────────


class _TrunkLayer(DynamicLayer):  # type: ignore[misc]
    """Retains detached keys and values, in the dtype of the attention."""

    is_initialized: bool

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert not self.is_initialized, "a trunk cache serves one forward pass"
        keys, values = cast_attention_inputs(key_states, value_states)
        self.keys, self.values = keys.detach(), values.detach()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        return keys, values


def make_trunk_cache() -> Cache:
    """A cache for one `ForwardPasses.forward`, which retains its keys and values without a copy."""
    return Cache(layer_class_to_replicate=_TrunkLayer)


# ── branches ─────────────────────────────────────────────────────────────────────────────────────


class BranchKeys:
    """Gathers the keys of all branches: of the trunk up to the splice, then of the branch."""

    def __init__(
        self, branches: Sequence[PlacedBranch], *, device: torch.device, by_index: bool | None
    ):
        """`by_index`: in one gather instead of concatenated slices. Slices cost a GPU's host a
        launch each in every layer; on a CPU the gather takes ten times as long."""
        self.lengths = [len(branch.token_ids) for _, branch in branches]
        self.trunk_slices = [span.slices(branch.splice) for span, branch in branches]
        self.by_index = device.type == "cuda" if by_index is None else by_index
        if self.by_index:
            self.source_K, self.target_N = self._make_indices(device)

    def _make_indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The trunk position of each gathered key (0 for keys of branches), and where the keys of
        branches go."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        start = 0
        for length, slices in zip(self.lengths, self.trunk_slices, strict=True):
            sources += [torch.arange(s.start, s.stop) for s in slices]
            sources.append(torch.zeros(length, dtype=torch.long))
            start += sum(s.stop - s.start for s in slices)
            targets.append(torch.arange(start, start + length))
            start += length
        source_K, target_N = torch.cat(sources), torch.cat(targets)
        return copy_to_device(source_K, device), copy_to_device(target_N, device)

    def gather(self, trunk: Tensor, new: Tensor) -> Tensor:
        """States of trunks and branches, both [1, heads, N, D], to [1, heads, K, D]."""
        new = new.to(trunk.dtype)
        if self.by_index:
            gathered_KHD = trunk.squeeze(0).transpose(0, 1).index_select(0, self.source_K)
            gathered_KHD.index_copy_(0, self.target_N, new.squeeze(0).transpose(0, 1))
            return gathered_KHD.transpose(0, 1)[None]
        pieces: list[Tensor] = []
        for slices, branch in zip(self.trunk_slices, new.split(self.lengths, dim=2), strict=True):
            pieces += [*(trunk[:, :, s] for s in slices), branch]
        return torch.cat(pieces, dim=2)


class _BranchLayer(DynamicLayer):  # type: ignore[misc]
    """Returns the keys and values that each branch attends to, and stores nothing."""

    def __init__(self, trunk: _TrunkLayer, branch_keys: BranchKeys):
        super().__init__()
        self.keys, self.values = trunk.keys, trunk.values
        self.dtype, self.device = trunk.dtype, trunk.device
        self.is_initialized = True
        self.branch_keys = branch_keys

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        gather = self.branch_keys.gather
        return gather(self.keys, key_states), gather(self.values, value_states)


@torch.no_grad()
def forward_branches(
    passes: ForwardPasses,
    cache: Cache,
    branches: Sequence[PlacedBranch],
    *,
    max_tokens: int | None = None,
    max_keys: int | None = None,
    by_index: bool | None = None,
) -> list[Tensor]:
    """Last hidden states [|branch|, D] of every branch, inside `ForwardPasses.patch_model`.

    Hidden state i predicts token i + 1 of the branch. Limits and `by_index` (see `BranchKeys`)
    default to what suits the device.
    """
    device = passes.model.device
    max_tokens = max_tokens or default_pass_tokens(device)
    max_keys = max_keys or default_max_keys(device)
    hidden: list[Tensor] = []
    with eval_mode(passes.model):
        for batch in _split_branches(branches, max_tokens, max_keys):
            branch_keys = BranchKeys(batch, device=device, by_index=by_index)
            batch_ND = _forward_branch_batch(passes, cache, batch, branch_keys)
            hidden += batch_ND.split(branch_keys.lengths)
    return hidden


def _split_branches(
    branches: Sequence[PlacedBranch], max_tokens: int, max_keys: int
) -> list[list[PlacedBranch]]:
    """Consecutive batches within both limits; a branch that is too large is alone."""
    batches: list[list[PlacedBranch]] = []
    num_tokens = num_keys = 0
    for span, branch in branches:
        length = len(branch.token_ids)
        num_tokens, num_keys = num_tokens + length, num_keys + branch.splice + length
        if not batches or num_tokens > max_tokens or num_keys > max_keys:
            batches.append([])
            num_tokens, num_keys = length, branch.splice + length
        batches[-1].append((span, branch))
    return batches


def _forward_branch_batch(
    passes: ForwardPasses, cache: Cache, branches: Sequence[PlacedBranch], branch_keys: BranchKeys
) -> Tensor:
    if not cache.layers:
        raise ModelError(
            "the trunk's forward pass retained no KV cache, as under gradient checkpointing. "
            "Run it without, or score each branch as a sequence"
        )
    trunk_length = cache.layers[0].keys.shape[2]
    assert all(branch.token_ids for _, branch in branches)
    assert all(s.stop <= trunk_length for slices in branch_keys.trunk_slices for s in slices)
    layout = make_varlen_layout(
        branch_keys.lengths,
        [branch.splice + len(branch.token_ids) for _, branch in branches],
        device=passes.model.device,
        backend=passes.backend,
    )
    return forward_varlen(
        passes.model,
        [token for _, branch in branches for token in branch.token_ids],
        [branch.splice + n for _, branch in branches for n in range(len(branch.token_ids))],
        layout,
        Cache(layers=[_BranchLayer(layer, branch_keys) for layer in cache.layers]),
    )


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def score_trees(
    passes: ForwardPasses,
    head: LMHead,
    requests: Sequence[BranchRequest],
    *,
    want: Want,
    top_k: int,
    max_tokens: int,
    max_shared_tokens: int,
    max_keys: int | None = None,
) -> list[BranchScores]:
    """Scores of trunks and branches, within the limits of `ForwardPasses.plan_batches` and
    `forward_branches`."""
    trunks = [request.token_ids[: request.num_read] for request in requests]
    results: dict[int, BranchScores] = {}
    for batch in passes.plan_batches(
        [[ids] for ids in trunks], max_tokens, max_shared_tokens=max_shared_tokens
    ):
        batch_requests = [requests[i] for i in batch]
        hidden_ND, spans, branch_spans = _forward_trees(
            passes, [trunks[i] for i in batch], batch_requests, max_tokens, max_keys
        )
        scored_trunks = [
            (span, request.trunk())
            for span, request in zip(spans, batch_requests, strict=True)
            if request.scored is not None
        ]
        branches = [(r, branch) for r in batch_requests for branch in r.branches]
        scored_branches = [
            (span, request.sequence(branch, start=branch.splice - span.num_prefix))
            for span, (request, branch) in zip(branch_spans, branches, strict=True)
        ]
        # Separately: hidden states of branches that outlive this call must not hold the trunks'.
        trunk_scores, branch_scores = (
            iter(
                score_positions(
                    head,
                    hidden_ND,
                    [span for span, _ in scored],
                    [request for _, request in scored],
                    want=want,
                    top_k=top_k,
                )
            )
            for scored in (scored_trunks, scored_branches)
        )
        for index, request in zip(batch, batch_requests, strict=True):
            results[index] = BranchScores(
                trunk=None if request.scored is None else next(trunk_scores),
                branches=tuple(next(branch_scores) for _ in request.branches),
            )
    return [results[i] for i in range(len(requests))]


def _forward_trees(
    passes: ForwardPasses,
    trunks: Sequence[Sequence[int]],
    requests: Sequence[BranchRequest],
    max_tokens: int,
    max_keys: int | None,
) -> tuple[Tensor, Sequence[SequenceSpan], list[SequenceSpan]]:
    """Hidden states of all trunks, then of all branches, and the spans of both. The span of a
    branch begins with the trunk position that predicts its first token, if there is one."""
    cache = make_trunk_cache()
    with eval_mode(passes.model), passes.patch_model():
        trunk_ND, spans = passes.forward(trunks, cache=cache)
        branches = [
            (span, branch)
            for span, request in zip(spans, requests, strict=True)
            for branch in request.branches
        ]
        branch_hidden = forward_branches(
            passes, cache, branches, max_tokens=max_tokens, max_keys=max_keys
        )
    branch_spans: list[SequenceSpan] = []
    start = len(trunk_ND)
    for (span, branch), hidden_ND in zip(branches, branch_hidden, strict=True):
        branch_span = SequenceSpan(start=start)
        if branch.splice:
            (predicting,) = span.indices([branch.splice - 1])
            branch_span = SequenceSpan(start=start, prefix_start=predicting, num_prefix=1)
        branch_spans.append(branch_span)
        start += len(hidden_ND)
    return torch.cat([trunk_ND, *branch_hidden]), spans, branch_spans


# ── probe ────────────────────────────────────────────────────────────────────────────────────────


def probe_tree_scoring(passes: ForwardPasses) -> str | None:
    """Why each branch takes a sequence of its own; None: tree scoring works.

    An example is needed because kernels may align queries with the first or the last key, and
    models may ignore a cache.
    """
    return passes.padding_reason or run_probe(passes.model, lambda: _tree_scoring_error(passes))


def _tree_scoring_error(passes: ForwardPasses) -> float:
    """Distance of branches off two packed sequences from separate forward passes."""
    model = passes.model
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = [(7 * i * i + 3) % vocab_size for i in range(1, 61)]
    sequences = [ids[:9], ids[9:30]]
    branches = [
        (trunk, Branch(trajectory="", turn=0, splice=splice, token_ids=tuple(ids[-size:]),
                       scored=(False,) * size))
        for trunk, splice, size in ((0, 9, 5), (1, 21, 12), (1, 4, 3), (0, 0, 7))
    ]  # fmt: skip
    cache = make_trunk_cache()
    with apply_patches([patch_attention(model, VARLEN_ATTENTION)]):
        _, spans = forward_packed(model, sequences, cache, backend=passes.backend)
        placed = [(spans[trunk], branch) for trunk, branch in branches]
        hidden = forward_branches(passes, cache, placed)
    return max(
        distance_from_plain_forward(
            model, [*sequences[trunk][: branch.splice], *branch.token_ids], hidden_ND
        )
        for (trunk, branch), hidden_ND in zip(branches, hidden, strict=True)
    )
