"""Importing courtside, and asking it for help, is quick and loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "transformers", "peft", "datasets", "pyarrow", "numpy", "sympy", "fastapi",
         "uvicorn")  # fmt: skip
VERBS = (
    "train", "show", "evaluate", "report", "view", "rescore", "export", "recipes", "init", "schema",
    "check-env", "export-corrections", "experiment", "compare", "plan", "serve",
)  # fmt: skip
HELP_SECONDS = 0.5


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> list[str]:
    """Which heavy packages a program has loaded when it is done."""
    tail = f"import sys; print([m for m in {HEAVY} if m in sys.modules])"
    return eval(run(f"{code}\n{tail}").strip().split("\n")[-1])  # a list of our own words


HELP = """
import sys
from courtside.cli import main
sys.argv = ["courtside", *{args!r}]
try:
    main()
except SystemExit as end:
    assert end.code == 0
"""


def test_importing_courtside_loads_nothing_heavy() -> None:
    assert loaded("import courtside; courtside.__version__; courtside.errors; dir(courtside)") == []


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_loads_nothing_heavy(verb: str | None) -> None:
    args = ["--help"] if verb is None else [verb, "--help"]
    assert loaded(HELP.format(args=args)) == []


def test_every_verb_is_covered_here() -> None:
    from courtside.cli.app import app

    names = [
        command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
        if command.callback
    ]
    assert sorted(names) == sorted(VERBS)


@pytest.mark.parametrize(
    "module",
    ["courtside.recipe", "courtside.recipe.load", "courtside.types", "courtside.engines.base"],
)
def test_recipes_and_records_load_no_torch(module: str) -> None:
    assert "torch" not in loaded(f"import {module}")


def test_the_viewer_loads_no_models() -> None:
    code = "from courtside.viewer.app import viewer_app; import courtside.viewer.server"
    assert not {"torch", "transformers", "peft"} & set(loaded(code))


def test_help_is_quick() -> None:
    command = [sys.executable, "-m", "courtside", "--help"]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
        if seconds[-1] < HELP_SECONDS:
            break  # The best counts: a busy machine says nothing about us.
    assert min(seconds) < HELP_SECONDS


def test_public_names_are_all_there() -> None:
    import courtside

    for name in courtside.__all__:
        assert getattr(courtside, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        courtside.trian  # noqa: B018
