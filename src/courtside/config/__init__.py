"""The recipe: one frozen tree. No torch, no files here: `recipe_file` reads TOML into it.

Defaults are the vetted setting. A state that cannot work cannot be written down: unknown keys,
wrong types and impossible combinations are refused with the field, the reason and the fix.
Checks that need tasks or models (a privileged field that no task has) happen in `assemble`.
"""

from courtside.config.base import Part, Refused, Share
from courtside.config.losses import (
    CrossEntropyLoss,
    DivergenceLoss,
    EntropyAware,
    FullSupport,
    Loss,
    LossBase,
    PolicyGradientLoss,
    PreferenceLoss,
    SampledSupport,
    TopKSupport,
)
from courtside.config.recipe import Recipe, teachers_of
from courtside.config.rollout import Ramp, Rollout
from courtside.config.settings import Evaluate, Run, Train
from courtside.config.student import Lora, Student
from courtside.config.tasks import (
    ArithmeticTasks,
    CheckName,
    DatasetTasks,
    InstructionTasks,
    JsonlTasks,
    Tasks,
    TasksBase,
)
from courtside.config.teacher import (
    EMA_DECAY,
    Context,
    FeedbackContext,
    FieldContext,
    ModelTeacher,
    RoutedTeacher,
    SelfTeacher,
    SiblingContext,
    SystemContext,
    Teacher,
)

__all__ = [
    "EMA_DECAY",
    "ArithmeticTasks",
    "CheckName",
    "Context",
    "CrossEntropyLoss",
    "DatasetTasks",
    "DivergenceLoss",
    "EntropyAware",
    "Evaluate",
    "FeedbackContext",
    "FieldContext",
    "FullSupport",
    "InstructionTasks",
    "JsonlTasks",
    "Lora",
    "Loss",
    "LossBase",
    "ModelTeacher",
    "Part",
    "PolicyGradientLoss",
    "PreferenceLoss",
    "Ramp",
    "Recipe",
    "Refused",
    "Rollout",
    "RoutedTeacher",
    "Run",
    "SampledSupport",
    "SelfTeacher",
    "Share",
    "SiblingContext",
    "Student",
    "SystemContext",
    "Tasks",
    "TasksBase",
    "Teacher",
    "TopKSupport",
    "Train",
    "teachers_of",
]
