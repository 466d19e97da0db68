"""Divergences between the student's and the teacher's next-token distributions, one file each.

To add one, add a file here that calls `register`, and a numerics test: recipes accept its name,
every loss over the vocabulary or a top-k support trains with it (docs/adding-a-divergence.md).

No file here imports torch: terms call tensor methods, and recipes are validated without loading it.
"""

from importlib import import_module
from pkgutil import iter_modules

from courtside.losses.divergences.registry import (
    Divergence,
    Form,
    Parameter,
    divergence_names,
    find_divergence,
    register,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Divergence", "Form", "Parameter", "divergence_names", "find_divergence", "register"]
