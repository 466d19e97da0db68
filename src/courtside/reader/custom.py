"""A reader from user code: an instance of the class at `module:Class`, called with trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from courtside.errors import RecipeError, RunError, UserError
from courtside.plugins import describe_error, make_plugin
from courtside.reader.base import ReaderOutput
from courtside.recipe.reader import CustomReaderConfig
from courtside.types import Hint, Trajectory


class CustomReader:
    """Checks what the user's reader returns. Hints for unusable turns are dropped by
    `CombinedReader`, as those of every reader."""

    def __init__(self, config: CustomReaderConfig):
        self.config = config
        self.reader = make_plugin(config, "class", section="reader", error=RecipeError)
        if not callable(self.reader):
            name = config.path.partition(":")[2]
            raise RecipeError(
                f"reader.path = {config.path!r}: {name} has no method __call__(trajectories); "
                "add one that returns hints"
            )

    def __call__(self, trajectories: Sequence[Trajectory]) -> ReaderOutput:
        result = self._propose(trajectories)
        if isinstance(result, ReaderOutput):
            result = result.hints
        if not isinstance(result, Iterable) or isinstance(result, str | bytes | dict):
            raise RunError(
                f"reader {self.config.path!r} returned {type(result).__name__}; return a list of "
                "courtside.types.Hint, empty where there is nothing to say"
            )
        counts: Counter[str] = Counter()
        hints: list[Hint] = []
        for hint in result:
            self._validate_hint(hint)
            counts["custom/proposed"] += 1
            if len(hint.text) > self.config.max_chars:
                counts["dropped/long_hint"] += 1
            else:
                hints.append(hint)
        return ReaderOutput(hints=tuple(hints), counts=counts)

    def _propose(self, trajectories: Sequence[Trajectory]) -> object:
        """What the user's code gives; a generator runs here."""
        try:
            result = self.reader(trajectories)
            return list(result) if isinstance(result, Iterator) else result
        except (KeyboardInterrupt, RunError, UserError):
            raise
        except BaseException as error:  # user code, also sys.exit and cancelled tasks
            raise RunError(
                f"reader {self.config.path!r} {describe_error(error)}. Correct it and go on in the "
                "same folder"
            ) from error

    def _validate_hint(self, hint: object) -> None:
        where = f"reader {self.config.path!r}"
        if not isinstance(hint, Hint):
            raise RunError(
                f"{where} returned a list with {type(hint).__name__} in it; return "
                "courtside.types.Hint(trajectory=…, turn=…, text=…, source=…)"
            )
        for name, kind in (("trajectory", str), ("turn", int), ("text", str), ("source", str)):
            value = getattr(hint, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise RunError(f"{where}: Hint.{name} = {value!r} must be {kind.__name__}")
