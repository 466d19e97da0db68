"""What every node of the tree shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from courtside.plugins import check_import_path

Fraction = Annotated[float, Field(ge=0, le=1)]
Setting = bool | int | float | str | tuple[bool | int | float | str, ...]
"""A value of `settings`: keyword arguments of user code."""


def import_path(example: str) -> AfterValidator:
    """Validates `module:name`, the form in which a recipe names user code."""
    return AfterValidator(lambda path: check_import_path(path, example))


class Section(BaseModel):
    """Every node of the tree: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class RefusedValue(Section):
    """Known only so that it can be refused with the reason, not as an unknown word."""
