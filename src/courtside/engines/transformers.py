"""The engine in process: any causal language model of transformers, on CPU or GPU.

Sampling: each distinct prompt is read once and its keys and values serve all its samples; finished
rows leave the batch. Scoring: sequences are sorted by length and padded on the right, and logits
exist for a chunk of scored positions at a time; turns with hints are scored as branches of one
trunk. Training happens elsewhere, on the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from courtside.engines.attention import windows_of
from courtside.engines.base import (
    BranchRequest,
    BranchScores,
    Head,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
)
from courtside.engines.batching import batches_by_length, pad_left, pad_right, pass_tokens
from courtside.engines.branches import branching_problem, read_branches, score_branches_separately
from courtside.engines.drawn import Drawn
from courtside.engines.graphs import Decoders
from courtside.engines.sampling import draw, uniforms
from courtside.engines.session import KeptSession, RereadingSession
from courtside.errors import ModelError
from courtside.types import Sample


class TransformersEngine:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        num_words: int | None = None,
        autocast: torch.dtype | None = None,
        max_batch_tokens: int = 65536,
    ):
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.name = name
        self.device = model.device
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.head = head_of(model, num_words=num_words)
        self.autocast = autocast
        """Arithmetic of the forward pass where it is not that of the weights."""
        self.max_batch_tokens = max_batch_tokens
        self.score_batch_tokens = min(max_batch_tokens, pass_tokens(self.device))
        settings: Any = model.config.get_text_config()
        self.context_length = int(getattr(settings, "max_position_embeddings", 2**31))
        self.eos_ids = eos_ids(model, tokenizer)
        self.pad_id = min(self.eos_ids)
        self.decoders = Decoders(model, self.head) if self.device.type == "cuda" else None

    def casting(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.prompt_ids, []).append(index)
        prompts = list(groups)
        for prompt in prompts:
            self._check_length(len(prompt) + sampling.max_new_tokens)
        samples: list[Sample | None] = [None] * len(requests)
        # On a GPU, a graph decodes a batch that is read in one piece.
        in_session = self.decoders is None and self.rereads is None
        for rows in self._decode_batches(prompts, groups, sampling):
            if in_session:
                asked = [requests[row] for row in rows]
                written = self.session(len(rows)).sample(range(len(rows)), asked, sampling)
            else:
                with self.casting():
                    written = self._decode(rows, requests, sampling)
            for index, sample in zip(rows, written, strict=True):
                samples[index] = sample
        return [sample for sample in samples if sample is not None]

    def _decode_batches(
        self,
        prompts: list[tuple[int, ...]],
        groups: dict[tuple[int, ...], list[int]],
        sampling: Sampling,
    ) -> list[list[int]]:
        # Samples of one prompt stay neighbours, so that their prompt is read once.
        order = sorted(prompts, key=lambda prompt: (-len(prompt), prompt))
        indices = [index for prompt in order for index in groups[prompt]]
        lengths = [len(p) + sampling.max_new_tokens for p in order for _ in groups[p]]
        return [
            [indices[i] for i in batch]
            for batch in batches_by_length(lengths, self.max_batch_tokens)
        ]

    def _decode(
        self, rows: list[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        prompts = list(dict.fromkeys(requests[row].prompt_ids for row in rows))
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
        take = torch.tensor([of_prompt[requests[row].prompt_ids] for row in rows])
        take = take.to(self.device)
        hidden_BD = out.last_hidden_state[:, -1][take]
        cache.batch_select_indices(take)
        mask_BL = mask_PL[take]
        length_B = mask_BL.sum(-1)
        padded = not bool(mask_PL.all())

        uniform_BN = torch.stack(
            [uniforms(requests[r].seed, sampling.max_new_tokens) for r in rows]
        )
        uniform_BN = uniform_BN.to(self.device)
        drawn = self._record(len(rows), sampling)
        if self.decoders is not None and all(type(x) is _RoomyLayer for x in cache.layers):
            self._replay(cache, hidden_BD, mask_BL, uniform_BN, sampling, drawn)
            return drawn.samples()
        alive = list(range(len(rows)))
        for n in range(sampling.max_new_tokens):
            ids_B, logp_B = draw(self.head(hidden_BD), uniform_BN[alive, n], sampling)
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

    def _replay(
        self,
        cache: Any,
        hidden_BD: Tensor,
        mask_BL: Tensor,
        uniform_BN: Tensor,
        sampling: Sampling,
        drawn: Drawn,
    ) -> None:
        """The same loop as a CUDA graph."""
        assert self.decoders is not None
        ids_B, logp_B = draw(self.head(hidden_BD), uniform_BN[:, 0], sampling)
        alive = list(range(len(ids_B)))
        alive = [alive[i] for i in drawn.add(alive, ids_B.tolist(), logp_B.tolist())]
        rooms = [(layer.room_k, layer.room_v) for layer in cache.layers]
        # Casts of the weights belong into the graph: a cached one would be of another step.
        with torch.autocast(
            self.device.type,
            dtype=self.autocast or torch.bfloat16,
            enabled=self.autocast is not None,
            cache_enabled=False,
        ):
            decoder = self.decoders.get(rooms, sampling)
            decoder.load(rooms, mask_BL=mask_BL, ids_B=ids_B, uniform_BN=uniform_BN)
            for ids_NB, logp_NB in decoder.run(sampling.max_new_tokens):
                for ids, logps in zip(ids_NB.tolist(), logp_NB.tolist(), strict=True):
                    going = drawn.add(alive, [ids[i] for i in alive], [logps[i] for i in alive])
                    alive = [alive[i] for i in going]
                if not alive:
                    break

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def score(
        self, requests: Sequence[ScoreRequest], *, hidden: bool = False, top_k: int = 0
    ) -> list[Scores]:
        """Log-probs of the scored tokens; on request their hidden states or the k best words."""
        for request in requests:
            assert not request.scored[0], "nothing predicts the first token"
            self._check_length(len(request.token_ids))
        results: dict[int, Scores] = {}
        lengths = [len(request.token_ids) for request in requests]
        with self.casting():
            for batch in batches_by_length(lengths, self.score_batch_tokens):
                ids_BL = pad_right([requests[i].token_ids for i in batch], self.pad_id, self.device)
                out = self.model.base_model(input_ids=ids_BL, use_cache=False)
                for row, index in enumerate(batch):
                    results[index] = self._scores(
                        out.last_hidden_state[row], requests[index], hidden=hidden, top_k=top_k
                    )
        return [results[i] for i in range(len(requests))]

    def session(self, num_rows: int) -> KeptSession | RereadingSession:
        """Conversations that go on over several calls, one a row."""
        if self.rereads is not None:
            return RereadingSession(self.sample, num_rows=num_rows, note=self.rereads)
        return KeptSession(
            self.model, self.head, num_rows=num_rows, record=self._record, casting=self.casting
        )

    @cached_property
    def rereads(self) -> str | None:
        """Why keys and values of this model cannot be kept from turn to turn; None: they can."""
        windowed = any(window is not None for window in windows_of(self.model).values())
        return self.branching_problem or ("it looks through a window" if windowed else None)

    def _record(self, num_rows: int, sampling: Sampling) -> Drawn:
        return Drawn(num_rows, self.eos_ids, sampling, self.tokenizer)

    @cached_property
    def branching_problem(self) -> str | None:
        """Why branches take a pass each on this model; None: they share one."""
        with self.casting():
            return branching_problem(self.model)

    @torch.no_grad()
    def score_branches(
        self, requests: Sequence[BranchRequest], *, hidden: bool = False, top_k: int = 0
    ) -> list[BranchScores]:
        """Turns again, with hints above them: each trajectory is read once for all of its own."""
        if self.branching_problem is not None:
            return score_branches_separately(
                self, requests, hidden=hidden, top_k=top_k, note=self.branching_problem
            )
        for r in requests:
            self._check_length(max([r.num_read, *(b.splice + len(b.scored) for b in r.branches)]))
        results: dict[int, BranchScores] = {}
        with self.casting():
            for index, trunk, branches in read_branches(
                self.model, requests, pad_id=self.pad_id, max_tokens=self.score_batch_tokens
            ):
                results[index] = BranchScores(
                    trunk=self._scores(*trunk, hidden=hidden, top_k=top_k) if trunk else None,
                    branches=tuple(self._scores(*b, hidden=hidden, top_k=top_k) for b in branches),
                )
        return [results[i] for i in range(len(requests))]

    def _scores(
        self, hidden_LD: Tensor, request: ScoreRequest, *, hidden: bool, top_k: int
    ) -> Scores:
        where = [i for i, scored in enumerate(request.scored) if scored]
        before_T = torch.tensor(where, dtype=torch.long, device=self.device) - 1
        ids_T = torch.tensor([request.token_ids[i] for i in where], device=self.device)
        hidden_TD = hidden_LD[before_T]
        logp: list[Tensor] = []
        top: list[Any] = []
        for part_ND, part_N in zip(
            hidden_TD.split(_CHUNK), ids_T.long().split(_CHUNK), strict=True
        ):
            logits_NV = self.head(part_ND) / request.temperature
            total_N1 = logits_NV.logsumexp(-1, keepdim=True)
            logp.append((logits_NV.gather(-1, part_N[:, None]) - total_N1).squeeze(-1))
            if top_k:
                best = logits_NV.topk(top_k, dim=-1)
                top.append((best.indices, best.values - total_N1))
        return Scores(
            logp_T=torch.cat(logp) if logp else hidden_LD.new_zeros(0, dtype=torch.float32),
            hidden_TD=hidden_TD if hidden else None,
            top_ids_TK=torch.cat([ids for ids, _ in top]) if top else None,
            top_logp_TK=torch.cat([logps for _, logps in top]) if top else None,
        )

    def _check_length(self, length: int) -> None:
        if length > self.context_length:
            raise ModelError(
                f"{length} tokens do not fit the context of {self.name} ({self.context_length}). "
                "Shorten the prompts or rollout.max_new_tokens; nothing is cut silently"
            )


_CHUNK = 512
"""Positions whose logits exist at once while scoring."""


def head_of(model: Any, *, num_words: int | None = None) -> Head:
    """The map from last hidden states to logits, checked against the model's own logits."""
    module = model.get_output_embeddings()
    if module is None or not hasattr(module, "weight"):
        raise ModelError(f"{type(model).__name__} has no linear output head that can be used")
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    head = Head(
        module,
        num_words=module.weight.shape[0],
        softcap=getattr(config, "final_logit_softcapping", None),
        scale=scale,
    )
    probe = torch.arange(4, device=model.device)[None] % module.weight.shape[0]
    with torch.no_grad():
        ours = head(model.base_model(input_ids=probe, use_cache=False).last_hidden_state)
        theirs = model(input_ids=probe, use_cache=False).logits.to(ours.dtype)
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max())):
        raise ModelError(
            f"{type(model).__name__} does more between hidden states and logits than a linear map, "
            "a soft cap and a scale; it cannot be used here yet"
        )
    head.num_words = num_words or head.num_words
    return head


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
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
