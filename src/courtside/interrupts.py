"""Signals that end a command: Ctrl-C, SIGTERM (Slurm, Kubernetes) and SIGHUP (a closed terminal).

The exit code is 128 plus the signal's number, as shells report it: 130, 143 and 129.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATIONS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class StopSignal(KeyboardInterrupt):
    """A signal that ends the work at once. No `except Exception` of user code stops it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal_name(number)}")
        self.number = number


def signal_name(number: int) -> str:
    """>>> signal_name(2)
    'Ctrl-C'
    """
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def raise_on_termination() -> None:
    """SIGTERM and SIGHUP raise a StopSignal from now on; `nohup` still ignores SIGHUP."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopSignal(number)

    for number in TERMINATIONS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def end_on_signals() -> None:
    """Ctrl-C, SIGTERM and SIGHUP end the process at once, without a traceback: there is nothing to
    save, and nobody to catch an exception. Ignored ones stay ignored."""
    for number in (signal.SIGINT, *TERMINATIONS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """While a command runs, between two times of `end_on_signals`."""
    raise_on_termination()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        end_on_signals()


@contextmanager
def handle_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """`handle` gets the numbers of signals that would end the process; the second Ctrl-C does.

    Without effect in other threads than the main one, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        handle(number)

    before = {}
    for number in (signal.SIGINT, *TERMINATIONS):
        handler = signal.getsignal(number)
        # A job in the background comes with its interrupts ignored, and may be sent one; `nohup`
        # ignores SIGHUP on purpose. None: a handler in C, which could not be put back.
        if handler is not None and (number == signal.SIGINT or handler is not signal.SIG_IGN):
            before[number] = signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def can_interrupt() -> bool:
    """Whether `time_limit` works here: in the main thread, on systems with interval timers."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and hasattr(signal, "setitimer")


@contextmanager
def time_limit(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` in the middle of Python code that takes longer, also inside a regular
    expression; without effect where `can_interrupt` is False."""
    if not can_interrupt():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
