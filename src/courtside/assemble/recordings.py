"""Recorded conversations and stored trajectories as the token ids of this model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from courtside.chat.incremental import IncrementalTemplate
from courtside.environments.tool_calls import CallFormat, format_call
from courtside.errors import TaskError
from courtside.recipe import Recipe
from courtside.recipe.tasks import ConversationTasks
from courtside.rollout.offline import ChatLogRollout, DocumentRollout
from courtside.tasks.base import FiniteSource, TaskSource
from courtside.tasks.documents import DocumentSource
from courtside.tasks.stored_trajectories import ReplaySource
from courtside.types import Task, Trajectory


def make_chat_log_rollout(
    recipe: Recipe, template: IncrementalTemplate, context_length: int
) -> ChatLogRollout:
    assert isinstance(recipe.tasks, ConversationTasks)
    return ChatLogRollout(
        template=template,
        format_call=partial(format_recorded_call, recipe.tasks.tool_call_format),
        temperature=recipe.rollout.temperature,
        context_length=context_length,
    )


def make_document_rollout(
    recipe: Recipe, tasks: DocumentSource, template: IncrementalTemplate
) -> DocumentRollout:
    return DocumentRollout(
        window=tasks.window,
        decode=template.renderer.text,
        temperature=recipe.rollout.temperature,
    )


def format_recorded_call(call_format: CallFormat, name: str, arguments: Any) -> str:
    """A tool call of a chat log as text, where the chat template does not render calls."""
    if not isinstance(arguments, dict):
        raise TaskError(
            f"a call of {name!r} has arguments that are no JSON object: {arguments!r}. Mend or "
            "leave out the conversation"
        )
    return format_call(name, arguments, call_format)


class Recordings:
    """The trajectories of a recipe that samples none."""

    def __init__(
        self,
        recipe: Recipe,
        tasks: TaskSource,
        template: IncrementalTemplate,
        context_length: int,
    ) -> None:
        assert isinstance(tasks, FiniteSource | DocumentSource)
        self.tasks = tasks
        self._render: ChatLogRollout | DocumentRollout | None = None
        if isinstance(tasks, DocumentSource):
            self._render = make_document_rollout(recipe, tasks, template)
        elif not isinstance(tasks, ReplaySource):
            self._render = make_chat_log_rollout(recipe, template, context_length)
        self._task_of: Mapping[str, Task] = {task.id: task for task in tasks.train_tasks}

    def load(self, task: Task) -> Trajectory:
        """A conversation has its task's id."""
        if self._render is not None:
            return self._render.trajectory(task, task.id)
        assert isinstance(self.tasks, ReplaySource)
        return self.tasks.load([task.id])[0]

    def find(self, name: str) -> Sequence[Trajectory]:
        """Those that a hints file calls by that name."""
        if self._render is not None:
            return [self.load(self._task_of[name])] if name in self._task_of else []
        assert isinstance(self.tasks, ReplaySource)
        return self.tasks.load(self.tasks.trajectories_of.get(name, ()))
