"""On-policy distillation: the student writes, and a teacher corrects it where it went.

The public names below load on first use, so that importing courtside costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from courtside import errors
    from courtside.api import (
        evaluate_student,
        export,
        export_corrections,
        rescore,
        show,
        train,
    )
    from courtside.comparison.comparison import Comparison, compare
    from courtside.planning.plan import CostPlan, plan
    from courtside.recipe import Recipe
    from courtside.recipe.load import load_recipe, parse_recipe
    from courtside.recipe.pipeline import load_pipeline
    from courtside.report.folder.folder import RunFolder
    from courtside.types import Evaluation, Grade, Message, Task, Trajectory, Turn

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "CostPlan",
    "Evaluation",
    "Grade",
    "Message",
    "Recipe",
    "RunFolder",
    "Task",
    "Trajectory",
    "Turn",
    "__version__",
    "compare",
    "errors",
    "evaluate_student",
    "export",
    "export_corrections",
    "load_pipeline",
    "load_recipe",
    "parse_recipe",
    "plan",
    "rescore",
    "show",
    "train",
    "write_report",
]

_HOMES = {
    "Comparison": "courtside.comparison.comparison",
    "CostPlan": "courtside.planning.plan",
    "Evaluation": "courtside.types",
    "Grade": "courtside.types",
    "Message": "courtside.types",
    "Recipe": "courtside.recipe",
    "RunFolder": "courtside.report.folder.folder",
    "Task": "courtside.types",
    "Trajectory": "courtside.types",
    "Turn": "courtside.types",
    "compare": "courtside.comparison.comparison",
    "evaluate_student": "courtside.api",
    "export": "courtside.api",
    "export_corrections": "courtside.api",
    "load_pipeline": "courtside.recipe.pipeline",
    "load_recipe": "courtside.recipe.load",
    "parse_recipe": "courtside.recipe.load",
    "plan": "courtside.planning.plan",
    "rescore": "courtside.api",
    "show": "courtside.api",
    "train": "courtside.api",
    "write_report": "courtside.api",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("courtside.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'courtside' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
