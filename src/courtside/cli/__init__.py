"""The command line: one short file per verb. Nothing heavy is imported before a verb runs."""

import atexit
import os
import sys


def main() -> None:
    """Run a verb and end the process with its exit code."""
    from courtside.cli.app import app

    try:
        app(prog_name="courtside")
    except SystemExit as end:
        if "torch" not in sys.modules:
            raise
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None))


def _leave(code: int) -> None:
    """End now: native threads of the libraries that a run loads can abort the process while it is
    torn down (seen in 1 run of 40), long after everything was written."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
