"""[teacher]: the model that scores, its weights and its context."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from courtside.recipe.base import Section, Setting, import_path
from courtside.recipe.context import Context
from courtside.recipe.score_store import ScoreStoreConfig
from courtside.recipe.server import ServerConfig

EMA_DECAY = 0.99


ChatTemplateArgs = Mapping[str, Setting] | None


class SelfTeacherConfig(Section):
    kind: Literal["self"]
    weights: Literal["live", "frozen", "ema"] = "frozen"
    """live: the student as it is now; frozen: as it was before training; ema: a moving average."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = EMA_DECAY
    store: ScoreStoreConfig | None = None
    """Keep its scores on disk; frozen weights only. Unset: each is computed when it is needed."""
    context: Context | None = None
    chat_template_args: ChatTemplateArgs = None
    """Switches of the chat template in the teacher's prompt. Unset: the student's. Turns after the
    first answer are what the student saw. Not with a [reader]."""


class ModelTeacherConfig(Section):
    kind: Literal["model"]
    model: str
    adapter: Path | None = None
    """A LoRA adapter's folder, put on top of `model`."""
    dtype: Literal["auto", "float32", "bfloat16", "int8", "nf4"] = "auto"
    """auto: as the student's. int8: weights of the linear layers in 8 bits with a scale per row.
    nf4: in 4 bits, by bitsandbytes (`pip install -e '.[quantized]'`)."""
    store: ScoreStoreConfig | None = None
    """Keep its scores on disk. Unset: each is computed when it is needed."""
    context: Context | None = None
    context_length: PositiveInt | None = None
    """As `student.context_length`."""
    chat_template_args: ChatTemplateArgs = None
    """Switches of the chat template in the teacher's prompt. Unset: the student's. Turns after the
    first answer are what the student saw. Not with a [reader]."""
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _adapter_can_be_merged(self) -> ModelTeacherConfig:
        if self.dtype == "nf4" and self.adapter is not None:
            raise ValueError(
                "dtype = 'nf4' quantizes while the model loads, before an adapter could be merged. "
                "Give `model` a folder that `courtside export` wrote, or take dtype = 'int8'"
            )
        return self


class ServerTeacherConfig(Section):
    """A teacher behind vLLM servers. It gives log-probs of the student's tokens and the k likeliest
    tokens, at temperature 1."""

    kind: Literal["server"]
    server: ServerConfig
    tokenizer: str | None = None
    """Folder or hub id of its tokenizer, whose chat template then renders its prompts. Unset: the
    student's, which the servers are asked to confirm."""
    num_parameters: PositiveInt | None = None
    """For estimates of FLOPs. Unset: its FLOPs count as 0."""
    store: ScoreStoreConfig | None = None
    """Keep its scores on disk. Unset: each is computed when it is needed."""
    context: Context | None = None
    chat_template_args: ChatTemplateArgs = None
    """Switches of the chat template in the teacher's prompt. Unset: the student's. Turns after the
    first answer are what the student saw. Not with a [reader]."""

    @property
    def model(self) -> str:
        return self.server.model


def choose_route(tags: Sequence[str], routes: Collection[str], default: str | None) -> str | None:
    """The first tag of a task that has a route, or the default."""
    return next((tag for tag in tags if tag in routes), default)


class RoutedTeacherConfig(Section):
    kind: Literal["routes"]
    routes: Annotated[
        Mapping[
            str,
            Annotated[
                SelfTeacherConfig | ModelTeacherConfig | ServerTeacherConfig,
                Field(discriminator="kind"),
            ],
        ],
        Field(min_length=1),
    ]
    """Tag of a task → its teacher. The first tag of a task that has a route decides."""
    default: str | None = None
    """Tag whose teacher scores tasks without a route. Unset: such a task is an error."""

    @model_validator(mode="after")
    def _default_is_a_route(self) -> RoutedTeacherConfig:
        if self.default is not None and self.default not in self.routes:
            raise ValueError(f"default = {self.default!r} is not one of routes {list(self.routes)}")
        return self


class CustomTeacherConfig(Section):
    """A custom teacher: see docs/extending.md."""

    kind: Literal["custom"]
    path: Annotated[str, import_path("my_teachers:Teacher")]
    """`module:name` of a class or function that returns an object with `score(trajectories)`. The
    module is installed, or in the working directory."""
    settings: Mapping[str, Setting] = Field(default_factory=dict)
    """Keyword arguments of the class or function."""


ScoringTeacherConfig = SelfTeacherConfig | ModelTeacherConfig | ServerTeacherConfig
"""One model, which has a context of its own."""

TeacherConfig = Annotated[
    SelfTeacherConfig
    | ModelTeacherConfig
    | ServerTeacherConfig
    | RoutedTeacherConfig
    | CustomTeacherConfig,
    Field(discriminator="kind"),
]
