"""Base class and types of the recipe's sections."""

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
    """A section of the recipe: frozen; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class RefusedValue(Section):
    """An option that is refused with its reason instead of as unknown."""
