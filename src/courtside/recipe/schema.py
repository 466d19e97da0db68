"""Introspection of the recipe's types: members of unions, kinds of sections, types of keys."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def unwrap(annotation: Any) -> Any:
    """The type itself, without Annotated and without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        if len(members) == 1:
            return unwrap(members[0])
    return annotation


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; empty if it is no union."""
    annotation = unwrap(annotation)
    if get_origin(annotation) not in (Union, UnionType):
        return ()
    return tuple(unwrap(member) for member in get_args(annotation) if member is not NoneType)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def section_kind(section: type[BaseModel]) -> str | None:
    """`divergence` for DivergenceLoss; None for a section that has no kind."""
    field = section.model_fields.get("kind")
    return str(get_args(field.annotation)[0]) if field is not None else None


def sections_by_kind(annotation: Any) -> dict[str, type[BaseModel]]:
    """The sections of a tagged union by their `kind`; empty if it is no tagged union."""
    members = union_members(annotation)
    if not members or not all(is_section(member) and section_kind(member) for member in members):
        return {}
    return {str(section_kind(member)): member for member in members}


def field_type(annotation: Any, key: int | str) -> Any:
    """The type of a section's key, of a list's entry, of a table's value; Any where unknown."""
    annotation = unwrap(annotation)
    if is_section(annotation):
        fields = {field.alias or name: field for name, field in annotation.model_fields.items()}
        field = fields.get(str(key))
        return Any if field is None else field.annotation
    inner = get_args(annotation)
    if get_origin(annotation) is Mapping:
        return inner[1]
    if get_origin(annotation) is tuple and isinstance(key, int):
        return inner[0] if inner[-1] is Ellipsis else inner[key]
    return Any
