"""Errors for users. Each message names the field or file, the reason and the fix.

`UserError` and its children end a command with exit code 2: nothing was trained and nothing was
lost. `RunError` ends it with exit code 1: the run itself failed, and the message says what is kept
and how to go on; a failed gate with 3. Broken invariants of our own are `assert`, never these.
"""


class UserError(ValueError):
    """Something the user wrote cannot work as it stands."""


class RecipeError(UserError):
    """A recipe field, or a combination of fields, that cannot work."""


class TaskError(UserError):
    """A prompts file, data set or generator that cannot give the tasks asked for."""


class ModelError(UserError):
    """A model, tokenizer or chat template that is missing or does not fit."""


class PlanError(UserError):
    """An estimate that cannot be made from what was given."""


class RunError(RuntimeError):
    """A run that was going and had to stop. What it had saved is still there."""


class NotFiniteError(RunError):
    """NaN or Inf in a loss or gradient. The batch was saved for inspection."""


class ServerError(RunError):
    """Servers that do not answer, or give something else than asked. The steps done are saved."""


class EnvironmentFaultsError(RunError):
    """Bugs in an environment ended too many episodes. The steps done are saved."""


class DraftFailuresError(RunError):
    """A model that corrects drafts gave too few valid answers. The steps done are saved."""


class GateFailedError(RunError):
    """A stage of a pipeline lost more on a suite than its gate allows. All stages are saved."""


class CheckpointError(RunError):
    """A checkpoint that cannot be written or read. Older ones are untouched."""


class Interrupted(RunError):
    """Ctrl-C, SIGTERM or SIGHUP: a checkpoint was saved and the message says how to go on."""

    def __init__(self, message: str, signal_number: int = 2) -> None:
        super().__init__(message)
        self.signal_number = signal_number
