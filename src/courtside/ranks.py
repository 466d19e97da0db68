"""The processes (ranks) of one run, and what they tell each other.

Every rank runs the same loop on its share of each step. Records, counts and failures travel as
Python objects in `exchange`, over a process group of their own; weights and gradients travel apart
from them (`training/sharding.py`). Nothing here knows what is sent. Importing it loads no torch.
"""

from __future__ import annotations

import atexit
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from courtside import errors
from courtside.errors import RunError, UserError
from courtside.interrupts import StopSignal

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process."""

REPORTED = "courtside/reported"
"""In the ranks' store: how many have asked whether they report."""
REPORT_SECONDS = 3.0
"""How long the leader waits until all have asked; a rank that was killed never does."""


class RankLostError(RunError):
    """Another rank ended without a word, or the network between them broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What one rank tells the others in place of the value that they wait for."""

    rank: int
    kind: str
    """The class of an error for users, or StopSignal; others are a RunError with a traceback."""
    message: str
    signal_number: int = 0

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        if isinstance(error, StopSignal):
            return cls(rank=rank, kind="StopSignal", message="", signal_number=error.number)
        if isinstance(error, UserError | RunError):
            names = [kind.__name__ for kind in type(error).__mro__]
            kind = next(name for name in names if hasattr(errors, name))
            return cls(rank=rank, kind=kind, message=str(error))
        text = "".join(traceback.format_exception(error))
        return cls(rank=rank, kind="RunError", message=f"{type(error).__name__}: {error}\n{text}")

    def to_error(self) -> BaseException:
        if self.kind == "StopSignal":
            return StopSignal(self.signal_number)
        error: BaseException = getattr(errors, self.kind)(f"rank {self.rank}: {self.message}")
        return error


class Ranks:
    """This process alone; `ProcessGroupRanks` is one of many."""

    rank, size, local_rank = 0, 1, 0
    is_exchanging = False
    """Whether this process waits for the others."""
    is_apart = False
    """Whether the others may wait for this rank's tensors in place of its objects."""
    is_broken = False
    """Whether the ranks can no longer meet."""
    has_ended = False
    """Whether the leader has said its last word: whatever comes now, it reports itself."""

    @property
    def is_waited_for(self) -> bool:
        """Whether no signal may end what this process does, because others would wait for it."""
        return self.is_exchanging or self.is_apart

    @property
    def is_leader(self) -> bool:
        """Rank 0 decides, prints and writes the run folder."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether a launcher started this process, also as the only one."""
        return False

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; raises on all of them if one sends a failure."""
        return [value]

    def gather_lists(self, values: Sequence[Any]) -> list[Any]:
        """All ranks' values, rank after rank."""
        return [item for part in self.exchange(list(values)) for item in part]

    def gather_dicts(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Those of all ranks, whose keys differ."""
        result: dict[Any, Any] = {}
        for part in self.exchange(dict(values)):
            result |= part
        return result

    def max(self, number: int) -> int:
        return int(max(self.exchange(number)))

    def try_lock(self, name: str) -> bool:
        """Whether this rank now has the lock of this name; it never waits."""
        return True

    def unlock(self, name: str) -> None:
        """Only by the rank that has the lock."""

    @contextmanager
    def work_apart(self) -> Iterator[None]:
        """Around collectives of tensors: a rank that fails in here ends at once, and the others
        notice that it is gone."""
        yield

    @contextmanager
    def share_failures(self) -> Iterator[None]:
        """What fails in here on one rank is raised on all of them, at their next exchange."""
        yield

    @contextmanager
    def leave_together(self) -> Iterator[None]:
        """What fails in here on one rank is raised in here on all of them."""
        with self.share_failures():
            yield
            self.exchange(None)

    def is_shared(self, error: BaseException) -> bool:
        """Whether all ranks raise it, so that the leader alone reports it."""
        return False

    def end(self, message: Any) -> None:
        """The leader's last word; without effect where the others no longer listen."""

    def go_on(self) -> None:
        """After `end`, where the leader has more to say."""
        self.has_ended = False

    def report_once(self) -> bool:
        """True for the first rank that asks: it reports what ended the run."""
        return True

    def close(self) -> None:
        """Leave the group; without effect on a rank alone."""


ALONE = Ranks()


class ProcessGroupRanks(Ranks):
    def __init__(self, *, device_type: str, timeout: timedelta):
        import torch
        import torch.distributed as dist

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        if device_type == "cuda":
            num_gpus = torch.cuda.device_count()
            if self.local_rank >= num_gpus:
                raise UserError(
                    f"rank {self.rank}: this machine has {num_gpus} GPUs and no GPU number "
                    f"{self.local_rank}. Start one process for each GPU (--nproc {num_gpus})"
                )
            torch.cuda.set_device(self.local_rank)
        backend = "nccl" if device_type == "cuda" else "gloo"
        # Models are loaded at different speeds: the first collective waits for the slowest.
        dist.init_process_group(backend, timeout=timeout)
        self._objects = dist.new_group(backend="gloo", timeout=timeout)
        self._num_apart = 0
        """Blocks of `work_apart`, one within another, that have begun and not ended."""
        self._shared: list[BaseException] = []
        """What all ranks have raised. A run may end with the first of two."""
        self._is_own_failure = False
        """Whether this rank has failed with it, alone or as all others."""

    @property
    def is_sharded(self) -> bool:
        return True

    def exchange(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        self.has_ended = False
        values: list[Any] = [None] * self.size
        self.is_exchanging = True
        try:
            dist.all_gather_object(values, value, group=self._objects)
        except RuntimeError as error:
            raise self.lost(error) from error
        finally:
            self.is_exchanging = False
        failures = [item for item in values if isinstance(item, Failure)]
        if failures:
            self.is_apart = False
            # A stop comes last: an error says more.
            failure = min(failures, key=lambda f: (f.kind == "StopSignal", f.rank))
            has_failed_alike = any(f.rank == self.rank and f.kind == failure.kind for f in failures)
            self._is_own_failure = has_failed_alike
            self._shared.append(failure.to_error())
            raise self._shared[-1]
        return values

    def lost(self, error: BaseException) -> RankLostError:
        self.is_broken = True
        reason = str(error).splitlines()[0]
        return RankLostError(
            f"rank {self.rank}: another rank is gone or did not answer ({reason}). Its own message "
            "or the launcher's says why. The same command goes on from the last checkpoint"
        )

    @contextmanager
    def work_apart(self) -> Iterator[None]:
        self.is_apart = True
        self._num_apart += 1
        try:
            yield
        except RunError:
            raise
        except RuntimeError as error:
            # How torch's backends say that a peer is gone.
            if "gloo" in str(error) or "NCCL" in str(error) or "onnection" in str(error):
                raise self.lost(error) from error
            raise
        finally:
            self._num_apart -= 1
        # Not after an error: the others still wait. Where it was a probe's, which all catch, the
        # next collectives that go well end it.
        self.is_apart = self._num_apart > 0

    @contextmanager
    def share_failures(self) -> Iterator[None]:
        try:
            yield
        except (Exception, StopSignal) as error:  # raised again, here and on every other rank
            if self.is_shared(error) or self.is_broken or self.has_ended:
                raise
            if self.is_apart:
                self.is_broken = True
                raise
            try:
                self.exchange(Failure.of(error, self.rank))
            except BaseException as shared:
                if self.is_broken or not self._is_own_failure:
                    raise shared from error
            self._shared.append(error)
            raise
        except KeyboardInterrupt:  # a second Ctrl-C ends this rank at once
            self.is_broken = True
            raise

    def is_shared(self, error: BaseException) -> bool:
        return any(error is shared for shared in self._shared)

    def end(self, message: Any) -> None:
        if not self.is_broken and not self.is_apart:
            self.exchange(message)
            self.has_ended = True

    def try_lock(self, name: str) -> bool:
        key, rank = f"courtside/lock/{name}", str(self.rank)
        return bool(self._store.compare_set(key, "", rank) == rank.encode())

    def unlock(self, name: str) -> None:
        self._store.set(f"courtside/lock/{name}", "")

    @property
    def _store(self) -> Any:
        import torch.distributed as dist

        return dist.distributed_c10d._get_default_store()

    def report_once(self) -> bool:
        try:
            is_first = int(self._store.add(REPORTED, 1)) == 1
            if self.is_leader:  # its store is gone when it ends, and then all others would report
                end = time.monotonic() + REPORT_SECONDS
                while int(self._store.add(REPORTED, 0)) < self.size and time.monotonic() < end:
                    time.sleep(0.05)
        except RuntimeError:  # the rank that holds the store is gone
            return True
        return is_first

    def close(self) -> None:
        import torch.distributed as dist

        if not (self.is_broken or self.is_apart) and dist.is_initialized():
            dist.destroy_process_group()


def connect(*, device: str, timeout: timedelta) -> Ranks:
    """The ranks of this process: alone, unless a launcher started it.

    `device`: cpu, cuda or auto. `timeout`: how long one rank waits for another.
    """
    global _connected
    if not was_launched():
        return ALONE
    if _connected is None:
        if device == "auto":
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        _connected = ProcessGroupRanks(device_type=device, timeout=timeout)
        # Its threads would abort the process when the interpreter ends.
        atexit.register(_connected.close)
    return _connected


_connected: ProcessGroupRanks | None = None


def should_report(error: BaseException | None = None) -> bool:
    """Whether this process tells the user: the leader, or the rank that noticed an error first."""
    if not was_launched():
        return True
    is_leader = int(os.environ["RANK"]) == 0
    if _connected is None or error is None:
        return is_leader
    if _connected.has_ended or _connected.is_shared(error):
        return is_leader
    return _connected.report_once()


def was_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or `courtside train --nproc`, started this process."""
    return all(name in environment for name in LAUNCH_VARIABLES)
