"""Run folders as far as their trajectories go, written without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.tiny_model import tiny_tokenizer

from courtside.report.folder.parquet import write_trajectories
from courtside.types import Grade, Message, Scored, Source, Task, Trajectory, Turn

ASK = (Message(role="user", content="Is it?"),)


def make_trajectory(
    id: str, text: str = "It is.", *, task: str = "t", source: Source = "student"
) -> Any:
    """As the tiny model's template and tokenizer have it; one token a byte."""
    tokenizer = tiny_tokenizer()
    prompt = "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"
    ids = [tuple(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (prompt, text)]
    turns = (
        Turn(role="prompt", text="", token_ids=ids[0], completion_mask=(False,) * len(ids[0])),
        Turn(
            role="assistant", text=text, token_ids=ids[1], completion_mask=(True,) * len(ids[1]),
            sampler_logp=None if source == "dataset" else (-1.0,) * len(ids[1]),
        ),
    )  # fmt: skip
    return Trajectory(
        id=id, task=Task(id=task, split="train", messages=ASK), turns=turns, source=source,
        policy_version=7, temperature=0.5, stop="eos",
        grade=Grade(score=0.5, passed=False, feedback="Hm."),
    )  # fmt: skip


def store(path: Path, *steps: Sequence[Trajectory]) -> Path:
    """A run folder as far as its trajectories go."""
    (path / "trajectories").mkdir(parents=True)
    (path / "recipe.toml").touch()
    for step, trajectories in enumerate(steps):
        file = path / "trajectories" / f"step-{step:06d}.parquet"
        write_trajectories(file, [Scored(trajectory=t, target=None) for t in trajectories], {})
    return path
