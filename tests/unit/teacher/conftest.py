from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.tiny_model import tiny_tokenizer

from courtside.chat.template import ChatTemplate
from courtside.engines.base import SampleRequest, Sampling, ScoreRequest, Scores, Want
from courtside.types import Grade, Message, Sample, Task, Trajectory, Turn


class Listener:
    """An engine that remembers what it was asked, and scores each token with its own id."""

    name = "listener"
    context_length = 512
    head = object()

    def __init__(self) -> None:
        self.scored: list[ScoreRequest] = []
        self.sampled: list[SampleRequest] = []
        self.want: Want | None = None

    def score(
        self, requests: Sequence[ScoreRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[Scores]:
        self.scored += requests
        self.want = want
        out = []
        for r in requests:
            ids = [i for i, scored in zip(r.token_ids, r.scored, strict=True) if scored]
            ids_T = torch.tensor(ids, dtype=torch.float32)
            out.append(
                Scores(logp_T=-ids_T, hidden_TD=ids_T[:, None] if want == "hidden" else None)
            )
        return out

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        self.sampled += requests
        return [
            Sample(token_ids=(9, 1), logp=(-1.0, -2.0), stop="eos", text=f"seed {r.seed}")
            for r in requests
        ]


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="session")
def renderer() -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids={1})


@pytest.fixture(scope="session")
def encode() -> Callable[[str], tuple[int, ...]]:
    """Text with special tokens to ids, past the renderer."""
    tokenizer = tiny_tokenizer()
    return lambda text: tuple(tokenizer(text)["input_ids"])


@pytest.fixture(scope="session")
def make_task() -> Callable[..., Task]:
    def make(id: str = "t", *, system: str | None = None, **options: Any) -> Task:
        messages = [Message(role="user", content=f"Ask {id}")]
        if system is not None:
            messages.insert(0, Message(role="system", content=system))
        return Task(id=id, split="train", messages=tuple(messages), **options)

    return make


@pytest.fixture(scope="session")
def make_trajectory(
    make_task: Callable[..., Task], renderer: ChatTemplate
) -> Callable[..., Trajectory]:
    def make(
        id: str,
        task: Task | None = None,
        *,
        ids: tuple[int, ...] = (40, 41, 1),
        text: str | None = None,
        passed: bool | None = None,
        feedback: str = "",
        temperature: float = 1.0,
    ) -> Trajectory:
        task = task or make_task()
        prompt = renderer.prompt_ids(task.messages)
        grade = None
        if passed is not None:
            grade = Grade(score=float(passed), passed=passed, feedback=feedback)
        return Trajectory(
            id=id,
            task=task,
            turns=(
                Turn(
                    role="prompt", text="", token_ids=prompt, completion_mask=(False,) * len(prompt)
                ),
                Turn(
                    role="assistant",
                    text=renderer.text(ids) if text is None else text,
                    token_ids=ids,
                    completion_mask=(True,) * len(ids),
                    sampler_logp=(-1.0,) * len(ids),
                ),
            ),
            source="student",
            policy_version=0,
            temperature=temperature,
            stop="eos",
            grade=grade,
        )

    return make
