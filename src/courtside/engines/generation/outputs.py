"""Sampled tokens per row, and when each row stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from courtside.engines.base import Sampling
from courtside.types import Sample, StopReason


class SampleBuffer:
    """The tokens that each row of a batch has sampled so far."""

    def __init__(self, num_rows: int, eos: frozenset[int], sampling: Sampling, tokenizer: Any):
        self.ids: list[list[int]] = [[] for _ in range(num_rows)]
        self.logp: list[list[float]] = [[] for _ in range(num_rows)]
        self.stop_reasons: list[StopReason] = ["length"] * num_rows
        self.eos, self.sampling, self.tokenizer = eos, sampling, tokenizer

    def append(self, rows: Sequence[int], ids: list[int], logps: list[float]) -> list[int]:
        """One token per row; returns the indices into `rows` of those that go on."""
        running = []
        for index, (row, token, logp) in enumerate(zip(rows, ids, logps, strict=True)):
            self.ids[row].append(token)
            self.logp[row].append(logp)
            if token in self.eos:
                self.stop_reasons[row] = "eos"
            elif self.has_stop_string(self.ids[row]):
                self.stop_reasons[row] = "stop_string"
            else:
                running.append(index)
        return running

    def extend(self, row: int, ids: list[int], logps: list[float]) -> None:
        """Several tokens of one row, up to the one at which it stops."""
        if self.sampling.stop:
            for token, logp in zip(ids, logps, strict=True):
                if not self.append([row], [token], [logp]):
                    break
            return
        end = next((i for i, token in enumerate(ids) if token in self.eos), None)
        if end is not None:
            self.stop_reasons[row] = "eos"
            ids, logps = ids[: end + 1], logps[: end + 1]
        self.ids[row] += ids
        self.logp[row] += logps

    def has_stop_string(self, ids: list[int]) -> bool:
        return bool(self.sampling.stop) and any(s in self._text(ids) for s in self.sampling.stop)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def samples(self) -> list[Sample]:
        samples = []
        for ids, logp, stop in zip(self.ids, self.logp, self.stop_reasons, strict=True):
            text = self._text(ids)
            ends = [text.find(s) for s in self.sampling.stop if s in text]
            text = text[: min(ends)] if ends else text
            samples.append(Sample(token_ids=tuple(ids), logp=tuple(logp), stop=stop, text=text))
        return samples
