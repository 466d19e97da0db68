"""Nobody acts: conversations that were recorded elsewhere, token by token as this model reads them.

They are refused where the model's template does not line up with them (`chat.recorded`).
"""

from __future__ import annotations

from collections.abc import Sequence

from courtside.chat.chat_logs import CallWriter, trajectory_from_chat_log
from courtside.chat.incremental import IncrementalTemplate
from courtside.errors import TaskError
from courtside.rollout.mixing import trajectory_id
from courtside.types import Task, Trajectory


class ChatLogRollout:
    def __init__(
        self,
        *,
        turns: IncrementalTemplate,
        write_call: CallWriter,
        temperature: float,
        context_length: int,
    ):
        self.turns = turns
        self.write_call = write_call
        self.temperature = temperature
        self.context_length = context_length

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        return [self.trajectory(t, trajectory_id(step, i, 0)) for i, t in enumerate(tasks)]

    def trajectory(self, task: Task, id: str) -> Trajectory:
        prompt = [{"role": m.role, "content": m.content} for m in task.messages]
        found = trajectory_from_chat_log(
            task,
            [*prompt, *task.conversation],
            self.turns,
            id=id,
            temperature=self.temperature,
            write_call=self.write_call,
        )
        if len(found.token_ids) > self.context_length:
            raise TaskError(
                f"task {task.id}: the conversation has {len(found.token_ids)} tokens and the model "
                f"takes {self.context_length}. Shorten it or leave it out; nothing is cut silently"
            )
        return found
