"""Prompts are rendered once a task, and once more for each privileged context."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe

from courtside.assemble import assemble
from courtside.chat.template import ChatTemplate

CONTEXT = {"kind": "system", "text": "Be brief."}


@pytest.mark.parametrize("own_model", [True, False], ids=["another model", "the student itself"])
@pytest.mark.parametrize(("context", "expected"), [(None, 16), (CONTEXT, 32)])
def test_one_render_a_task_and_context(
    own_model: bool,
    context: dict[str, Any] | None,
    expected: int,
    tiny_folder: Path,
    tiny_teacher_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher: dict[str, Any] = {"kind": "self", "weights": "frozen"}
    if own_model:
        teacher = {"kind": "model", "model": str(tiny_teacher_folder)}
    recipe = small_recipe(
        tiny_folder,
        teacher=teacher | ({"context": context} if context else {}),
        tasks={"kind": "arithmetic"},
        rollout={"samples_per_prompt": 4, "max_new_tokens": 3},
        train={"prompts_per_step": 16, "learning_rate": 1e-3, "steps": 5},
    )
    parts = assemble(recipe)
    renders: Counter[Any] = Counter()
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, cut: str, **options: Any) -> str:
        renders[tuple(messages)] += 1
        return render(self, messages, cut, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    step = 3  # of which nothing was rendered before
    trajectories = parts.rollout(parts.tasks.batch(step, 16), step)
    scored = parts.teacher(trajectories)
    assert len(scored) == 64 and all(s.target is not None for s in scored)
    assert sum(renders.values()) == expected
    assert set(renders.values()) == {1}
