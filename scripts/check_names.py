"""Keep retired words out of identifiers: `make check` runs this over all Python of the project.

docs/glossary.md has the field's word for each of them. An identifier is judged as a whole
(`found`, `own`) and by its parts (`allocate_logits`, `vocab_size`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "benchmarks", "examples", "recipes", "scripts", "tests")

PARTS = {
    "beside": "in addition",
    "drawn": "sampled",
    "found": "a noun that says what was found",
    "kept": "cached, retained",
    "lent": "shadow copy, swapped-in weights",
    "lying": "span, layout",
    "ragged": "varlen",
    "room": "buffer, capacity",
    "rooms": "buffers, KV cache",
    "shown": "rendered, displayed text",
    "spoken": "targets, scores",
    "tried": "probed",
    "twin": "copy",
}
"""Retired wherever they stand in an identifier."""

NAMES = {
    "again", "asked", "beginning", "drawer", "given", "heard", "here", "its", "known", "laid",
    "laid_out", "left", "made", "meant", "moved", "named", "num_words", "one", "others", "own",
    "picked", "put", "rest", "said", "seen", "taken", "tell", "their", "theirs", "them",
    "there", "this", "those", "told", "used", "wanted", "whose", "words", "writing", "written",
}  # fmt: skip
"""Retired as a whole identifier: participles and pronouns that name nothing."""


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]] or [ROOT / folder for folder in FOLDERS]
    files = [f for path in paths for f in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    problems = [line for file in files for line in check_file(file)]
    print(*problems, sep="\n", end="\n" if problems else "")
    if problems:
        print(f"{len(problems)} identifiers use a retired word; docs/glossary.md has the new ones")
    return 1 if problems else 0


def check_file(file: Path) -> Iterator[str]:
    seen_names: set[tuple[int, str]] = set()
    for line, name in sorted(defined_names(ast.parse(file.read_text("utf-8")))):
        reason = retired_reason(name)
        if reason is not None and (line, name) not in seen_names:
            seen_names.add((line, name))
            where = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
            yield f"{where}:{line}: {name}: {reason}"


def retired_reason(identifier: str) -> str | None:
    """Why an identifier is refused; None: it is fine. A shape suffix does not count."""
    name = identifier.strip("_")
    base, _, suffix = name.rpartition("_")
    if base and suffix.isupper():
        name = base
    if name.lower() in NAMES:
        return "says nothing by itself; name the value"
    for part in name.lower().split("_"):
        if part in PARTS:
            return f"{part!r} is retired: {PARTS[part]}"
    return None


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a file defines: modules use other people's names as they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


if __name__ == "__main__":
    sys.exit(main())
