"""Keys come from the environment and go into one header: nothing that a run leaves has them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from support.chat_server import ChatServer
from support.small_runs import small_recipe
from support.tiny_model import tiny_tokenizer
from support.vllm_stand_in import GENERATE, VllmStandIn, respond
from typer.testing import CliRunner

from courtside.api import export, train
from courtside.cli.app import app
from courtside.errors import RecipeError, RunError
from courtside.report.console import RunConsole

SECRETS = {
    "TEACHER_KEY": "sk-teacher-0123456789",
    "READER_KEY": "sk-reader-0123456789",
    "HF_TOKEN": "hf_0123456789abcdef",
    "WANDB_API_KEY": "wandb0123456789abcdef",
}


class Screen(RunConsole):
    """All that a console gets, and what the metrics endpoint says meanwhile."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def print_line(self, text: str) -> None:
        self.texts.append(text)

    def end_phase(self, name: str) -> None:
        for text in self.texts[:1]:
            match = re.match(r"metrics: (\S+)/metrics", text)
            assert match
            for route in ("metrics", "health"):
                self.texts.append(httpx.get(f"{match[1]}/{route}").text)


@pytest.fixture
def server() -> Iterator[VllmStandIn]:
    server = VllmStandIn(tokenizer=tiny_tokenizer())
    yield server
    server.close()


@pytest.fixture
def library_log(tmp_path: Path) -> Iterator[Path]:
    """What HTTP libraries and we ourselves log at the lowest level."""
    path = tmp_path / "libraries.log"
    handler, root = logging.FileHandler(path), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield path
    root.removeHandler(handler)
    root.setLevel(level)
    handler.close()


def read_all(folder: Path) -> Iterator[tuple[str, str]]:
    """Every file as text; the compressed ones by their contents."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".parquet":
            with path.open("rb") as file:
                yield path.name, str(pq.read_table(file).to_pylist())
        elif path.is_file():
            yield path.name, path.read_bytes().decode("latin-1")


def find_secrets(texts: Any) -> list[tuple[str, str]]:
    return [(where, name) for where, text in texts for name, key in SECRETS.items() if key in text]


def test_nothing_that_a_run_leaves_has_a_key(
    server: VllmStandIn,
    library_log: Path,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, key in SECRETS.items():
        monkeypatch.setenv(name, key)
    echo = respond({"error": f"{SECRETS['TEACHER_KEY']} is busy"}, 503, Retry_After="0")
    failures = [echo, echo]

    def fail_at_first(number: int, path: str, body: Any) -> Any:
        is_scored = path == GENERATE and len(body["token_ids"]) > 60
        return failures.pop() if is_scored and failures else "none"

    server.fault = fail_at_first
    recipe = small_recipe(
        tiny_folder,
        student={"model": str(tiny_folder), "lora": {"rank": 2}},
        teacher={"kind": "server", "server": {"urls": [server.url], "model": "tiny",
                                              "api_key_env": "TEACHER_KEY"}},
        losses=[{"kind": "policy_gradient"}],
        train={"steps": 2, "prompts_per_step": 2},
        run={"trackers": ["tensorboard"], "log_format": "json", "metrics_port": 0,
             "log_file": str(tmp_path / "events.jsonl")},
    )  # fmt: skip
    screen = Screen()
    folder = train(recipe, tmp_path / "run", console=screen)
    export(folder.path, tmp_path / "adapter", adapter=True)
    export(folder.path, tmp_path / "merged")
    printed = CliRunner().invoke(app, ["serve", str(folder.path / "recipe.toml"), "--print"])
    assert printed.exit_code == 0 and '"$TEACHER_KEY"' in printed.output

    # It stops with a message while everything is on, too.
    server.fault = lambda n, path, body: (
        respond({"error": f"not {SECRETS['TEACHER_KEY']}"}, 401) if path == GENERATE else "none"
    )
    with pytest.raises(RunError, match=r"\*\*\*.*api_key_env") as error:
        train(recipe, tmp_path / "refused", console=screen)

    headers = [h.get("Authorization") for h in server.headers]
    assert set(headers) == {f"Bearer {SECRETS['TEACHER_KEY']}"}, "the key was used"
    assert not failures, "a server repeated the key"
    texts = dict(read_all(tmp_path))
    for name in ("recipe.toml", "report.html", "events.jsonl", "environment.json",
                 "libraries.log", "step-000000.parquet", "README.md"):  # fmt: skip
        assert name in texts
    assert "*** is busy" in texts["events.jsonl"] and "request_failed" in texts["events.jsonl"]
    assert any("courtside_server_failures_total" in text for text in screen.texts)
    out, err = capfd.readouterr()
    outputs = {"console": "\n".join(screen.texts), "out": out, "err": err,
              "error": f"{error.value!r} {error.value}", "serve": printed.output}  # fmt: skip
    assert "run_failed" in err
    assert find_secrets(texts.items()) == [] and find_secrets(outputs.items()) == []
    assert find_secrets([("check", f"x {SECRETS['TEACHER_KEY']}")]), "the search finds one"


def test_a_readers_key_is_in_nothing_either(
    tiny_folder: Path,
    library_log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, key in SECRETS.items():
        monkeypatch.setenv(name, key)
    server = ChatServer()
    endpoint = {"base_url": server.url, "model": "m", "api_key_env": "READER_KEY"}
    recipe = small_recipe(
        tiny_folder,
        train={"steps": 1, "prompts_per_step": 2},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 4},
        reader={"kind": "model", "endpoint": endpoint},
        teacher={"kind": "self", "weights": "live"},
        tasks={"kind": "toolbox", "turns": 1, "num_tools": 2},
        losses=[{"kind": "divergence", "on": "hinted_turns"}],
    )
    train(recipe, tmp_path / "run", quiet=True)
    server.close()
    assert {h["Authorization"] for h in server.headers} == {f"Bearer {SECRETS['READER_KEY']}"}
    assert find_secrets(read_all(tmp_path)) == []


@pytest.mark.parametrize(
    "url", ["https://me:sekret@host:1", "https://sekret@host:1", "https://host:1?api_key=sekret"]
)
def test_a_key_in_an_address_is_refused_and_not_repeated(url: str, tiny_folder: Path) -> None:
    server = {"urls": [url], "model": "m"}
    with pytest.raises(RecipeError, match=r"teacher.server.urls") as error:
        small_recipe(tiny_folder, teacher={"kind": "server", "server": server},
                     losses=[{"kind": "policy_gradient"}])  # fmt: skip
    assert "sekret" not in str(error.value)
