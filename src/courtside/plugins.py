"""User code that a recipe names as `module:name`: environments, graders, task sources, readers.

The module is installed, or lies in the folder where the command runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from courtside.errors import UserError

PluginKind = Literal["class", "function"]


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
    signature = inspect.signature(plugin)
    try:
        signature.bind(**settings)
    except TypeError as problem:
        accepted = ", ".join(map(str, signature.parameters.values())) or "no settings"
        raise error(
            f"{section}.path = {path!r}: {section}.settings = {settings} do not fit, {problem}; "
            f"{path.partition(':')[2]} takes {accepted}"
        ) from None
    return plugin(**settings)


def _import(name: str, where: str, error: type[UserError]) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:  # last: a user's file must not shadow an installed module
        sys.path.append(folder)
    try:
        return import_module(name)
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
