"""The in-process engine: any causal language model of transformers, on CPU or GPU.

Sampling: samples of one prompt share its prefill; finished rows leave the batch, or take the next
request (continuous batching). Scoring: sequences are packed into varlen batches, and logits exist
for a chunk of scored positions at a time; turns with hints share their trunk's forward pass (tree
scoring). Training happens elsewhere, on the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import torch

from courtside.engines.base import (
    BranchRequest,
    BranchScores,
    Capabilities,
    ScoreRequest,
    Scores,
    Want,
    score_branches_separately,
)
from courtside.engines.forward.forward import score_positions
from courtside.engines.forward.state_branches import find_separate_reason, score_state_trees
from courtside.engines.forward.tree_scoring import probe_tree_scoring, score_trees
from courtside.engines.local_sampler import LocalSampler
from courtside.engines.patches.onednn_prepack import make_prepacked_patches
from courtside.progress import PhaseProgress


class LocalEngine(LocalSampler):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            top_k=self.head.vocab_size,
            hidden_states=True,
            branches=True,
            weight_updates=True,
            row_state_tokens=self.row_state_tokens,
            mixed_sampling=True,
        )

    def load_weights(self, version: int) -> None:
        """Nothing to copy: the model is the trainer's own module."""

    def notes(self) -> list[str]:
        notes = []
        if (reason := self.passes.padding_reason) is not None:
            separate_reason = self.passes.separate_reason
            if separate_reason is None:
                notes.append(f"{self.name}: passes are padded ({reason})")
            else:
                notes.append(f"{self.name}: sequences pass one at a time ({separate_reason})")
        elif (reason := self.passes.unshared_reason) is not None:
            notes.append(f"{self.name}: every sample prefills its own prompt ({reason})")
        if self.stateless_reason is not None and self.state_passes is None:
            path, reason = self.decode_path
            if path == "separate_rows":
                notes.append(f"{self.name}: samples one row at a time ({reason})")
            elif path == "uncached":
                notes.append(f"{self.name}: samples without a cache ({reason})")
        if self.device.type == "cuda" and not self.uses_continuous_batching:
            static = self.static_states
            reason = static if isinstance(static, str) else self.stateless_reason
            notes.append(f"{self.name}: decodes eagerly, without CUDA graphs ({reason})")
        elif self.device.type == "cuda" and self.capture_problem is not None:
            notes.append(
                f"{self.name}: decodes eagerly, without CUDA graphs ({self.capture_problem})"
            )
        return notes

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def score(
        self, requests: Sequence[ScoreRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[Scores]:
        """Log-probs of the scored tokens and what else is wanted, in packed passes."""
        for request in requests:
            assert not request.scored[0], "nothing predicts the first token"
            self.check_length(len(request.token_ids))
        results: dict[int, Scores] = {}
        passes = self.passes
        with self.autocast_context(), self._patch_model():
            keys = passes.sharing_keys(
                [r.token_ids for r in requests], [r.routed_experts for r in requests], replays=True
            )
            batches = passes.plan_batches(
                [[key] for key in keys],
                self.score_batch_tokens,
                max_shared_tokens=self.max_batch_tokens,
            )
            progress = self.progress.phase = PhaseProgress(total=len(batches), unit="passes")
            for batch in batches:
                batch_requests = [requests[i] for i in batch]
                records = [r.routed_experts for r in batch_requests]
                hidden_ND, spans = passes.forward(
                    [r.token_ids for r in batch_requests],
                    records=records if any(records) else None,
                    replays=True,
                )
                scores = score_positions(
                    self.head, hidden_ND, spans, batch_requests, want=want, top_k=top_k
                )
                results.update(zip(batch, scores, strict=True))
                progress.finished += 1
        return [results[i] for i in range(len(requests))]

    def _patch_model(self) -> AbstractContextManager[None]:
        """For scoring, inside autocast."""
        is_cpu = self.device.type == "cpu"
        return self.passes.patch_model(
            make_prepacked_patches(self.model, self.head) if is_cpu else []
        )

    @cached_property
    def separate_branches_reason(self) -> str | None:
        """Why branches of this model are scored separately; None: they share their trunk's pass."""
        if self.state_passes is not None:
            return find_separate_reason(self.state_passes)
        with self.autocast_context():
            return probe_tree_scoring(self.passes)

    @torch.no_grad()
    def score_branches(
        self, requests: Sequence[BranchRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[BranchScores]:
        """Turns scored again with hints before them: branches share their trunk's forward pass."""
        if self.separate_branches_reason is not None:
            return score_branches_separately(
                self, requests, want=want, top_k=top_k, note=self.separate_branches_reason
            )
        for r in requests:
            self.check_length(max([r.num_read, *(b.splice + len(b.scored) for b in r.branches)]))
        with self.autocast_context(), self._patch_model():
            if self.state_passes is not None:
                return score_state_trees(
                    self.state_passes,
                    self.head,
                    requests,
                    pad_id=self.pad_id,
                    want=want,
                    top_k=top_k,
                    max_tokens=self.score_batch_tokens,
                    progress=self.progress,
                )
            return score_trees(
                self.passes,
                self.head,
                requests,
                want=want,
                top_k=top_k,
                max_tokens=self.score_batch_tokens,
                max_shared_tokens=self.max_batch_tokens,
                progress=self.progress,
            )
