"""The engine in process: any causal language model of transformers, on CPU or GPU.

Sampling: each distinct prompt is read once and its keys and values serve all its samples; finished
rows leave the batch. Scoring: sequences are packed into passes without padding, and logits
exist for a chunk of scored positions at a time; turns with hints are scored as branches of one
trunk. Training happens elsewhere, on the same model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from courtside.engines.base import (
    BranchRequest,
    BranchScores,
    Capabilities,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    Session,
    Want,
)
from courtside.engines.forward.batching import batch_by_length, default_pass_tokens, pad_left
from courtside.engines.forward.forward import ForwardPasses, probe_forward_passes
from courtside.engines.forward.logprobs import score_positions
from courtside.engines.forward.padded_tree_scoring import (
    Read,
    branching_problem,
    read_padded,
)
from courtside.engines.forward.tree_scoring import probe_tree_scoring, score_packed_branches
from courtside.engines.generation.continuous_batching import ContinuousBatchingSession
from courtside.engines.generation.decode_weights import DecodeWeights
from courtside.engines.generation.kv_cache import POSITION_STEP, KVCachePool
from courtside.engines.generation.outputs import SampleBuffer
from courtside.engines.generation.sampler import sample_tokens, uniforms_for
from courtside.engines.generation.session import CachedSession
from courtside.engines.lm_head import find_lm_head
from courtside.engines.patches.fused_layers import find_fused_layers
from courtside.engines.patches.onednn_prepack import prepack_if_faster
from courtside.engines.probes import windows_of
from courtside.engines.stateless import StatelessSession, score_branches_separately
from courtside.errors import ModelError
from courtside.types import Sample


class LocalEngine:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        vocab_size: int | None = None,
        autocast: torch.dtype | None = None,
        max_batch_tokens: int = 65536,
    ):
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.name = name
        self.device = model.device
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.head = find_lm_head(model, vocab_size=vocab_size)
        self.autocast = autocast
        """Arithmetic of the forward pass where it is not that of the weights."""
        self.max_batch_tokens = max_batch_tokens
        self.score_batch_tokens = min(max_batch_tokens, default_pass_tokens(self.device))
        settings: Any = model.config.get_text_config()
        self.context_length = int(getattr(settings, "max_position_embeddings", 2**31))
        self.eos_ids = find_eos_ids(model, tokenizer)
        self.pad_id = min(self.eos_ids)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            top_k=self.head.vocab_size, hidden_states=True, branches=True, weight_updates=True
        )

    def load_weights(self, version: int) -> None:
        """Nothing to copy: the model is the trainer's own module."""

    def notes(self) -> list[str]:
        notes = []
        if self.passes.padding_reason is not None:
            notes.append(f"{self.name}: passes are padded ({self.passes.padding_reason})")
        elif self.passes.unshared_reason is not None:
            notes.append(
                f"{self.name}: every sample reads its own prompt ({self.passes.unshared_reason})"
            )
        if self.device.type == "cuda" and not self.uses_continuous_batching:
            notes.append(
                f"{self.name}: samples token by token, without a graph ({self.stateless_reason})"
            )
        return notes

    def autocast_context(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _uncached_autocast(self) -> Any:
        """Without keeping rounded weights: a graph that held one would decode with old ones."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=False)

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        lengths = [len(r.prompt_ids) + sampling.max_new_tokens for r in requests]
        for length in lengths:
            self._check_length(length)
        # Longest first, and samples of one prompt as neighbours: their prompt is read once.
        order = sorted(range(len(requests)), key=lambda i: (-lengths[i], requests[i].prompt_ids, i))
        asked = [requests[i] for i in order]
        written: list[Sample] = []
        if asked and self.uses_continuous_batching:
            num_rows = min(len(asked), max(1, self.max_batch_tokens // max(lengths)))
            written = self._slots(num_rows, max(lengths)).sample_all(asked, sampling)
        else:
            batches = batch_by_length([lengths[i] for i in order], self.max_batch_tokens)
            for batch in batches:
                part = [asked[i] for i in batch]
                if self.stateless_reason is None:
                    written += self.session(len(part)).sample(range(len(part)), part, sampling)
                else:
                    with self.autocast_context():
                        written += self._decode(part, sampling)
        found = dict(zip(order, written, strict=True))
        return [found[i] for i in range(len(requests))]

    def _decode(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        """For models whose keys and values have a will of their own: one padded batch, eagerly."""
        prompts = list(dict.fromkeys(request.prompt_ids for request in requests))
        ids_PL, mask_PL = pad_left(prompts, self.pad_id, self.device)
        cache: Any = _roomy_cache(self.model.config, ids_PL.shape[1] + sampling.max_new_tokens)
        out = self.model.base_model(
            input_ids=ids_PL,
            attention_mask=mask_PL,
            position_ids=(mask_PL.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        )
        # From here on a row is a sample: the prompt's cache is handed to each of its samples.
        of_prompt = {prompt: i for i, prompt in enumerate(prompts)}
        take = torch.tensor([of_prompt[request.prompt_ids] for request in requests])
        take = take.to(self.device)
        hidden_BD = out.last_hidden_state[:, -1][take]
        cache.batch_select_indices(take)
        mask_BL = mask_PL[take]
        length_B = mask_BL.sum(-1)
        padded = not bool(mask_PL.all())

        uniform_BN = torch.stack([uniforms_for(r.seed, sampling.max_new_tokens) for r in requests])
        uniform_BN = uniform_BN.to(self.device)
        drawn = self._record(len(requests), sampling)
        alive = list(range(len(requests)))
        for n in range(sampling.max_new_tokens):
            ids_B, logp_B = sample_tokens(self.head(hidden_BD), uniform_BN[alive, n], sampling)
            going = drawn.add(alive, ids_B.tolist(), logp_B.tolist())
            if not going or n + 1 == sampling.max_new_tokens:
                break
            if len(going) < len(alive):
                keep = torch.tensor(going, device=self.device)
                alive = [alive[i] for i in going]
                cache.batch_select_indices(keep)
                ids_B, mask_BL, length_B = ids_B[keep], mask_BL[keep], length_B[keep]
            if padded:
                mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(alive), 1)], dim=-1)
            out = self.model.base_model(
                input_ids=ids_B[:, None],
                attention_mask=mask_BL if padded else None,
                position_ids=(length_B + n)[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            hidden_BD = out.last_hidden_state[:, -1]
        return drawn.samples()

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def score(
        self, requests: Sequence[ScoreRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[Scores]:
        """Log-probs of the scored tokens and what else is wanted, in packed passes."""
        for request in requests:
            assert not request.scored[0], "nothing predicts the first token"
            self._check_length(len(request.token_ids))
        results: dict[int, Scores] = {}
        passes = self.passes
        with self._scoring(), passes.patch_model():
            for batch in passes.plan_batches(
                [[request.token_ids] for request in requests],
                self.score_batch_tokens,
                max_shared_tokens=self.max_batch_tokens,
            ):
                asked = [requests[i] for i in batch]
                hidden_ND, lying = passes.forward([request.token_ids for request in asked])
                found = score_positions(self.head, hidden_ND, lying, asked, want=want, top_k=top_k)
                results.update(zip(batch, found, strict=True))
        return [results[i] for i in range(len(requests))]

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        with self.autocast_context(), prepack_if_faster(self.model, self.head):
            yield

    @cached_property
    def passes(self) -> ForwardPasses:
        """How sequences become passes of the model; its `problem` says why they are padded."""
        with self.autocast_context():
            parts = find_fused_layers(self.model, self.head, self.autocast)
            return probe_forward_passes(self.model, pad_id=self.pad_id, fused_layers=parts)

    def session(self, num_rows: int, *, row_capacity: int | None = None) -> Session:
        """Conversations that go on over several calls, one a row."""
        if self.stateless_reason is not None:
            return StatelessSession(self.sample, num_rows=num_rows, note=self.stateless_reason)
        if self.uses_continuous_batching:
            return self._slots(num_rows, row_capacity or POSITION_STEP)
        return CachedSession(
            self.model,
            self.head,
            num_rows=num_rows,
            record=self._record,
            autocast_context=self.autocast_context,
        )

    def _slots(self, num_rows: int, row_capacity: int) -> ContinuousBatchingSession:
        return ContinuousBatchingSession(
            self.model,
            self.head,
            pool=self._pool,
            lent=self._lent,
            num_rows=num_rows,
            row_capacity=row_capacity,
            record=self._record,
            autocast_context=self._uncached_autocast,
        )

    @cached_property
    def uses_continuous_batching(self) -> bool:
        """Whether decoding replays a graph: on a GPU, where keys and values are plain ones."""
        return self.device.type == "cuda" and self.stateless_reason is None

    @cached_property
    def _pool(self) -> KVCachePool:
        return KVCachePool(self.model, self.autocast, self._lent.release)

    @cached_property
    def _lent(self) -> DecodeWeights:
        return DecodeWeights(self.model, self.head, self.autocast)

    @cached_property
    def stateless_reason(self) -> str | None:
        """Why keys and values of this model cannot be kept from turn to turn; None: they can."""
        windowed = any(window is not None for window in windows_of(self.model).values())
        return self.branching_problem or ("it looks through a window" if windowed else None)

    def _record(self, num_rows: int, sampling: Sampling) -> SampleBuffer:
        return SampleBuffer(num_rows, self.eos_ids, sampling, self.tokenizer)

    @cached_property
    def branching_problem(self) -> str | None:
        """Why branches take a pass each on this model; None: they share one."""
        with self.autocast_context():
            return branching_problem(self.model)

    @torch.no_grad()
    def score_branches(
        self, requests: Sequence[BranchRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[BranchScores]:
        """Turns again, with hints above them: each trajectory is read once for all of its own."""
        if self.branching_problem is not None:
            return score_branches_separately(
                self, requests, want=want, top_k=top_k, note=self.branching_problem
            )
        for r in requests:
            self._check_length(max([r.num_read, *(b.splice + len(b.scored) for b in r.branches)]))
        results: dict[int, BranchScores] = {}
        with self._scoring():
            for read in self._read_branches(requests):
                # Apart: whoever keeps hidden states of branches need not keep those of trunks.
                trunks, branches = (
                    iter(score_positions(self.head, read.hidden_ND, *asked, want=want, top_k=top_k))
                    for asked in (read.trunks, read.branches)
                )
                for index in read.indices:
                    request = requests[index]
                    results[index] = BranchScores(
                        trunk=None if request.scored is None else next(trunks),
                        branches=tuple(next(branches) for _ in request.branches),
                    )
        return [results[i] for i in range(len(requests))]

    def _read_branches(self, requests: Sequence[BranchRequest]) -> Iterator[Read]:
        size = self.score_batch_tokens
        if self.tree_padding_reason is not None:
            return read_padded(self.model, requests, pad_id=self.pad_id, max_tokens=size)
        return score_packed_branches(
            self.passes, requests, max_tokens=size, max_shared_tokens=self.max_batch_tokens
        )

    @cached_property
    def tree_padding_reason(self) -> str | None:
        """Why the trunks of branches are padded; None: they are packed, as other passes are."""
        with self.autocast_context():
            return self.passes.padding_reason or probe_tree_scoring(self.model)

    def _check_length(self, length: int) -> None:
        if length > self.context_length:
            raise ModelError(
                f"{length} tokens do not fit the context of {self.name} ({self.context_length}). "
                "Shorten the prompts or rollout.max_new_tokens; nothing is cut silently"
            )


def find_eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer, by the generation settings and by the tokenizer."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ModelError(
            "neither the tokenizer nor the generation settings name an end token, so no answer "
            "would ever end. Set eos_token in tokenizer_config.json"
        )
    return frozenset(ids)


class _RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that writes into room reserved once, where the stock one copies every step."""

    is_initialized: bool

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        B, H, new, D = key_states.shape
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.room_k = key_states.new_empty(B, H, self.capacity, D)
            self.room_v = value_states.new_empty(B, H, self.capacity, value_states.shape[-1])
            self.is_initialized = True
        end = self.length + new
        self.room_k[:, :, self.length : end] = key_states
        self.room_v[:, :, self.length : end] = value_states
        self.length = end
        self.keys, self.values = self.room_k[:, :, :end], self.room_v[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        self.room_k, self.room_v = self.room_k[indices], self.room_v[indices]
        self.keys, self.values = self.room_k[:, :, : self.length], self.room_v[:, :, : self.length]


def _roomy_cache(config: Any, capacity: int) -> DynamicCache:
    cache = DynamicCache(config=config)
    # Sliding-window and other special layers keep their own kind.
    cache.layers = [
        _RoomyLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache
