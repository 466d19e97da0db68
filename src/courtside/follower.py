"""The run as a rank other than the leader sees it: no folder, no console, no decisions.

It runs the same loop as `run.Run`, on its share of each step. Between steps it does what the leader
says: gather a checkpoint's tensors, sample its part of an evaluation, take the next step, or end.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from courtside.drafts.base import DraftOutcome
from courtside.errors import Interrupted, RunError, ServerError, UserError
from courtside.interrupts import StopSignal, handle_signals
from courtside.rank_messages import Command, End, Evaluate, RankStep, Save, Step
from courtside.run import INTERRUPTIBLE_PHASES
from courtside.run_evaluation import measure_policies
from courtside.run_state import restore_from, save_checkpoint
from courtside.runtime import Runtime
from courtside.types import Scored, Update


class Follower:
    def __init__(self, parts: Runtime):
        self.parts, self.ranks = parts, parts.ranks
        self.interrupted_by: int | None = None
        self._phase: str | None = None
        self._resume(self.ranks.exchange(None)[0])

    def _resume(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            return
        if not checkpoint.is_dir():
            raise UserError(
                f"{checkpoint}: is on the leader's machine and not on this one. Put the run folder "
                "on a file system that all machines share"
            )
        restore_from(self.parts, checkpoint)

    # ── what the loop calls ───────────────────────────────────────────────────────────────────────

    @contextmanager
    def handle_exit(self) -> Iterator[None]:
        with handle_signals(self._handle_signal):
            try:
                with self.ranks.share_failures():
                    yield
            except BaseException as error:
                has_left = self.ranks.has_ended or self.ranks.is_broken
                if self.ranks.is_shared(error) and not has_left:
                    with suppress(RunError):
                        self._obey()  # the leader may save
                raise
            finally:
                self.parts.close_rollouts()

    def remaining_steps(self) -> Iterator[int]:
        while (step := self._obey()) is not None:
            yield step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self._phase = self._phase, name
        yield
        self._phase = before

    @contextmanager
    def save_failed_batch(self, step: int, scored: Sequence[Scored]) -> Iterator[None]:
        yield  # the leader has all of it

    @contextmanager
    def save_if_servers_fail(self, *results: Any) -> Iterator[None]:
        """The leader records the step; this rank writes its shards when it is told to."""
        self.ranks.exchange(None)  # the step is done on all ranks
        try:
            with self.ranks.leave_together():
                yield
        except ServerError:
            with suppress(RunError):  # the leader says what failed then
                self.record(*results)
            raise

    def record(
        self,
        step: int,
        scored: Sequence[Scored],
        update: Update,
        reader_counts: Mapping[str, int],
        drafts: DraftOutcome,
    ) -> None:
        self.ranks.exchange(
            RankStep(
                reader_counts=reader_counts,
                draft_counts=drafts.counts,
                draft_usage=drafts.usage,
                interrupted_by=self.interrupted_by,
            )
        )

    # ── what the leader says ──────────────────────────────────────────────────────────────────────

    def _obey(self) -> int | None:
        """Until the next step, whose number it returns; None: the run has ended."""
        while True:
            command: Command = self.ranks.exchange(None)[0]
            match command:
                case Step(number=number):
                    return number
                case Save(folder=folder, num_steps=num_steps):
                    with self._survive_failures():
                        save_checkpoint(self.parts, folder, num_steps)
                case Evaluate(policies=policies, split=split, step=step):
                    with self._survive_failures(), self.phase("evaluate"):
                        measure_policies(self.parts.evaluator, policies, split, step=step)
                case End(stopped_by=stopped_by, has_failed=has_failed):
                    self.ranks.has_ended = True
                    if stopped_by is not None:
                        raise Interrupted("stopped, as the leader says", stopped_by)
                    if has_failed:
                        raise RunError("failed, as the leader says")
                    return None

    @contextmanager
    def _survive_failures(self) -> Iterator[None]:
        """What all ranks failed at; the leader decides how the run goes on."""
        try:
            with self.ranks.share_failures():
                yield
        except BaseException as error:
            if not self.ranks.is_shared(error):
                raise
            self._phase = None

    def _handle_signal(self, number: int) -> None:
        self.interrupted_by = number
        if self.ranks.is_waited_for:
            return  # the leader learns of it when this step is recorded
        if self._phase == "evaluate" or (
            number != signal.SIGINT and self._phase in INTERRUPTIBLE_PHASES
        ):
            raise StopSignal(number)
