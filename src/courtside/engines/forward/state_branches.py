"""Branches of recurrent and hybrid models: turns with hints, from the trunk's state at the splice.

A trunk's pass stops at every splice, and the state there is saved. Each branch continues from a
copy, so that n hints cost the trajectory once and Σ(|hint| + |turn|) tokens instead of
n · |trajectory|, with the scores of n separate passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from courtside.engines.base import BranchRequest, BranchScores, Want
from courtside.engines.forward.batching import SequenceSpan, pad_right, split_prefill
from courtside.engines.forward.state_passes import StateBatch, StatePasses
from courtside.engines.forward.tree_scoring import default_max_keys, score_tree_positions
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.patch import eval_mode
from courtside.engines.row_states import RowState
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.types import Branch


@torch.no_grad()
def score_state_trees(
    passes: StatePasses,
    head: LMHead,
    requests: Sequence[BranchRequest],
    *,
    pad_id: int,
    want: Want,
    top_k: int,
    max_tokens: int,
    max_keys: int | None = None,
    progress: ProgressMeter | None = None,
) -> list[BranchScores]:
    """Scores of trunks and branches; passes have at most `max_tokens`, and those over branches at
    most `max_keys` copied keys, or one row."""
    scores: list[BranchScores] = []
    counts = PhaseProgress(total=len(requests), unit="trajectories")
    if progress is not None:
        progress.phase = counts
    max_keys = max_keys or default_max_keys(passes.model.device)
    for request in requests:
        with eval_mode(passes.model):
            trunk_ND, states = forward_trunk(passes, request, max_tokens=max_tokens)
            branch_hidden = forward_state_branches(
                passes,
                [(states.get(branch.splice), branch) for branch in request.branches],
                pad_id=pad_id,
                max_tokens=max_tokens,
                max_keys=max_keys,
            )
        scores += score_tree_positions(
            head, [(request, SequenceSpan(start=0))], trunk_ND, branch_hidden,
            want=want, top_k=top_k,
        )  # fmt: skip
        counts.finished += 1
    return scores


def forward_trunk(
    passes: StatePasses, request: BranchRequest, *, max_tokens: int
) -> tuple[Tensor, dict[int, RowState]]:
    """Last hidden states [N, D] of the trunk up to its last splice or scored token, and the state
    at every splice; a splice at the start has none."""
    ends = sorted({branch.splice for branch in request.branches} | {request.num_read})
    states: dict[int, RowState] = {}
    hidden: list[Tensor] = []
    start = 0
    for end in ends:
        if end > start:
            ids = request.token_ids[start:end]
            ((state, hidden_ND),) = passes.extend([(states.get(start), ids)], max_tokens=max_tokens)
            # Earlier states have the keys and values of this one, up to their splice.
            states = {n: passes.layout.share_kv(earlier, state) for n, earlier in states.items()}
            states[end] = state
            hidden.append(hidden_ND)
            start = end
    return torch.cat(hidden), states


def forward_state_branches(
    passes: StatePasses,
    branches: Sequence[tuple[RowState | None, Branch]],
    *,
    pad_id: int,
    max_tokens: int,
    max_keys: int,
) -> list[Tensor]:
    """Last hidden states [|branch|, D] of branches from the states at their splices. Their states
    are not used afterwards, so that branches of a pass are padded on the right."""
    hidden: dict[int, Tensor] = {}
    for is_new in (True, False):
        indices = [i for i, (state, _) in enumerate(branches) if (state is None) == is_new]
        indices.sort(key=lambda i: -len(branches[i][1].token_ids))
        lengths = [len(branches[i][1].token_ids) for i in indices]
        for batch in split_prefill(lengths, indices, max_tokens):
            for part in _split_by_keys(batch, branches, max_keys):
                sequences = [branches[i][1].token_ids for i in part]
                ids_BN = pad_right(sequences, pad_id, passes.model.device)
                states = [state for i in part if (state := branches[i][0]) is not None]
                if states:
                    hidden_BND = StateBatch(passes, states).forward(ids_BN)
                else:
                    hidden_BND, _ = passes.forward(ids_BN, None, [0] * len(part))
                for i, ids, hidden_ND in zip(part, sequences, hidden_BND, strict=True):
                    hidden[i] = hidden_ND[: len(ids)]
    return [hidden[i] for i in range(len(branches))]


def _split_by_keys(
    batch: Sequence[int], branches: Sequence[tuple[RowState | None, Branch]], max_keys: int
) -> list[list[int]]:
    """Neighbors whose keys, with padding, are at most `max_keys`."""
    parts: list[list[int]] = []
    for i in batch:
        longest = max(branches[j][1].splice for j in [i, *(parts[-1] if parts else [])])
        if not parts or longest * (len(parts[-1]) + 1) > max_keys:
            parts.append([])
        parts[-1].append(i)
    return parts


def find_separate_reason(passes: StatePasses) -> str | None:
    """Why branches are better scored as separate sequences; None: they start from their splice."""
    if passes.continues_by_chunks:
        return None
    return "its passes over several tokens do not start from a state"
