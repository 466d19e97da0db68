"""Hints train the embedded SmolLM2 in environments of other conventions, from the docs' recipes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.foreign_environments import (
    copy_examples,
    forget_examples,
    page_recipe,
    run_tool_server,
    url_of,
)

from courtside.api import train
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    copy_examples(tmp_path)
    yield tmp_path
    forget_examples()


def train_page_recipe(path: str, folder: Path, **changes: Any) -> RunFolder:
    """One step, with less of everything."""
    tree = page_recipe(path, "smollm2-135m", **changes).model_dump(mode="json", exclude_unset=True)
    tree["train"] |= {"steps": 1, "prompts_per_step": 2, "learning_rate": 1e-5}
    tree["rollout"] |= {"max_new_tokens": 16}
    tree["rollout"]["limits"] |= {"turns": 2}
    tree["evaluate"] = {"num_tasks": 1}
    return train(parse_recipe(tree), folder / "run")


def assert_hint_lowers_its_mistake(run: RunFolder, event: str) -> str:
    """Returns the text of the first hint."""
    (row,) = run.metrics()
    assert row["hints/trained"] > 0 and row["tokens/divergence"] > 0 and row["grad_norm"] > 0
    assert row[f"events/{event}"] > 0 and row["environment_faults"] == 0
    assert row["sampler/logp_diff"] < 1e-3  # sampling and training see the same model
    assert [e.step for e in run.evaluations()] == [0, 1]
    assert (run.path / "report.html").exists()
    outcomes = [o for stored in run.trajectories(0) for o in stored.hints]
    assert any(o.shift is not None and o.shift > 0 for o in outcomes)
    return outcomes[0].hint.text


def test_a_class_of_trl(folder: Path) -> None:
    text = assert_hint_lowers_its_mistake(train_page_recipe("trl_store:Store", folder), "no_call")
    assert "get_price, buy" in text


def test_a_game_of_gymnasiums_interface(folder: Path) -> None:
    run = train_page_recipe("text_game:CorridorEnvironment", folder)
    text = assert_hint_lowers_its_mistake(run, "invalid_action")
    assert text == "Reply with one of these words alone: left, right, open."


def test_a_tool_server(folder: Path) -> None:
    with run_tool_server() as server:
        settings = {"url": url_of(server), "num_tasks": 40}
        run = train_page_recipe("http_tools:ToolServer", folder, settings=settings)
    assert "add, submit" in assert_hint_lowers_its_mistake(run, "no_call")
