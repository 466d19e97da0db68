"""Rollouts that sample nothing: chat logs, documents, and trajectories that another run has stored.

All give exact token ids of this model, or refuse. Nothing is truncated or re-tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from courtside.chat.answer_boundary import common_prefix_length
from courtside.chat.chat_log_rendering import CallFormatter, trajectory_from_chat_log
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.messages import message_tree
from courtside.errors import TaskError
from courtside.rollout.shares import index_tasks
from courtside.seeds import trajectory_id
from courtside.types import Task, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLogRollout:
    """Renders chat logs through this model's chat template (`chat.chat_log_rendering`)."""

    template: IncrementalTemplate
    format_call: CallFormatter
    temperature: float
    context_length: int

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        return [
            self.trajectory(task, trajectory_id(step, index, 0))
            for index, task in index_tasks(tasks).items()
        ]

    def trajectory(self, task: Task, id: str) -> Trajectory:
        trajectory = self._render(task, id)
        num_tokens = len(trajectory.token_ids)
        if num_tokens > self.context_length:
            raise TaskError(
                f"task {task.id}: the conversation has {num_tokens} tokens and the model takes "
                f"{self.context_length}. Shorten it or leave it out; nothing is cut silently"
            )
        return trajectory

    def count_tokens(self, task: Task) -> int:
        """Of the whole conversation; a TaskError where it cannot be rendered."""
        return len(self._render(task, task.id).token_ids)

    def _render(self, task: Task, id: str) -> Trajectory:
        prompt = [message_tree(message) for message in task.messages]
        return trajectory_from_chat_log(
            task,
            [*prompt, *task.conversation],
            self.template,
            id=id,
            temperature=self.temperature,
            format_call=self.format_call,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRollout:
    """Windows of plain text. Every token but a window's first is a completion token."""

    window: Callable[[str], tuple[int, ...]]
    """Token ids by the id of their task."""
    decode: Callable[[Sequence[int]], str]
    temperature: float

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        return [
            self.trajectory(task, trajectory_id(step, index, 0))
            for index, task in index_tasks(tasks).items()
        ]

    def trajectory(self, task: Task, id: str) -> Trajectory:
        ids = self.window(task.id)
        first = Turn(
            role="prompt", text=self.decode(ids[:1]), token_ids=ids[:1], completion_mask=(False,)
        )
        text = Turn(
            role="assistant",
            text=self.decode(ids[1:]),
            token_ids=ids[1:],
            completion_mask=(True,) * len(ids[1:]),
        )
        return Trajectory(
            id=id,
            task=task,
            turns=(first, text),
            source="dataset",
            policy_version=None,
            temperature=self.temperature,
            stop="dataset",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRollout:
    """Loads stored trajectories under their own ids.

    Their token ids must decode to the stored text. The chat template may render the same prompts
    differently today (`describe_prompt_difference`): the stored ids are what trains.
    """

    load: Callable[[Sequence[str]], list[Trajectory]]
    """Trajectories by id, in order."""
    template: IncrementalTemplate
    vocab_size: int

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        trajectories = self.load([task.id for task in tasks])
        for trajectory in trajectories:
            self._check_vocabulary(trajectory)
        return trajectories

    def _check_vocabulary(self, trajectory: Trajectory) -> None:
        renderer = self.template.renderer
        fix = "Name a run of a student with the same vocabulary"
        if (largest := max(trajectory.token_ids, default=0)) >= self.vocab_size:
            raise TaskError(
                f"trajectory {trajectory.id}: holds the token {largest}, and the vocabulary of "
                f"{renderer.name} has {self.vocab_size}. {fix}"
            )
        for index, turn in enumerate(trajectory.turns):
            if turn.role != "assistant":
                continue
            # A substring: stop strings are cut off the text, and templates put thinking before it.
            decoded = renderer.text(turn.token_ids)
            if turn.text.strip() not in decoded:
                raise TaskError(
                    f"trajectory {trajectory.id}, turn {index}: its tokens are {decoded[:40]!r}… "
                    f"for {renderer.name}, and were {turn.text[:40]!r}… when they were stored. "
                    f"{fix}"
                )


def describe_prompt_difference(
    trajectories: Sequence[Trajectory], template: IncrementalTemplate
) -> str | None:
    """How the chat template renders a stored prompt differently today; None: it does not."""
    for trajectory in trajectories:
        stored_ids = trajectory.turns[0].token_ids
        ids = template.renderer.prompt_ids(trajectory.task.messages)
        if stored_ids != ids:
            num_same = common_prefix_length(stored_ids, ids)
            return (
                f"{template.renderer.name}: its chat template makes other tokens of the prompt of "
                f"trajectory {trajectory.id}: "
                f"{template.describe_difference(stored_ids, ids, num_same)}. Stored trajectories "
                "stay as they are"
            )
    return None
