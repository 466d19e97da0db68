"""A plain tree as TOML. `tomllib.loads(dumps(tree))` gives the tree back, without its Nones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(tree: Mapping[str, Any]) -> str:
    return "\n".join(_table(tree, path=())).lstrip("\n") + "\n"


def _table(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    # Plain values come first: after a sub-table's header they would belong to that sub-table.
    for key, value in tree.items():
        if value is not None and not isinstance(value, Mapping) and not _is_tables(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tree.items():
        name = ".".join(_key(part) for part in (*path, key))
        if isinstance(value, Mapping):
            yield f"\n[{name}]"
            yield from _table(value, (*path, key))
        elif _is_tables(value):
            for item in value:
                yield f"\n[[{name}]]"
                yield from _table(item, (*path, key))


def _is_tables(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(item, Mapping) for item in value)
    )


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's too; DEL is the one character only TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case Mapping():
            pairs = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
            return f"{{ {', '.join(pairs)} }}"
    raise TypeError(f"{value!r} of type {type(value).__name__} has no place in TOML")
