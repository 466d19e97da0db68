"""User code that a recipe names as `module:name`: environments, graders, task sources, readers.

The module is installed, or lies in the folder where the command runs.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard

from courtside.errors import UserError
from courtside.sanitize import truncate

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
"""Folders of the standard library and of installed packages."""

MAX_MESSAGE_CHARS = 2000
"""Of an exception: some hold the whole text that could not be parsed."""

PluginKind = Literal["class", "function"]
CONSTRUCTORS = {
    "Message": "Message(role='user', content='…')",
    "Event": "Event(kind='…', details={…})",
    "Observation": "Observation(messages=(…,))",
    "Grade": "Grade(score=1.0, passed=True)",
    "Task": "Task(id='…', split='train', messages=(…,))",
}
"""Records that user code makes, with the keywords that people leave out."""


class PluginConfig(Protocol):
    """A section of a recipe that names user code."""

    @property
    def path(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...


def check_import_path(path: str, example: str) -> str:
    """The path itself; a ValueError where it is not written like `example`."""
    module, colon, name = path.partition(":")
    if module.endswith(".py") or "/" in module:
        raise ValueError(
            f"{path!r} names a file; write the module with dots and without .py, as in {example!r}"
        )
    if not (colon and name.isidentifier() and all(p.isidentifier() for p in module.split("."))):
        form = "module:Class" if example.partition(":")[2][:1].isupper() else "module:function"
        raise ValueError(f"{path!r} must be {form!r}, as in {example!r}")
    return path


def load_plugin(
    path: str, kind: PluginKind, *, field: str, error: type[UserError]
) -> Callable[..., Any]:
    """The class or function at `module:name`. `field` is the recipe field, for error messages."""
    where = f"{field} = {path!r}"
    module_name, _, name = path.partition(":")
    plugin: Callable[..., Any] | None = getattr(_import(module_name, where, error), name, None)
    if not callable(plugin) or (kind == "class" and not inspect.isclass(plugin)):
        raise error(
            f"{where}: module {module_name!r} has no {kind} {name!r}; correct the name after the "
            "colon"
        )
    return plugin


def make_plugin(
    config: PluginConfig, kind: PluginKind, *, section: str, error: type[UserError]
) -> Any:
    """What the plugin at the section's `path` makes of its `settings`."""
    path, settings = config.path, dict(config.settings)
    plugin = load_plugin(path, kind, field=f"{section}.path", error=error)
    try:
        signature = inspect.signature(plugin)
    except ValueError:
        raise error(
            f"{section}.path = {path!r}: it has no signature that Python can tell; wrap it in a "
            f"{kind} of your own"
        ) from None
    try:
        signature.bind(**settings)
    except TypeError as problem:
        accepted = ", ".join(map(str, signature.parameters.values())) or "no settings"
        raise error(
            f"{section}.path = {path!r}: {section}.settings = {settings} do not fit, {problem}; "
            f"{path.partition(':')[2]} takes {accepted}"
        ) from None
    try:
        return plugin(**settings)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # user code, also sys.exit and cancelled tasks
        raise error(
            f"{section}.path = {path!r}: {path.partition(':')[2]}(**settings) "
            f"{describe_error(problem)}"
        ) from problem


def _import(name: str, where: str, error: type[UserError]) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:  # last: a user's file must not shadow an installed module
        sys.path.append(folder)
    try:
        module = import_module(name)
    except ModuleNotFoundError as problem:
        missing = problem.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise error(
                f"{where}: there is no module {missing!r}. Install it, or put {missing}.py where "
                f"the command runs ({folder})"
            ) from None
        raise error(
            f"{where}: module {name!r} imports {missing!r}, which is not installed; install it"
        ) from None
    except SyntaxError as problem:
        file, line = str(problem.filename).rpartition("/")[2], problem.lineno
        raise error(
            f"{where}: {file}, line {line}: {problem.msg}; correct the syntax there"
        ) from problem
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # user code, also sys.exit and cancelled tasks
        raise error(f"{where}: importing {name!r} {describe_error(problem)}") from problem
    if (actual := os.getcwd()) != folder:
        os.chdir(folder)
        raise error(
            f"{where}: importing {name!r} changed the working directory to {actual!r}, and paths "
            "of the run are relative to it. Use absolute paths there"
        )
    return module


# ── what user code returned and raised ────────────────────────────────────────────────────────────


def is_finite_number(value: object) -> TypeGuard[float]:
    """Any real number that a float holds, also of numpy."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int
        return False


def describe_error(error: BaseException) -> str:
    """`raised KeyError: 'city' (world.py, line 12)`, with the fix of frequent slips."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}){find_place(error)}; raise an exception instead"
    try:
        message = str(error).strip()
    except Exception:  # user code: an exception that cannot be printed
        message = "(its message cannot be printed)"
    first_line = truncate(message.partition("\n")[0], MAX_MESSAGE_CHARS)
    text = ": ".join(filter(None, (type(error).__name__, first_line)))
    record = re.match(r"(\w+)\.__init__\(\)", message)
    fix = ""
    if isinstance(error, TypeError) and record and record[1] in CONSTRUCTORS:
        fix = f"; name the fields: {CONSTRUCTORS[record[1]]}"
    return f"raised {text}{find_place(error)}{fix}"


def format_trace(error: BaseException) -> str:
    """The traceback without the frames of this package that called user code."""
    lines = traceback.TracebackException.from_exception(error)
    package = str(Path(__file__).parent)
    frames = [frame for frame in lines.stack if not frame.filename.startswith(package)]
    lines.stack = traceback.StackSummary.from_list(frames)
    return "".join(truncate(line.rstrip("\n"), MAX_MESSAGE_CHARS) + "\n" for line in lines.format())


def find_place(error: BaseException) -> str:
    """` (world.py, line 12)`, of the user's code; empty where it is not known."""
    package = str(Path(__file__).parent)
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith((package, "<frozen"))]
    # The user's line, not that of a library which it called.
    frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames
    if not frames:
        return ""
    return f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})"
