"""Nobody acts: trajectories that another run has stored, as they are and under their own ids.

Their ids must be this model's words, or they are refused. Whether its template would write the same
prompts is another question (`compare_rendering`): what was read and written is what trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from courtside.chat.incremental import IncrementalTemplate, num_common
from courtside.errors import TaskError
from courtside.types import Task, Trajectory


class ReplayRollout:
    def __init__(
        self,
        *,
        read: Callable[[Sequence[str]], list[Trajectory]],
        turns: IncrementalTemplate,
        vocab_size: int,
    ):
        self.read = read
        """Trajectories by their ids, in order."""
        self.turns = turns
        self.vocab_size = vocab_size

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        found = self.read([task.id for task in tasks])
        for trajectory in found:
            self._check_words(trajectory)
        return found

    def _check_words(self, trajectory: Trajectory) -> None:
        renderer = self.turns.renderer
        fix = "Name a run of a student with the same vocabulary"
        if (largest := max(trajectory.token_ids, default=0)) >= self.vocab_size:
            raise TaskError(
                f"trajectory {trajectory.id}: holds the token {largest}, and {renderer.name} has "
                f"{self.vocab_size} words. {fix}"
            )
        for index, turn in enumerate(trajectory.turns):
            if turn.role != "assistant":
                continue
            # Inside: a stop string was cut off the text, and templates put thinking before it.
            now = renderer.text(turn.token_ids)
            if turn.text.strip() not in now:
                raise TaskError(
                    f"trajectory {trajectory.id}, turn {index}: its tokens are {now[:40]!r}… for "
                    f"{renderer.name}, and were {turn.text[:40]!r}… when they were stored. {fix}"
                )


def compare_rendering(trajectories: Sequence[Trajectory], turns: IncrementalTemplate) -> str | None:
    """How this model's template renders a stored prompt today, where that is not how it was."""
    for trajectory in trajectories:
        went = trajectory.turns[0].token_ids
        now = turns.prompt(trajectory.task.messages).token_ids
        same = num_common(went, now)
        if went != now:
            return (
                f"{turns.renderer.name}: its chat template makes other tokens of the prompt of "
                f"trajectory {trajectory.id}: {turns.told_apart(went, now, same)}. Stored "
                "trajectories stay as they are"
            )
    return None
