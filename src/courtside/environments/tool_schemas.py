"""Tools from the signatures and docstrings of methods, and the check of a call's arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from courtside.environments.validation import InvalidValue

NO_TOOLS = frozenset({"reset", "reward", "get_reward", "close"})
JSON_TYPES: Mapping[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array",
    tuple: "array", dict: "object", Any: "any",
}  # fmt: skip
PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def find_tools(user_class: Any) -> dict[str, Callable[..., Any]]:
    """In the order in which they are defined, those of base classes first."""
    names = dict.fromkeys(name for base in reversed(user_class.__mro__) for name in vars(base))
    return {
        name: getattr(user_class, name)
        for name in names
        if not name.startswith("_")
        and name not in NO_TOOLS
        and inspect.isfunction(getattr(user_class, name))
    }


def describe_tool(method: Callable[..., Any]) -> dict[str, Any]:
    """Name, description and the JSON schema of the parameters."""
    doc = inspect.getdoc(method)
    if not doc:
        raise InvalidValue(f"the tool {method.__name__} has no docstring; write what it does")
    hints = get_type_hints(method)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
        if name not in hints:
            raise InvalidValue(
                f"the parameter {name!r} of the tool {method.__name__} has no type hint; add it"
            )
        properties[name] = {**_schema_of(hints[name]), **_describe_parameter(doc, name)}
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": method.__name__, "description": doc.split("\n\n")[0], "parameters": schema}


def _schema_of(hint: Any) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": JSON_TYPES.get(type(args[0]), "string"), "enum": list(args)}
    if origin in (Union, UnionType):
        members = [arg for arg in args if arg is not NoneType]
        return {**_schema_of(members[0]), "nullable": True} if len(members) == 1 else {}
    kind = JSON_TYPES.get(origin or hint)
    return {} if kind in (None, "any") else {"type": kind}


def _describe_parameter(doc: str, name: str) -> dict[str, str]:
    """From a line `name: text` or `name (type): text` below `Args:`."""
    for line in doc.splitlines():
        head, colon, text = line.strip().partition(":")
        if colon and head.split(" ")[0] == name and text.strip():
            return {"description": text.strip()}
    return {}


def find_argument_problem(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """What the student did wrong; None: nothing."""
    properties = schema["properties"]
    if unknown := [name for name in arguments if name not in properties]:
        return f"unexpected argument {unknown[0]!r}; there are {list(properties)}"
    if missing := [name for name in schema["required"] if name not in arguments]:
        return f"missing argument {missing[0]!r}"
    for name, value in arguments.items():
        property_schema = properties[name]
        if value is None and property_schema.get("nullable"):
            continue
        kind = property_schema.get("type")
        is_bool = isinstance(value, bool) and kind != "boolean"
        if kind is not None and (is_bool or not isinstance(value, PYTHON_TYPES[kind])):
            return f"{name} must be of type {kind}, not {json.dumps(value)}"
        if "enum" in property_schema and value not in property_schema["enum"]:
            return f"{name} must be one of {property_schema['enum']}, not {json.dumps(value)}"
    return None
