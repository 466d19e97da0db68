"""The text of a `results.json`: five digits, and one line for what fits into a line."""

from __future__ import annotations

import json
from typing import Any

LINE = 200


def format_json(tree: Any, indent: str = "") -> str:
    """JSON with five digits, in which what fits into a line is one."""
    line = json.dumps(_round_numbers(tree), ensure_ascii=False)
    if len(indent + line) <= LINE or not isinstance(tree, dict | list):
        return line
    deeper = indent + " "
    if isinstance(tree, dict):
        items = [f"{json.dumps(key)}: {format_json(value, deeper)}" for key, value in tree.items()]
    else:
        items = [format_json(value, deeper) for value in tree]
    first, last = "{}" if isinstance(tree, dict) else "[]"
    body = f",\n{deeper}".join(items)
    return f"{first}\n{deeper}{body}\n{indent}{last}"


def _round_numbers(tree: Any) -> Any:
    if isinstance(tree, float):
        return float(f"{tree:.5g}")
    if isinstance(tree, dict):
        return {key: _round_numbers(value) for key, value in tree.items()}
    return [_round_numbers(value) for value in tree] if isinstance(tree, list) else tree
