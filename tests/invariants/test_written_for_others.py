"""Environments of other conventions train targeted hints, from the recipes of the docs' page.

A class of TRL as it is; a game of Gymnasium's interface and a tool server over HTTP, each behind
the wrapper of the page.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
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
from typer.testing import CliRunner
from unit.chat.templates import HERMES_TEMPLATE

from courtside.api import train
from courtside.assemble.inputs import load_inputs
from courtside.cli.app import app
from courtside.environments.loading import make_environment
from courtside.environments.tool_calls import format_call
from courtside.errors import EnvironmentFaultsError
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    copy_examples(tmp_path)
    yield tmp_path
    forget_examples()


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with run_tool_server() as server:
        yield server


@pytest.fixture
def student(tiny_folder: Path, tmp_path: Path) -> Path:
    """With room for a list of tools in bytes."""
    folder = tmp_path / "student"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


def assert_hints_trained(run: RunFolder, event: str) -> None:
    for row in run.metrics():
        assert row["hints/trained"] > 0 and row["tokens/divergence"] > 0
        assert row["environment_faults"] == 0 and row[f"events/{event}"] > 0
    assert [e.step for e in run.evaluations()] == [0, 2] and run.alarms() == []
    assert (run.path / "report.html").exists()


# ── one turn ─────────────────────────────────────────────────────────────────────────────────────


def test_an_environment_of_one_turn(folder: Path, student: Path) -> None:
    run = train(page_recipe("rhymes:Rhymes", student), folder / "run")
    assert_hints_trained(run, "no_rhyme")
    [stored, *_] = run.trajectories(0)
    ending = stored.trajectory.task.privileged["ending"]
    assert [o.hint.text for o in stored.hints] == [f"The word must end in -{ending}."]


# ── TRL ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_class_of_trl_as_it_is(folder: Path, student: Path) -> None:
    assert "courtside" not in (folder / "trl_store.py").read_text()
    recipe = page_recipe("trl_store:Store", student)
    assert_hints_trained(train(recipe, folder / "run"), "no_call")
    assert (
        CliRunner().invoke(app, ["check-env", "trl_store:Store", "rows=trl_store.jsonl"]).exit_code
        == 0
    )
    environment = make_environment(recipe.tasks)
    assert environment is not None
    task = environment.task(0)
    assert task.messages[1].content == "Buy one apple. You have 8 coins."
    episode = environment.start(task)
    assert (
        episode.step(format_call("get_price", {"item": "apple"}, "json")).messages[0].content == "3"
    )
    [failure] = episode.step(format_call("buy", {"item": "apple", "amount": 9}, "json")).events
    assert failure.detail("message") == "ValueError: 9 apple cost 27 coins"
    assert episode.step(format_call("buy", {"item": "apple"}, "json")).done
    assert episode.grade().passed


def test_the_template_of_the_model_lists_the_tools(folder: Path, student: Path) -> None:
    """In training, in suites, and in what is stored and read again."""
    recipe = page_recipe("trl_store:Store", student)
    assert any("renders no `tools`" in note for note in load_inputs(recipe).notes)
    (student / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    assert not load_inputs(recipe).notes
    suite = {"same": {"rows": "trl_store.jsonl", "settings": {}}}
    recipe = parse_recipe(
        recipe.model_dump(mode="json", exclude_unset=True)
        | {"evaluate": {"num_tasks": 2, "suites": suite}}
    )
    run = train(recipe, folder / "run")
    assert all(row["hints/trained"] > 0 for row in run.metrics())
    [stored, *_] = run.trajectories(0)
    [message] = stored.trajectory.task.messages
    assert [tool["function"]["name"] for tool in json.loads(message.tools)] == ["get_price", "buy"]
    tokenizer = load_inputs(recipe).tokenizer
    prompt = tokenizer.decode(stored.trajectory.turns[0].token_ids)
    assert prompt.startswith("<|im_start|>system\n# Tools\n") and '"name": "buy"' in prompt
    assert stored.trajectory.turns[0].text.startswith("tools: [")


# ── Gymnasium ────────────────────────────────────────────────────────────────────────────────────


def test_a_game_of_gymnasiums_interface(folder: Path, student: Path) -> None:
    recipe = page_recipe("text_game:CorridorEnvironment", student)
    run = train(recipe, folder / "run")
    assert_hints_trained(run, "invalid_action")
    texts = {o.hint.text for stored in run.trajectories(0) for o in stored.hints}
    assert texts == {"Reply with one of these words alone: left, right, open."}
    checked = CliRunner().invoke(app, ["check-env", "text_game:CorridorEnvironment"])
    assert checked.exit_code == 0 and "bad_move" in checked.output
    bare = CliRunner().invoke(app, ["check-env", "text_game:Corridor"])
    assert bare.exit_code == 1 and "Wrap it as docs/environments.md shows" in bare.output
    environment = make_environment(recipe.tasks)
    assert environment is not None
    episode = environment.start(environment.task(1))
    [event] = episode.step("open").events
    assert event.kind == "bad_move" and event.details["action"] == "open"
    for _ in range(int(event.details["away"])):
        assert not episode.step(" Right\n").done
    assert episode.step("open").done and episode.grade().passed


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tool_server(
    folder: Path, student: Path, server: ThreadingHTTPServer, workers: int
) -> None:
    settings = {"url": url_of(server), "num_tasks": 40}
    recipe = page_recipe("http_tools:ToolServer", student, settings=settings, workers=workers)
    assert_hints_trained(train(recipe, folder / "run"), "no_call")
    environment: Any = make_environment(recipe.tasks)
    episode = environment.start(environment.task(5))
    [event] = episode.step(format_call("ad", {"a": 5}, "json")).events
    assert (event.kind, event.details["arguments"]) == ("tool_not_found", {"a": 5})
    assert episode.step(format_call("add", {"a": 5, "b": 7}, "json")).messages[0].content == "12"
    assert episode.step(format_call("submit", {"x": 12}, "json")).done and episode.grade().passed
    if workers:
        environment.close()


@pytest.mark.filterwarnings("ignore:the environment has a bug")
def test_a_server_that_goes_away_is_no_mistake_of_the_student(
    folder: Path, student: Path, server: ThreadingHTTPServer
) -> None:
    """It fails with status 500 from some point on."""
    settings = {"url": url_of(server), "num_tasks": 40}
    recipe = page_recipe("http_tools:ToolServer", student, settings=settings)
    handler: Any = server.RequestHandlerClass
    answer = handler._answer

    def fail_later(self: Any, method: str, body: dict[str, Any]) -> Any:
        if method == "call" or (method == "grade" and len(self.sessions) > 4):
            self.send_error(500)
        return answer(self, method, body)

    handler._answer = fail_later
    with pytest.raises(EnvironmentFaultsError, match="HTTPError: HTTP Error 500"):
        train(recipe, folder / "run")
