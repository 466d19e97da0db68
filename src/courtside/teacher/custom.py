"""A teacher from user code: an object with `score(trajectories)`, made from `module:name`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

from courtside.engines.base import Want
from courtside.errors import RecipeError, RunError, UserError
from courtside.plugins import describe_error, make_plugin
from courtside.recipe.teacher import CustomTeacherConfig
from courtside.types import Target, Trajectory


class Need(NamedTuple):
    """What a loss needs of a teacher's distributions."""

    setting: str
    """The recipe's, for error messages."""
    want: Want
    top_k: int = 0
    given_k: int = 0
    """Instead of hidden states: log-probs of so many tokens that the student finds likely."""


class CustomTeacher:
    """Checks what the user's teacher returns. It scores; it neither samples nor sees hints."""

    def __init__(self, config: CustomTeacherConfig, needs: Sequence[Need]):
        self.teacher = make_plugin(config, "function", section="teacher", error=RecipeError)
        self.name = config.path
        self.needs = needs
        self.num_parameters = int(getattr(self.teacher, "num_parameters", 0))
        if not callable(getattr(self.teacher, "score", None)):
            raise RecipeError(
                f"teacher.path = {config.path!r}: {type(self.teacher).__name__} has no method "
                "score(trajectories); add one that returns a Target by trajectory id"
            )

    def score(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Target]:
        """By trajectory id; those that the user's teacher leaves out have no target."""
        targets = self._call_score(trajectories)
        if not isinstance(targets, Mapping):
            self._refuse(f"returned {type(targets).__name__}; return a dict from id to Target")
        by_id = {trajectory.id: trajectory for trajectory in trajectories}
        for id, target in targets.items():
            if id not in by_id or not isinstance(target, Target):
                self._refuse(
                    f"returned {type(target).__name__} for {id!r}; return a courtside.types.Target "
                    "for ids of the given trajectories"
                )
            self._check(by_id[id], target)
        return {id: replace(target, teacher=self.name) for id, target in targets.items()}

    def _call_score(self, trajectories: Sequence[Trajectory]) -> object:
        try:
            return self.teacher.score(trajectories)
        except (KeyboardInterrupt, RunError, UserError):
            raise
        except BaseException as error:  # user code, also sys.exit and cancelled tasks
            raise RunError(
                f"teacher {self.name!r}: score(trajectories) {describe_error(error)}. Correct it "
                "and go on in the same folder"
            ) from error

    def score_hints(self, *args: object) -> NoReturn:
        raise AssertionError("the recipe was checked: a custom teacher has no reader")

    def write(self, *args: object) -> NoReturn:
        raise RecipeError(
            f"teacher.path = {self.name!r} scores and does not sample. Set evaluate.forward_kl = "
            "false, and off_policy_source = 'dataset'"
        )

    def _check(self, trajectory: Trajectory, target: Target) -> None:
        indices = target.token_indices
        size = trajectory.num_completion_tokens if indices is None else len(indices)
        columns = (target.logp_T, target.hidden_TD, target.top_ids_TK, target.top_logp_TK)
        if any(column is not None and len(column) != size for column in columns):
            self._refuse(
                f"has {len(target.logp_T)} log-probs for {trajectory.id!r}, which has {size} "
                "tokens to score: return a row for each of trajectory.completion_ids, or name them "
                "in token_indices"
            )
        if target.hidden_TD is not None and target.head is not None:
            return
        for need in self.needs:
            num_top = 0 if target.top_logp_TK is None else target.top_logp_TK.shape[-1]
            if need.want == "hidden" or need.top_k > num_top:
                self._refuse(
                    f"gives too little for {need.setting}: set hidden_TD and head, or (with "
                    "support = { kind = 'top_k', of = 'teacher' }) top_ids_TK and top_logp_TK with "
                    "k columns"
                )

    def _refuse(self, problem: str) -> NoReturn:
        raise RunError(f"teacher {self.name!r} {problem}")
