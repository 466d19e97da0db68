"""Metric keys in the code, against the tables of docs/metrics.md.

A key is found where it is written: `row["…"] = …`, `counts["…"] += …`, `metrics.mean("…", …)`, and
dicts of functions that return metrics. A name in an f-string, or in capitals on the page, matches
any text: `loss/NAME` is `f"loss/{name}"`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
SOURCES: Mapping[str, tuple[str, ...]] = {
    "Step metrics": ("report/metrics.py", "training/*.py"),
    "Counters of the reader": ("reader/**/*.py", "report/folder/hints_file.py"),
    "Evaluations": ("evaluate/*.py",),
    "Trackers": ("run.py",),
}
"""Sections of the page, and the modules under src/courtside that write their keys."""
RETURNS = {
    "Step metrics": ("Row",),
    "Counters of the reader": ("tuple[tuple[Hint, ...], Mapping[str, int]]",),
    "Evaluations": ("dict[str, float]",),
}
"""Annotations of functions whose dicts have metric keys."""


def find_problems() -> list[str]:
    problems = []
    for section, patterns in SOURCES.items():
        files = sorted({f for p in patterns for f in (ROOT / "src" / "courtside").glob(p)})
        code_keys = {key for file in files for key in keys_of_module(file, section)}
        documented = keys_of_page(section)
        problems += [
            f"docs/metrics.md, {section}: {key} is missing" for key in code_keys - documented
        ]
        problems += [
            f"docs/metrics.md, {section}: no code writes {key}" for key in documented - code_keys
        ]
    return sorted(problems)


def keys_of_page(section: str) -> set[str]:
    text = PAGE.read_text(encoding="utf-8")
    _, _, after = text.partition(f"\n## {section}\n")
    body = after.partition("\n## ")[0]
    return {
        re.sub(r"[A-Z][A-Z_]+", "*", key) for key in re.findall(r"^\| `([^`]+)` \|", body, re.M)
    }


def keys_of_module(file: Path, section: str) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    prefix = "reader/" if section == "Counters of the reader" else ""
    for node in ast.walk(tree):
        for expression in _key_expressions(node, section):
            key = _to_pattern(expression)
            if key is not None and key.strip("*"):
                yield prefix + key


def _key_expressions(node: ast.AST, section: str) -> Iterator[ast.expr | None]:
    if section == "Trackers":
        if _is_call(node, ("log",)):
            yield from _dict_keys(node)
        return
    name = {"Step metrics": "row", "Evaluations": "metrics"}.get(section, "counts")
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    ):
        yield node.slice
    elif _is_call(node, ("mean", "max")) and section == "Step metrics":
        assert isinstance(node, ast.Call)
        yield from node.args[:1]
    elif isinstance(node, ast.keyword) and node.arg in ("counts", "metrics"):
        yield from _dict_keys(node.value)
    elif isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield from _dict_keys(node) if ast.unparse(node.returns) in RETURNS[section] else ()


def _is_call(node: ast.AST, names: tuple[str, ...]) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in names
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("metrics", "tracker")
    )


def _dict_keys(node: ast.AST) -> Iterator[ast.expr | None]:
    for child in ast.walk(node):
        if isinstance(child, ast.Dict):
            yield from child.keys
        elif isinstance(child, ast.DictComp):
            yield child.key


def _to_pattern(expression: ast.expr | None) -> str | None:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return expression.value
    if isinstance(expression, ast.JoinedStr):
        parts = [
            part.value if isinstance(part, ast.Constant) else "*" for part in expression.values
        ]
        return "".join(map(str, parts))
    return None
