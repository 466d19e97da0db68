"""What a divergence declares, and where recipes and losses look it up by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

Terms = Callable[..., "Tensor"]
"""(student_logp_TV, teacher_logp_TV, **parameters) → the term of each token, [T, V]."""
Form = Literal["tail", "stop_gradient", "renormalized", "naive"]
"""What is done about the tokens outside a top-k support; see `losses/top_k.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number that a divergence needs, from `low` to `high`."""

    low: float = 0.0
    high: float = 1.0
    hint: str = ""
    """A usual value, for the message when it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A sum of terms over the vocabulary (or a support) that is 0 where π = q."""

    name: str
    terms: Terms
    """A token that both distributions exclude (log-probability −inf) has to add 0 and get a
    gradient of 0; `kl_terms` and `log_mixture` do."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    truncation_bias: str | None = None
    """Where training on a support without a tail ends, for a warning. None: the forms `naive` and
    `stop_gradient` are refused."""
    stop_gradient_terms: Terms | None = None
    """Terms of the form `stop_gradient`, without that bias. None: the form is the naive one."""

    def check_parameters(self, values: Mapping[str, float]) -> None:
        for name, parameter in self.parameters.items():
            bounds = f"between {parameter.low:g} and {parameter.high:g}"
            if name not in values:
                hint = f" ({parameter.hint})" if parameter.hint else ""
                raise ValueError(
                    f"divergence = {self.name!r} needs {name}; set {name} {bounds}{hint}"
                )
            if not parameter.low <= values[name] <= parameter.high:
                raise ValueError(f"{name} = {values[name]}: must lie {bounds}")
        for name in values:
            if name not in self.parameters:
                users = [repr(d.name) for d in _REGISTRY.values() if name in d.parameters]
                reason = f"belongs to {' and '.join(users)}" if users else "belongs to none"
                raise ValueError(
                    f"{name} {reason}, not to divergence = {self.name!r}; remove it, or use "
                    "another divergence"
                )

    def check_form(self, form: Form) -> None:
        if form not in get_args(Form):
            raise ValueError(f"form = {form!r}: use one of {', '.join(get_args(Form))}")
        if form in ("stop_gradient", "naive") and self.truncation_bias is None:
            users = [d.name for d in _REGISTRY.values() if d.truncation_bias is not None]
            raise ValueError(
                f"support.form = {form!r} is defined for {' and '.join(users)}; use form = 'tail' "
                f"with {self.name}"
            )


_REGISTRY: dict[str, Divergence] = {}


def register(divergence: Divergence) -> Divergence:
    """Make a divergence known by its name."""
    if _REGISTRY.setdefault(divergence.name, divergence) != divergence:
        raise ValueError(f"two divergences are registered as {divergence.name!r}; rename one")
    return divergence


def divergence_names() -> tuple[str, ...]:
    return tuple(_REGISTRY)


def find_divergence(name: str) -> Divergence:
    """The divergence registered as `name`, or the one that `module:attribute` names."""
    if ":" in name:
        return _import_divergence(name)
    if name not in _REGISTRY:
        names = ", ".join(_REGISTRY)
        raise ValueError(
            f"{name!r} is no divergence; use one of {names}, or 'module:attribute' for your own"
        )
    return _REGISTRY[name]


def _import_divergence(path: str) -> Divergence:
    """A `Divergence`, or a function that becomes the terms of one without parameters."""
    module, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path:  # the folder of a command is not on the path otherwise
        sys.path.append(str(Path.cwd()))
    try:
        value = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"divergence = {path!r} cannot be imported: {error}. Install the module, or put it "
            f"into the folder where the command runs ({Path.cwd()})"
        ) from error
    if isinstance(value, Divergence):
        return value
    if not callable(value):
        raise ValueError(f"divergence = {path!r} is neither a Divergence nor a function of terms")
    return Divergence(name=path, terms=value)
