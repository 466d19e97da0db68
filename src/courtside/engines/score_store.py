"""Scores on disk, by content. Any number of processes read and write one folder.

A file is written under another name and renamed, and begins with a checksum: whatever was cut off,
by a full disk or a lost power line, counts as not there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from courtside.engines.base import ScoreRequest, Scores
from courtside.errors import RecipeError, RunError

FORMAT = "1"
"""In every key: files of another format are not found."""
DIGEST_BYTES = 32
FRACTION_LEFT = 0.9
"""Of the limit, after old scores were removed."""
ABANDONED_SECONDS = 3600.0
"""After which an unfinished file belongs to a process that was killed."""
UNFINISHED = ".part"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    path: Path
    num_bytes: int
    last_used: float


class ScoreStore:
    def __init__(self, folder: Path, *, teacher: str, max_bytes: int, field: str):
        """`teacher` names the weights that score and the precision in which they do. `field`: of
        the recipe, for messages."""
        self.folder, self.field = folder, field
        self._teacher, self._max_bytes = teacher, max_bytes
        with self._explain_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self.num_bytes = sum(file.num_bytes for file in self._list_files())
        """As this process knows it; others may have added to it."""
        self.num_read = self.num_written = 0

    def read(self, request: ScoreRequest, *, top_k: int, device: torch.device) -> Scores | None:
        """None: not there, or with fewer than `top_k` likeliest tokens."""
        path = self._locate(request)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        tensors = _decode(content)
        if tensors is None or tensors["top_ids_TK"].shape[1] < top_k:
            return None
        with suppress(OSError):  # another process has just removed it
            os.utime(path)
        self.num_read += 1
        top_ids_TK = tensors["top_ids_TK"][:, :top_k].to(device, torch.int64)
        top_logp_TK = tensors["top_logp_TK"][:, :top_k].to(device)
        return Scores(
            logp_T=tensors["logp_T"].to(device),
            top_ids_TK=top_ids_TK if top_k else None,
            top_logp_TK=top_logp_TK if top_k else None,
        )

    def write(self, request: ScoreRequest, scores: Scores) -> None:
        path = self._locate(request)
        content = _encode(scores)
        work = path.with_name(f".{uuid4().hex}{UNFINISHED}")
        with self._explain_errors():
            path.parent.mkdir(exist_ok=True)
            try:
                work.write_bytes(content)
                work.replace(path)
            finally:
                work.unlink(missing_ok=True)
        self.num_written += 1
        self.num_bytes += len(content)
        if self.num_bytes > self._max_bytes:
            self._remove_oldest()

    def check_teacher(self, logps: Sequence[float], *, max_difference: float) -> None:
        """`logps` of tokens that are always the same: a server may have other weights under the
        name of those whose scores are here."""
        path = self.folder / f"{_hash(FORMAT, self._teacher)}.json"
        with self._explain_errors(), self._lock():
            try:
                before = [float(logp) for logp in json.loads(path.read_text())]
            except (OSError, ValueError):
                path.write_text(json.dumps(list(logps)))
                return
        differences = [abs(a - b) for a, b in zip(before, logps, strict=False)]
        if len(before) != len(logps) or not sum(differences) <= max_difference * len(logps):
            raise RecipeError(
                f"{self.field}.folder = {str(self.folder)!r}: has scores of another model of this "
                "name: log-probs of the same tokens differ by "
                f"{sum(differences) / max(1, len(differences)):.3g} nats on average. Name another "
                "folder, or remove this one"
            )

    def _locate(self, request: ScoreRequest) -> Path:
        ids = array("q", request.token_ids).tobytes().hex()
        name = _hash(
            FORMAT, self._teacher, repr(request.temperature), ids, bytes(request.scored).hex()
        )
        return self.folder / name[:2] / name[2:]

    # ── size ─────────────────────────────────────────────────────────────────────────────────────

    def _remove_oldest(self) -> None:
        with self._explain_errors(), self._lock():
            files = sorted(self._list_files(), key=lambda file: file.last_used)
            num_bytes = sum(file.num_bytes for file in files)
            for file in files:
                if num_bytes <= FRACTION_LEFT * self._max_bytes:
                    break
                file.path.unlink(missing_ok=True)
                num_bytes -= file.num_bytes
        self.num_bytes = num_bytes

    def _list_files(self) -> Iterator[StoredFile]:
        now = time.time()
        for folder in self.folder.glob("??"):
            for path in folder.iterdir():
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                is_unfinished = path.suffix == UNFINISHED
                if is_unfinished and now - status.st_mtime > ABANDONED_SECONDS:
                    path.unlink(missing_ok=True)
                elif not is_unfinished:
                    yield StoredFile(path=path, num_bytes=status.st_size, last_used=status.st_mtime)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One process at a time."""
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.field}.folder = {str(self.folder)!r}: cannot be written "
                f"({error.strerror}). Name a folder with space that you may write to, or lower "
                f"{self.field}.max_gb"
            ) from error


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _encode(scores: Scores) -> bytes:
    num_tokens = len(scores.logp_T)
    ids, logps = scores.top_ids_TK, scores.top_logp_TK
    if ids is None or logps is None:
        ids, logps = torch.empty(num_tokens, 0), torch.empty(num_tokens, 0)
    payload = save(
        {
            "logp_T": scores.logp_T.float().cpu().contiguous(),
            "top_ids_TK": ids.to("cpu", torch.int32).contiguous(),
            "top_logp_TK": logps.float().cpu().contiguous(),
        }
    )
    return hashlib.sha256(payload).digest() + payload


def _decode(content: bytes) -> dict[str, torch.Tensor] | None:
    digest, payload = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    try:
        return load(payload)
    except SafetensorError:
        return None
