"""How the in-process engine samples: by CUDA graphs, over a KV cache, from recurrent states, or one
row at a time, as probes of the model say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from courtside.engines.base import (
    SampleRequest,
    Sampling,
    Session,
    StatelessSession,
)
from courtside.engines.forward.batching import default_pass_tokens
from courtside.engines.forward.forward import ForwardPasses, probe_forward_passes
from courtside.engines.forward.state_passes import StatePasses
from courtside.engines.forward.state_probe import probe_state_passes
from courtside.engines.generation.continuous_batching import ContinuousBatchingSession
from courtside.engines.generation.cuda_graphs import CudaGraphs
from courtside.engines.generation.decode_probe import probe_decoding, probe_state_decoding
from courtside.engines.generation.decode_weights import DecodeWeights
from courtside.engines.generation.eager_probe import DecodePath, choose_decode_path
from courtside.engines.generation.kv_cache import POSITION_STEP, KVCachePool
from courtside.engines.generation.left_padded import LeftPaddedBatch
from courtside.engines.generation.recurrent_session import RecurrentBatch, RecurrentSession
from courtside.engines.generation.sampler import SampleBuffer
from courtside.engines.generation.session import CachedSession, decode
from courtside.engines.generation.state_batching import StateBatchingSession
from courtside.engines.generation.uncached import DecodeBatch, SeparateRows, UncachedRows
from courtside.engines.lm_head import find_lm_head
from courtside.engines.loading import expose_base_model, find_context_length, find_eos_ids
from courtside.engines.patches.experts import find_capture_problem
from courtside.engines.patches.fused_layers import find_fused_layers
from courtside.engines.probes import (
    find_unsupported_attention,
    probe_causality,
    probe_kv_cache,
)
from courtside.engines.rope import fix_rope
from courtside.engines.routing import Routers, find_routers
from courtside.errors import ModelError
from courtside.progress import ProgressMeter
from courtside.types import Sample


class LocalSampler:
    """A model in this process, on CPU or GPU."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        vocab_size: int | None = None,
        context_length: int | None = None,
        autocast: torch.dtype | None = None,
        max_batch_tokens: int = 65536,
        progress: ProgressMeter | None = None,
    ):
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.name = name
        self.device = model.device
        self.num_parameters = sum(p.numel() for p in model.parameters())
        expose_base_model(model)
        self.context_length = find_context_length(model.config, context_length)
        fix_rope(model, self.context_length)
        self.autocast = autocast
        """Compute dtype of forward passes where it is not the weights' own."""
        self.autocast_context = self._make_autocast()
        self.head = find_lm_head(model, vocab_size=vocab_size)
        self._check_causality()
        self.max_batch_tokens = max_batch_tokens
        self.progress = progress or ProgressMeter()
        self.score_batch_tokens = min(max_batch_tokens, default_pass_tokens(self.device))
        self.eos_ids = find_eos_ids(model.generation_config, tokenizer)
        self.pad_id = min(self.eos_ids)

    def _check_causality(self) -> None:
        with self.autocast_context():
            reason = probe_causality(self.model)
        if reason is not None:
            raise ModelError(
                f"{self.name} ({type(self.model).__name__}) is no causal language model: later "
                f"tokens change what it computes for earlier ones, or it cannot run without other "
                f"inputs ({reason}). Use a decoder for text; a BERT-like one needs is_decoder = "
                "true in its config.json, and weights that were trained so"
            )

    def _make_autocast(self, **options: Any) -> Callable[[], AbstractContextManager[Any]]:
        if self.autocast is None:
            return nullcontext
        return partial(torch.autocast, self.device.type, dtype=self.autocast, **options)

    def check_length(self, length: int) -> None:
        if length > self.context_length:
            raise ModelError(
                f"{length} tokens do not fit the context of {self.name} ({self.context_length}). "
                "Shorten the prompts or rollout.max_new_tokens; nothing is cut silently"
            )

    @cached_property
    def passes(self) -> ForwardPasses:
        """How sequences are batched; its `padding_reason` says why they are not packed."""
        with self.autocast_context():
            fused_layers = find_fused_layers(self.model, self.head, self.autocast)
            return probe_forward_passes(
                self.model,
                pad_id=self.pad_id,
                fused_layers=fused_layers,
                routers=self.recorded_routers,
            )

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        lengths = [len(r.prompt_ids) + sampling.max_new_tokens for r in requests]
        for length in lengths:
            self.check_length(length)
        if not requests:
            return []
        # Longest first, and samples of one prompt as neighbors: they share its prefill.
        order = sorted(range(len(requests)), key=lambda i: (-lengths[i], requests[i].prompt_ids, i))
        ordered = [requests[i] for i in order]
        if self.uses_continuous_batching:
            row_tokens = max(lengths) + self.row_state_tokens
            num_rows = min(len(ordered), max(1, self.max_batch_tokens // row_tokens))
            session = self._continuous_batching(num_rows, max(lengths))
            samples = session.sample_all(ordered, sampling)
        else:
            samples = []
            while len(samples) < len(ordered):
                start = len(samples)
                row_tokens = lengths[order[start]] + self.row_state_tokens
                end = start + max(1, self.max_batch_tokens // row_tokens)
                samples += self._sample_batch(ordered[start:end], sampling)
        by_request = dict(zip(order, samples, strict=True))
        return [by_request[i] for i in range(len(requests))]

    def _sample_batch(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        num_rows = len(requests)
        if self.stateless_reason is None:
            return self.session(num_rows).sample(range(num_rows), requests, sampling)
        if self.state_passes is not None:
            session = self._recurrent_session(num_rows, self.state_passes, retain_states=False)
            return session.sample(range(num_rows), requests, sampling)
        prompts = [request.prompt_ids for request in requests]
        with self.autocast_context():
            batch = self.decode_batch(prompts)
            return decode(
                batch.order, batch.prefill(), batch.advance, requests=requests, sampling=sampling,
                head=self.head, buffer=self.make_buffer(num_rows, sampling),
            )  # fmt: skip

    def decode_batch(self, prompts: Sequence[tuple[int, ...]]) -> DecodeBatch:
        """Prompts that are decoded eagerly; inside autocast."""

        def left_padded(prompts: Sequence[tuple[int, ...]]) -> DecodeBatch:
            return LeftPaddedBatch(self.model, prompts, pad_id=self.pad_id)

        if self.state_passes is not None:
            return RecurrentBatch(self.state_passes, prompts)
        path, _ = self.decode_path
        if path == "left_padded":
            return left_padded(prompts)
        if path == "separate_rows":
            return SeparateRows(prompts, left_padded)
        return UncachedRows(self.passes, prompts, max_tokens=self.score_batch_tokens)

    @cached_property
    def decode_path(self) -> tuple[DecodePath, str | None]:
        """How `decode_batch` decodes, and why not in one padded batch."""
        with self.autocast_context():
            return choose_decode_path(self.model, pad_id=self.pad_id)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    def session(self, num_rows: int, *, row_capacity: int | None = None) -> Session:
        """Multi-turn conversations, one per row."""
        if self.uses_continuous_batching:
            return self._continuous_batching(num_rows, row_capacity or POSITION_STEP)
        if self.state_passes is not None:
            return self._recurrent_session(num_rows, self.state_passes)
        if self.stateless_reason is not None:
            return StatelessSession(self.sample, num_rows=num_rows, note=self.stateless_reason)
        return CachedSession(
            self.model,
            self.head,
            num_rows=num_rows,
            row_capacity=row_capacity or 0,
            make_buffer=self.make_buffer,
            autocast_context=self.autocast_context,
            routers=self.recorded_routers,
        )

    @cached_property
    def routers(self) -> Routers | str | None:
        """Of a mixture of experts; a text: why its routing can be neither recorded nor replayed."""
        with self.autocast_context():
            return find_routers(self.model)

    @property
    def recorded_routers(self) -> Routers | None:
        return self.routers if isinstance(self.routers, Routers) else None

    def _recurrent_session(
        self, num_rows: int, passes: StatePasses, *, retain_states: bool = True
    ) -> RecurrentSession:
        return RecurrentSession(
            passes,
            self.head,
            num_rows=num_rows,
            make_buffer=self.make_buffer,
            autocast_context=self.autocast_context,
            retain_states=retain_states,
        )

    @property
    def state_passes(self) -> StatePasses | None:
        """How a recurrent or hybrid model continues from saved states; None: it has only a KV
        cache, or states that do not continue a sequence."""
        passes = self._probed_states
        return passes if isinstance(passes, StatePasses) else None

    @cached_property
    def row_state_tokens(self) -> int:
        """See `Capabilities`."""
        if find_unsupported_attention(self.model) is None:  # without a probe, for models with KV
            return 0
        return 0 if self.state_passes is None else self.state_passes.row_state_tokens

    @cached_property
    def _probed_states(self) -> StatePasses | str | None:
        """With the reason where they do not continue a sequence."""
        if self.stateless_reason is None:
            return None
        with self.autocast_context():
            return probe_state_passes(self.model)

    def _continuous_batching(self, num_rows: int, row_capacity: int) -> ContinuousBatchingSession:
        make: Any = ContinuousBatchingSession
        if isinstance(self.static_states, StatePasses):
            make = partial(StateBatchingSession, passes=self.static_states)
        session: ContinuousBatchingSession = make(
            self.model,
            self.head,
            pool=self._kv_pool,
            weights=self._decode_weights,
            num_rows=num_rows,
            row_capacity=row_capacity,
            make_buffer=self.make_buffer,
            # Without autocast's weight cache: a CUDA graph would go on with the cached weights.
            autocast_context=self._make_autocast(cache_enabled=False),
            routers=self.recorded_routers,
        )
        return session

    @cached_property
    def uses_continuous_batching(self) -> bool:
        """Whether decode steps run at fixed addresses, for CUDA graphs: on a GPU, with a standard
        KV cache or states of fixed shapes."""
        if self.device.type != "cuda":
            return False
        if self.state_passes is not None:
            return isinstance(self.static_states, StatePasses)
        return self.stateless_reason is None

    @cached_property
    def static_states(self) -> StatePasses | str | None:
        """How a recurrent or hybrid model decodes from states at fixed addresses, or why it cannot;
        None: it has no states."""
        if self.state_passes is None:
            return None
        with self._make_autocast(cache_enabled=False)():
            return probe_state_decoding(self.state_passes, self.autocast, self._make_graphs())

    @cached_property
    def capture_problem(self) -> str | None:
        """Why CUDA graphs cannot replay a decode step of this model; None: they can."""
        return find_capture_problem(self.model, self.autocast)

    def _make_graphs(self) -> CudaGraphs | None:
        if self.device.type != "cuda" or self.capture_problem is not None:
            return None
        return CudaGraphs()

    @cached_property
    def _kv_pool(self) -> KVCachePool:
        return KVCachePool(
            self.model,
            self.autocast,
            graphs=self._make_graphs(),
            passes=self.static_states if isinstance(self.static_states, StatePasses) else None,
            release_weights=self._decode_weights.release,
        )

    @cached_property
    def _decode_weights(self) -> DecodeWeights:
        return DecodeWeights(self.model, self.head, self.autocast)

    @cached_property
    def stateless_reason(self) -> str | None:
        """Why this model's KV cache cannot persist between turns; None: it can."""
        with self.autocast_context():
            reason = probe_kv_cache(self.model)
            if reason is None and self.device.type == "cuda":
                reason = probe_decoding(self.model, self.autocast)
            return reason

    @property
    def make_buffer(self) -> Callable[[int, Sampling], SampleBuffer]:
        return partial(
            SampleBuffer,
            eos=self.eos_ids,
            tokenizer=self.tokenizer,
            progress=self.progress,
        )
