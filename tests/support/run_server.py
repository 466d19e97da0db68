"""Runs that may be killed: a process that has imported everything forks one child a run.

Started as a script. A line of JSON on standard input asks for a run ({"recipe", "folder", "log",
"fault"}); the answers are a line with the child's id and, when it has ended, one with its exit
code (negative: the signal that ended it). `fault` names a function of `FAULTS` and its arguments.

A fresh interpreter would take seconds to import torch; a fork of a process that runs threads could
hang. This one imports, and runs models forward on one thread.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class RunServer:
    """The other end, for tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._read() == {"ready": True}

    def start(self, recipe: dict[str, Any], folder: Path, *fault: Any) -> int:
        """The process id of a run that has begun; `fault` is a name in FAULTS and arguments."""
        request = {
            "recipe": recipe,
            "folder": str(folder),
            "log": str(self.log(folder)),
            "fault": list(fault),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._read()["pid"])

    def wait(self) -> int:
        return int(self._read()["code"])

    def run(self, recipe: dict[str, Any], folder: Path, *fault: Any) -> tuple[int, str]:
        """Exit code and all that was printed."""
        self.start(recipe, folder, *fault)
        code = self.wait()
        return code, self.log(folder).read_text()

    def log(self, folder: Path) -> Path:
        return folder.with_name(folder.name + ".log")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


# ── what can go wrong ────────────────────────────────────────────────────────────────────────────


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, name: str = "SIGKILL") -> None:
    """A signal at the n-th call of any function of the package."""
    num_calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal num_calls
        if "courtside/" in frame.f_code.co_filename:
            num_calls += 1
            if num_calls == number:
                sys.settrace(None)
                os.kill(os.getpid(), getattr(signal, name))

    sys.settrace(count)


def replace_call(owner: Any, name: str, number: int, replacement: Callable[..., Any]) -> None:
    """The n-th call of `owner.name` is `replacement(real, *args)`."""
    real, calls = getattr(owner, name), itertools.count(1)

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            return replacement(real, *args, **options)
        return real(*args, **options)

    setattr(owner, name, call)


def in_checkpoint(what: str, number: int, moment: str) -> None:
    """A kill just before or after the n-th call."""
    import shutil

    from courtside.training import checkpoints

    def kill(real: Any, *args: Any, **options: Any) -> None:
        if moment == "after":
            real(*args, **options)
        die()

    owner = {"save_file": checkpoints, "rename": Path, "rmtree": shutil, "fsync": os}[what]
    replace_call(owner, what, number, kill)


def half_file(number: int) -> None:
    """The n-th tensor file of a checkpoint is half written."""
    from courtside.training import checkpoints

    def write_half(real: Any, tensors: Any, file: Path) -> None:
        real(tensors, file)
        os.truncate(file, file.stat().st_size // 2)
        die()

    replace_call(checkpoints, "save_file", number, write_half)


def in_handover(what: str, number: int, moment: str) -> None:
    """A kill just before or after the n-th call on the way from one stage to the next."""
    from courtside.artifacts import export
    from courtside.pipeline import handover, runner
    from courtside.report.folder import pipeline_folder

    def kill(real: Any, *args: Any, **options: Any) -> None:
        if moment == "after":
            real(*args, **options)
        die()

    owner = {
        "hand_over": runner, "write_export": handover, "merge_student": export,
        "write_model_card": export, "train_run": runner, "checkpoint_sum": runner,
        "write_record": pipeline_folder.PipelineFolder, "promote": pipeline_folder.PipelineFolder,
    }[what]  # fmt: skip
    replace_call(owner, what, number, kill)


def half_line(number: int) -> None:
    """The n-th line of a log is half written."""
    from courtside.report.folder import files

    def append_half(real: Any, path: Path, content: bytes) -> None:
        real(path, content[: len(content) // 2])
        die()

    replace_call(files, "append_bytes", number, append_half)


def full_disk(number: int) -> None:
    """Files may not grow beyond a few bytes from the n-th checkpoint on."""
    before_save(number, lambda folder: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)))


def read_only(number: int) -> None:
    """The folder of checkpoints cannot be written to from the n-th checkpoint on."""

    def forbid(folder: Path) -> None:
        folder.chmod(0o555)
        if os.geteuid() == 0:  # to whom permissions do not apply
            os.seteuid(65534)

    before_save(number, forbid)


def before_save(number: int, act: Callable[[Path], None]) -> None:
    from courtside.training import checkpoints

    def save(real: Any, folder: Path, *args: Any, **options: Any) -> Any:
        act(folder)
        return real(folder, *args, **options)

    replace_call(checkpoints, "save", number, save)


def count_calls() -> None:
    """Not a fault: prints how many calls of the package a run makes."""
    num_calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += "courtside/" in frame.f_code.co_filename

    sys.settrace(count)
    AT_END.append(lambda: print(f"calls: {num_calls}"))


AT_END: list[Callable[[], None]] = []

FAULTS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        at_call, in_checkpoint, in_handover, half_file, half_line, full_disk, read_only,
        count_calls,
    )
}  # fmt: skip


