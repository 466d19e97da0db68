"""How sequences become passes of a model: packed without padding, or padded on the right.

Whether a model can be read in a packed row (`packing.py`), and whether sequences that begin alike
can share their beginning there (`prefixes.py`), is tried on a small example. Models that do
anything special with attention take padded passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from courtside.engines.forward.batching import batch_by_length, batch_by_size, pad_right
from courtside.engines.forward.prefix_sharing import (
    MIN_PREFIX_TOKENS,
    SequenceSpan,
    batch_by_prefix,
    pack_sequences,
)
from courtside.engines.forward.varlen import (
    forward_varlen,
    make_packed_layout,
    use_varlen_attention,
)
from courtside.engines.patches.fused_layers import FusedLayers
from courtside.engines.patches.patch import apply_patches
from courtside.engines.probes import (
    attn_implementation,
    distance_from_plain_forward,
    find_unsupported_attention,
    run_probe,
    windows_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPasses:
    """How sequences become passes of one model."""

    model: Any
    pad_id: int
    padding_reason: str | None
    """Why they are padded; None: they are packed."""
    unshared_reason: str | None = None
    """Why packed sequences that begin alike do not share their beginning; None: they do."""
    fused_layers: FusedLayers | None = None

    def plan_batches(
        self,
        units: Sequence[Sequence[Sequence[int]]],
        max_tokens: int,
        *,
        max_shared_tokens: int | None = None,
        for_backward: bool = False,
    ) -> list[list[int]]:
        """Indices by pass of units, the sequences of which must share a pass; longest first. Each
        pass computes at most `max_tokens`; `batch_by_prefix` has the other two."""
        if self.padding_reason is not None:
            sizes = [len(unit) * max(len(ids) for ids in unit) for unit in units]
            return batch_by_length(sizes, max_tokens)
        if self.unshared_reason is not None:
            return batch_by_size([sum(len(ids) for ids in unit) for unit in units], max_tokens)
        return batch_by_prefix(
            units, max_tokens, max_shared_tokens=max_shared_tokens, for_backward=for_backward
        )

    @contextmanager
    def patch_model(self) -> Iterator[None]:
        """What `forward` wants around it, and around a backward pass through what it gave."""
        with (
            apply_patches(() if self.fused_layers is None else self.fused_layers.patches()),
            use_varlen_attention(self.model) if self.padding_reason is None else nullcontext(),
        ):
            yield

    def forward(
        self, sequences: Sequence[Sequence[int]], *, cache: Cache | None = None
    ) -> tuple[Tensor, Sequence[SequenceSpan]]:
        """Last hidden states [positions, D] of one pass, and where each sequence lies there.

        `cache` gets the keys and values of a packed pass: see `engines/forward/tree_scoring.py`.
        """
        if self.padding_reason is None:
            return forward_packed(self.model, sequences, cache, shared=self.unshared_reason is None)
        assert cache is None, "those of a padded pass lie elsewhere"
        ids_BL = pad_right(sequences, self.pad_id, self.model.device)
        out = self.model.base_model(input_ids=ids_BL, use_cache=False)
        longest = ids_BL.shape[1]
        places = [SequenceSpan(start=row * longest) for row in range(len(ids_BL))]
        return out.last_hidden_state.flatten(0, 1), places


def forward_packed(
    model: Any,
    sequences: Sequence[Sequence[int]],
    kept: Cache | None = None,
    *,
    shared: bool = False,
) -> tuple[Tensor, Sequence[SequenceSpan]]:
    row = pack_sequences(sequences, shared=shared)
    packing = make_packed_layout(row, device=model.device)
    ids = [token for part in row.parts for token in part.ids]
    position = [part.first + n for part in row.parts for n in range(len(part.ids))]
    return forward_varlen(model, ids, position, packing, kept), row.places


# ── tried on a small example ─────────────────────────────────────────────────────────────────────


def probe_forward_passes(
    model: Any, *, pad_id: int, fused_layers: FusedLayers | None = None, uses_dropout: bool = False
) -> ForwardPasses:
    """How sequences become passes of this model, tried out. `uses_dropout`: they are to be read in
    training mode, and something is then left out at random. The model must not be in it yet."""
    problem = probe_packing(model)
    unshared = None
    if problem is None:
        # One beginning would have one draw, where samples of their own have one each.
        unshared = "dropout acts on each sample" if uses_dropout else probe_prefix_sharing(model)
    return ForwardPasses(
        model=model,
        pad_id=pad_id,
        padding_reason=problem,
        unshared_reason=unshared,
        fused_layers=fused_layers,
    )


def probe_packing(model: Any) -> str | None:
    """Why passes of this model are padded; None: they can be packed.

    Beside the settings a tiny example is tried, because a model may do as it likes with what it is
    given. The model must not be in training mode: dropout would act.
    """
    why = find_unsupported_attention(model)
    if why is not None:
        return why
    if attn_implementation(model) != "sdpa":
        return f"attn_implementation = {attn_implementation(model)!r} was asked for"
    if any(window is not None for window in windows_of(model).values()):
        return "it looks through a window"
    assert not model.training, "dropout would act"
    return run_probe(model, lambda: _example_error(model, (5, 1, 12, 24), 0))


def probe_prefix_sharing(model: Any) -> str | None:
    """Why sequences of a model whose passes can be packed do not share their beginnings."""
    assert not model.training, "dropout would act"
    return run_probe(model, lambda: _example_error(model, (0, 1, 6, 30), MIN_PREFIX_TOKENS + 3))


@torch.no_grad()
def _example_error(model: Any, lengths: Sequence[int], num_common: int) -> float:
    """How far the hidden states of packed sequences are from those of passes of their own. They
    have `common_prefix_length` ids in common, then these many each."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    common = [(11 * i + 2) % vocab_size for i in range(num_common)]
    sequences = [[*common, *((7 * i + n) % vocab_size for i in range(1, n + 1))] for n in lengths]
    with use_varlen_attention(model):
        packed_ND, places = forward_packed(model, sequences, shared=num_common > 0)
    assert len(packed_ND) == num_common + sum(lengths)
    return max(
        # Of a rest only: the median over a long beginning would not see it.
        distance_from_plain_forward(
            model, ids, packed_ND[place.of(range(num_common if n else 0, len(ids)))]
        )
        for place, ids, n in zip(places, sequences, lengths, strict=True)
    )
