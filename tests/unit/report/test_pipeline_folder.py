"""The folder of a pipeline: what it is not made in, and who may write to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from courtside.errors import UserError
from courtside.report.folder.pipeline_folder import PipelineFolder


@pytest.mark.parametrize(
    "file, message",
    [
        ("recipe.toml", "is a run folder, and a pipeline needs one of its own"),
        ("notes.txt", "has other files, and a pipeline needs one of its own"),
        ("checkpoints", "has other files, and a pipeline needs one of its own"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=message):
        PipelineFolder.open(tmp_path, ["01-a"])
    assert [entry.name for entry in tmp_path.iterdir()] == [file]


def test_a_first_start_that_was_killed_leaves_a_usable_folder(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "stages").mkdir()
    with PipelineFolder.open(tmp_path, ["01-a"]) as folder:
        assert folder.stage_names == ["01-a"]
    (tmp_path / "notes.txt").touch()  # of the user, who may add to a pipeline's folder
    PipelineFolder.open(tmp_path, ["01-a"]).close()


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, or lies below one"):
        PipelineFolder.open(tmp_path / "file" / "below", ["01-a"])


def test_a_second_writer_waits_until_the_first_closes(tmp_path: Path) -> None:
    with PipelineFolder.open(tmp_path, ["01-a"]):
        with pytest.raises(UserError, match="another process is training into this folder"):
            PipelineFolder.open(tmp_path, ["01-a"])
        assert PipelineFolder.read(tmp_path).stage_names == ["01-a"]
    PipelineFolder.open(tmp_path, ["01-a"]).close()
