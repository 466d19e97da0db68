"""Pushing an export, to a hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.hub_server import TOKEN, Hub, run_hub
from support.small_runs import small_recipe

from courtside.api import export, train
from courtside.errors import RunError, UserError


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = small_recipe(
        tiny_folder,
        student={"model": str(tiny_folder), "lora": {"rank": 2}},
        teacher={"kind": "self", "weights": "frozen"},
        train={"steps": 1, "prompts_per_step": 1},
    )
    return train(recipe, tmp_path_factory.mktemp("hub") / "run").path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with run_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_a_push_uploads_every_file(run, hub, tmp_path):
    folder = export(run, tmp_path / "model", push="ada/student")
    repository = hub.repositories["ada/student"]
    assert repository["private"] is True
    assert repository["files"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    # A second push goes into the same repository.
    other = export(run, tmp_path / "again", push="ada/student")
    assert repository["files"]["README.md"] == (other / "README.md").read_bytes()


def test_what_a_push_needs_is_checked_before_anything_is_written(run, hub, tmp_path, monkeypatch):
    for repo in ("a/b/c", "..", "white space/x"):
        with pytest.raises(UserError, match=r"--push .*: no name for a repository"):
            export(run, tmp_path / "model", push=repo)
    with pytest.raises(UserError, match="is a folder of this machine, so nobody else could load"):
        export(run, tmp_path / "model", push="ada/student", adapter=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match=r"refuses the token \(Invalid user token"):
        export(run, tmp_path / "model", push="ada/student")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with pytest.raises(UserError, match=r"there is no token for the hub\. Set HF_TOKEN"):
        export(run, tmp_path / "model", push="ada/student")
    assert not (tmp_path / "model").exists() and not hub.repositories


def test_no_network(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot be reached \(.*\)\. Leave --push out"):
        export(run, tmp_path / "model", push="ada/student")
    assert not (tmp_path / "model").exists()


def test_a_failed_upload_keeps_the_export(run, hub, tmp_path):
    hub.refuse_commits = True
    with pytest.raises(RunError, match=r"the upload failed .*The export is in .*hf upload"):
        export(run, tmp_path / "model", push="ada/student")
    assert (tmp_path / "model" / "config.json").is_file()