# ── the server ───────────────────────────────────────────────────────────────────────────────────


def child(request: dict[str, Any]) -> int:
    from courtside.api import train
    from courtside.errors import GateFailedError, Interrupted, RunError, UserError
    from courtside.interrupts import StopSignal, raise_on_termination
    from courtside.recipe.load import parse_recipe
    from courtside.recipe.pipeline import parse_pipeline
    from courtside.report.console import PlainConsole

    tree = request["recipe"]
    recipe = parse_pipeline(tree) if "stages" in tree else parse_recipe(tree)
    raise_on_termination()
    if request["fault"]:
        name, *arguments = request["fault"]
        FAULTS[name](*arguments)
    try:
        train(recipe, request["folder"], console=PlainConsole(sys.stdout))
    except UserError as error:
        print(f"{type(error).__name__}: {error}")
        return 2
    except Interrupted as error:
        print(f"{type(error).__name__}: {error}")
        return 128 + error.signal_number
    except StopSignal as stop:
        print(stop)
        return 128 + stop.number
    except GateFailedError as error:
        print(f"{type(error).__name__}: {error}")
        return 3
    except RunError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    for act in AT_END:
        act()
    return 0


def warm_up(tree: dict[str, Any]) -> None:
    """Models are loaded and asked once, so that no child spends its time on first times."""
    import torch

    from courtside.assemble import assemble
    from courtside.recipe.load import parse_recipe
    from courtside.recipe.pipeline import parse_pipeline

    torch.set_num_threads(1)
    if "stages" in tree:
        tree = parse_pipeline(tree).stages[0].recipe.model_dump(mode="json", exclude_unset=True)
    parts = assemble(parse_recipe(tree | {"student": tree["student"] | {"device": "cpu"}}))
    parts.teacher(parts.rollout(parts.tasks.batch(0, 1), 0))


def serve() -> None:
    import peft  # noqa: F401
    import pyarrow.dataset
    import pyarrow.parquet  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    with suppress(ImportError):  # where it is installed, pyarrow imports it when a table is made
        import pandas  # noqa: F401

    from courtside.engines import precision

    # As in other tests; and a forked process has no threads to turn weights into bfloat16 with.
    precision.has_native_bf16 = lambda: False

    def answer(**tree: Any) -> None:
        print(json.dumps(tree), flush=True)

    answer(ready=True)
    warm = False
    for line in sys.stdin:
        request = json.loads(line)
        if not warm:
            warm_up(request["recipe"])
            warm = True
        pid = os.fork()
        if pid == 0:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            code = 99
            try:
                code = child(request)
            except BaseException:
                traceback.print_exc()
            finally:  # without tearing down the interpreter, which takes longer than a run
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        answer(pid=pid)
        _, status = os.waitpid(pid, 0)
        answer(code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve()
