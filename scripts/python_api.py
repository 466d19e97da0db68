"""docs/python-api.md from the signatures and docstrings of the public names."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import courtside

EXTENSION_POINTS = {
    "Engines": (
        "courtside.engines.base",
        (
            "Engine",
            "InProcessEngine",
            "Capabilities",
            "Session",
            "Sampling",
            "SampleRequest",
            "ScoreRequest",
            "Scores",
            "BranchRequest",
            "BranchScores",
        ),
    ),
    "Environments": ("courtside.environments.base", ("Environment", "Episode")),
    "Divergences": (
        "courtside.losses.divergences.registry",
        ("Divergence", "Parameter", "register"),
    ),
    "Readers": ("courtside.reader.base", ("ReaderOutput",)),
    "Teachers": ("courtside.teacher.teacher", ("ScoringTeacher",)),
    "Records": (
        "courtside.types",
        ("Sample", "Event", "Observation", "Hint", "HintOutcome", "Target", "Scored", "Update"),
    ),
}
INTRO = """The names below are `courtside.NAME`. They load on first use: `import courtside` does not
import torch. Paths are `str` or `Path`. An error that the user can fix is a `UserError`;
a run that fails raises a `RunError` and can be resumed. Progress is printed to standard error (in a
notebook below its cell); `quiet=True` sends it to the logger `courtside` instead. DataFrames need
pandas, which the extra `notebook` installs. [A notebook](../examples/look_at_a_run.ipynb) shows
them."""


def api_page(generated_by: str) -> str:
    blocks = ["# The Python API", generated_by, INTRO.replace("\n", " ")]
    skipped = ("__version__", "errors", "Recipe")
    public = [name for name in courtside.__all__ if name not in skipped]
    values = {name: getattr(courtside, name) for name in public}
    blocks.append("## Functions")
    for name, value in values.items():
        if inspect.isfunction(value):
            blocks += _function_block(name, _parse(value), "###")
    blocks += [
        "## The recipe",
        "`courtside.Recipe`: fields in the [recipe reference](reference/recipe.md).",
    ]
    blocks.append("## The run folder")
    blocks += _class_block(courtside.RunFolder)
    blocks.append("## Records of tasks and results")
    for name, value in values.items():
        if inspect.isclass(value) and name != "RunFolder":
            blocks += _class_block(value)
    blocks += ["## Errors", "In `courtside.errors`."]
    rows = [
        f"| `{name}({value.__base__.__name__})` | {_first_line(value)} |"
        for name, value in vars(courtside.errors).items()
        if inspect.isclass(value)
    ]
    blocks.append("\n".join(["| error | meaning |", "| --- | --- |", *rows]))
    blocks += [
        "# Extension points",
        "Named in a recipe as `module:name`: see [extending](extending.md).",
    ]
    for title, (module, names) in EXTENSION_POINTS.items():
        blocks += [f"## {title}", f"In `{module}`."]
        for name in names:
            value = getattr(import_module(module), name)
            if inspect.isclass(value):
                blocks += _class_block(value)
            else:
                blocks += _function_block(name, _parse(value), "###")
    return "\n\n".join(blocks)


def _parse(value: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def _function_block(name: str, node: Any, heading: str) -> Iterator[str]:
    yield f"{heading} `{name}`"
    yield f"```\n{_signature(node)}\n```"
    if text := ast.get_docstring(node):
        yield _prose(text)


def _class_block(value: type) -> Iterator[str]:
    node = _parse(value)
    yield f"### `{value.__name__}`"
    if text := ast.get_docstring(node):
        yield _prose(text)
    rows, methods = [], []
    body = [*node.body, *_inherited_methods(value)]
    for member, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            default = "" if member.value is None else f" = {_plain_default(member.value)}"
            meaning = _attribute_docstring(following)
            rows.append(
                (f"`{member.target.id}: {ast.unparse(member.annotation)}{default}`", meaning)
            )
        elif isinstance(member, ast.FunctionDef) and _is_public(member.name):
            text = _prose(ast.get_docstring(member) or "").replace("\n\n", " ")
            if any(ast.unparse(decorator) == "property" for decorator in member.decorator_list):
                rows.append((f"`{member.name}: {ast.unparse(member.returns)}`", text))
            else:
                methods.append((f"`{_signature(member)}`", text))
    yield from _tables(rows, methods)


def _inherited_methods(value: type) -> Iterator[Any]:
    """Those of this package's classes; a class's page shows them as if they were its own."""
    for base in value.__mro__[1:]:
        if base.__module__.startswith("courtside."):
            for name, member in vars(base).items():
                if inspect.isfunction(member) and getattr(value, name) is member:
                    yield _parse(member)


def _tables(rows: Sequence[tuple[str, str]], methods: Sequence[tuple[str, str]]) -> Iterator[str]:
    for title, lines in (("field", rows), ("method", methods)):
        if lines:
            cells = [(a.replace("|", "\\|"), b.replace("|", "\\|")) for a, b in lines]
            body = [f"| {first} | {second} |" for first, second in cells]
            yield "\n".join([f"| {title} | meaning |", "| --- | --- |", *body])


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__call__"


def _signature(node: Any) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    arguments = re.sub(r"(: [^,=]+)=", r"\1 = ", arguments)
    return f"{node.name}({arguments}){returns}"


def _plain_default(value: ast.expr) -> str:
    text = ast.unparse(value)
    return "{}" if text.startswith("field(default_factory=dict") else text


def _attribute_docstring(node: Any) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return " ".join(str(node.value.value).split()) if is_text else ""


def _prose(text: str) -> str:
    """Paragraphs on one line each, without doctests."""
    paragraphs = [part for part in text.split("\n\n") if not part.lstrip().startswith(">>>")]
    return "\n\n".join(" ".join(part.split()) for part in paragraphs)


def _first_line(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split())
