"""The command line. Nothing heavy is imported before a command runs."""

import atexit
import faulthandler
import os
import sys


def main() -> None:
    """Run a command and end the process with its exit code."""
    from courtside.cli.machine import (
        NO_OUTPUT,
        describe_lost_output,
        limit_spinning,
        tolerate_closed_output,
    )
    from courtside.interrupts import end_on_signals, raise_on_signals

    end_on_signals()
    has_output = tolerate_closed_output()
    limit_spinning()
    if hasattr(sys.stderr, "fileno"):
        faulthandler.enable(sys.stderr.fileno())  # a crash in C names the Python line it is in
    from courtside.cli.app import app, print_error

    if not has_output:
        print_error(NO_OUTPUT)
        sys.exit(2)
    try:
        app(prog_name="courtside", obj=raise_on_signals)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if lost := describe_lost_output():
            print_error(lost)
            code = code or 2
        if "torch" not in sys.modules:
            sys.exit(code)
        _exit_now(code)


def _exit_now(code: int) -> None:
    """Skip the interpreter's teardown: native threads of the libraries of a run can abort the
    process there (in 1 run of 40), long after everything was written."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
