"""What rows have written so far, and when each of them stops."""

from __future__ import annotations

from typing import Any

from courtside.engines.base import Sampling
from courtside.types import Sample, StopReason


class SampleBuffer:
    """What each row of a batch has written so far."""

    def __init__(self, size: int, eos: frozenset[int], sampling: Sampling, tokenizer: Any):
        self.ids: list[list[int]] = [[] for _ in range(size)]
        self.logp: list[list[float]] = [[] for _ in range(size)]
        self.ended: list[StopReason] = ["length"] * size
        self.eos, self.sampling, self.tokenizer = eos, sampling, tokenizer

    def add(self, rows: list[int], ids: list[int], logps: list[float]) -> list[int]:
        """Positions within `rows` that go on."""
        going = []
        for position, (row, token, logp) in enumerate(zip(rows, ids, logps, strict=True)):
            self.ids[row].append(token)
            self.logp[row].append(logp)
            if token in self.eos:
                self.ended[row] = "eos"
            elif self.stops(self.ids[row]):
                self.ended[row] = "stop_string"
            else:
                going.append(position)
        return going

    def extend(self, row: int, ids: list[int], logps: list[float]) -> None:
        """Several tokens of one row, up to where it stops."""
        if self.sampling.stop:
            for token, logp in zip(ids, logps, strict=True):
                if not self.add([row], [token], [logp]):
                    break
            return
        end = next((i for i, token in enumerate(ids) if token in self.eos), None)
        if end is not None:
            self.ended[row] = "eos"
            ids, logps = ids[: end + 1], logps[: end + 1]
        self.ids[row] += ids
        self.logp[row] += logps

    def stops(self, ids: list[int]) -> bool:
        """Whether there is a stop string in a text."""
        return bool(self.sampling.stop) and any(s in self._text(ids) for s in self.sampling.stop)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def samples(self) -> list[Sample]:
        out = []
        for row, ids in enumerate(self.ids):
            text = self._text(ids)
            cut = [text.find(s) for s in self.sampling.stop if s in text]
            out.append(
                Sample(
                    token_ids=tuple(ids),
                    logp=tuple(self.logp[row]),
                    stop=self.ended[row],
                    text=text[: min(cut)] if cut else text,
                )
            )
        return out
