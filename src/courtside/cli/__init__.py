"""The command line. Nothing heavy is imported before a command runs."""

import atexit
import os
import sys


def main() -> None:
    """Run a command and end the process with its exit code."""
    from courtside.cli.machine import (
        describe_lost_output,
        limit_spinning,
        tolerate_closed_output,
    )
    from courtside.interrupts import raise_on_termination

    has_output = tolerate_closed_output()
    raise_on_termination()
    limit_spinning()
    from courtside.cli.app import app, print_error

    try:
        app(prog_name="courtside")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        only_prints = "torch" not in sys.modules
        if lost := describe_lost_output(has_output=has_output, only_prints=only_prints):
            print_error(lost)
            code = code or (2 if only_prints else 1)
        if only_prints:
            sys.exit(code)
        _exit_now(code)


def _exit_now(code: int) -> None:
    """Skip the interpreter's teardown: native threads of the libraries of a run can abort the
    process there (in 1 run of 40), long after everything was written."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
