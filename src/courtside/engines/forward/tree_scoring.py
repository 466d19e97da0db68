"""Tree scoring: a trajectory (trunk) and its turns with hints (branches), without recomputation.

A packed forward pass over the trunks retains its KV cache. Branches are then packed into a second
pass: each attends to its trunk up to its splice and to itself, at the position ids that it would
have in a sequence of its own. n hints cost Σ(|hint| + |turn|) tokens instead of n · |trajectory|,
with the scores of n separate passes. The trunk's pass and its graph are unchanged, so that a
training step can score its hints over its own forward pass.

The keys of a layer are gathered once per branch, which `default_max_keys` bounds: more branches
take several passes. Recurrent models continue from saved states (`state_branches.py`); others whose
batches cannot be packed score each branch as a sequence (`base.score_branches_separately`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from courtside.engines.base import BranchRequest, BranchScores, ScoreRequest, Want
from courtside.engines.forward.batching import (
    SequenceSpan,
    copy_to_device,
    default_pass_tokens,
)
from courtside.engines.forward.forward import ForwardPasses, score_positions
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.attention import cast_attention_inputs
from courtside.engines.patches.patch import eval_mode
from courtside.engines.probes import distance_from_plain_forward, run_probe
from courtside.errors import ModelError
from courtside.progress import PhaseProgress, ProgressMeter
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


class TrunkCache(Cache):  # type: ignore[misc]
    """A cache for one `ForwardPasses.forward`, which retains its keys and values without a copy."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_TrunkLayer)


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
            pieces: list[Tensor] = []
            for slices, length in zip(self.trunk_slices, self.lengths, strict=True):
                pieces += [torch.arange(s.start, s.stop) for s in slices]
                pieces.append(torch.full((length,), -1))
            # Trunk position of each gathered key; -1: a key of the branch.
            source_K = torch.cat(pieces)
            self.source_K = copy_to_device(source_K.clamp(min=0), device)
            self.target_N = copy_to_device((source_K < 0).nonzero()[:, 0], device)

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
        self.gather = branch_keys.gather

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.gather(self.keys, key_states), self.gather(self.values, value_states)


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
    if not cache.layers:
        raise ModelError(
            "the trunk's forward pass retained no KV cache, as under gradient checkpointing. "
            "Run it without, or score each branch as a sequence"
        )
    device, trunk_length = passes.model.device, cache.layers[0].keys.shape[2]
    max_tokens = max_tokens or default_pass_tokens(device)
    max_keys = max_keys or default_max_keys(device)
    hidden: list[Tensor] = []
    for batch in _split_branches(branches, max_tokens, max_keys):
        keys = BranchKeys(batch, device=device, by_index=by_index)
        assert all(s.stop <= trunk_length for slices in keys.trunk_slices for s in slices)
        hidden_ND = passes.forward_on_cache(
            [branch.token_ids for _, branch in batch],
            [branch.splice for _, branch in batch],
            Cache(layers=[_BranchLayer(layer, keys) for layer in cache.layers]),
        )
        hidden += hidden_ND.split(keys.lengths)
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
    progress: ProgressMeter | None = None,
) -> list[BranchScores]:
    """Scores of trunks and branches, within the limits of `ForwardPasses.plan_batches` and
    `forward_branches`; inside `ForwardPasses.patch_model`."""
    trunks = [request.token_ids[: request.num_read] for request in requests]
    results: dict[int, BranchScores] = {}
    batches = passes.plan_batches(
        [[ids] for ids in trunks], max_tokens, max_shared_tokens=max_shared_tokens
    )
    counts = PhaseProgress(total=len(batches), unit="passes")
    if progress is not None:
        progress.phase = counts
    for batch in batches:
        cache = TrunkCache()
        with eval_mode(passes.model):
            trunk_ND, spans = passes.forward([trunks[i] for i in batch], cache=cache)
            trees = [(requests[i], span) for i, span in zip(batch, spans, strict=True)]
            branches = [(r, span, branch) for r, span in trees for branch in r.branches]
            branch_hidden = forward_branches(
                passes,
                cache,
                [(span, branch) for _, span, branch in branches],
                max_tokens=max_tokens,
                max_keys=max_keys,
            )
        scores = score_tree_positions(head, trees, trunk_ND, branch_hidden, want=want, top_k=top_k)
        results.update(zip(batch, scores, strict=True))
        counts.finished += 1
    return [results[i] for i in range(len(requests))]


def score_tree_positions(
    head: LMHead,
    trees: Sequence[tuple[BranchRequest, SequenceSpan]],
    trunk_ND: Tensor,
    branch_hidden: Sequence[Tensor],
    *,
    want: Want,
    top_k: int,
) -> list[BranchScores]:
    """Scores of trunks at these spans of `trunk_ND`, and of all their branches in order."""
    branches = [(r, span, branch) for r, span in trees for branch in r.branches]
    # A branch's first token is predicted by the trunk's position before it, if there is one.
    pieces: list[Tensor] = [trunk_ND[:0]]
    branch_spans: list[SequenceSpan] = []
    sequences: list[ScoreRequest] = []
    num_positions = 0
    for (request, span, branch), hidden_ND in zip(branches, branch_hidden, strict=True):
        predicting = [trunk_ND[s][-1:] for s in span.slices(branch.splice)[-1:]]
        branch_spans.append(SequenceSpan(start=num_positions))
        sequences.append(request.sequence(branch, start=branch.splice - len(predicting)))
        pieces += [*predicting, hidden_ND]
        num_positions += len(predicting) + len(hidden_ND)
    scored = [(request, span) for request, span in trees if request.scored is not None]
    trunk_scores = iter(
        score_positions(
            head, trunk_ND, [span for _, span in scored], [r.trunk() for r, _ in scored],
            want=want, top_k=top_k,
        )
    )  # fmt: skip
    branch_scores = iter(
        score_positions(head, torch.cat(pieces), branch_spans, sequences, want=want, top_k=top_k)
    )
    return [
        BranchScores(
            trunk=None if request.scored is None else next(trunk_scores),
            branches=tuple(next(branch_scores) for _ in request.branches),
        )
        for request, _ in trees
    ]


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
    cache = TrunkCache()
    with passes.patch_model():
        _, spans = passes.forward(sequences, cache=cache)
        placed = [(spans[trunk], branch) for trunk, branch in branches]
        hidden = forward_branches(passes, cache, placed)
    return max(
        distance_from_plain_forward(
            model, [*sequences[trunk][: branch.splice], *branch.token_ids], hidden_ND
        )
        for (trunk, branch), hidden_ND in zip(branches, hidden, strict=True)
    )
