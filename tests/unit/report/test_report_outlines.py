"""Outlines say of a trajectory what the whole of it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.report.made_up import make_batch, make_update
from unit.report.played import make_hinted_batch, make_hinted_update

from courtside.report.folder.outlines import StepTable, read_outlines, read_texts
from courtside.report.folder.parquet import read_trajectories, write_trajectories


@pytest.fixture(params=["hinted", "single"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    single = request.param == "single"
    batch = make_batch(0) if single else make_hinted_batch(0)
    update = make_update(0, batch) if single else make_hinted_update(0, batch)
    write_trajectories(tmp_path / "step.parquet", batch, update.student_logp)
    return tmp_path / "step.parquet"


def test_outlines_are_those_of_the_trajectories(path: Path) -> None:
    whole, outlines = read_trajectories(path, 3), read_outlines(path, 3)
    for record, outline in zip(whole, outlines, strict=True):
        stored, listed = record.trajectory, outline.trajectory
        assert (
            outline.num_completion_tokens == stored.num_completion_tokens
            and outline.hints == record.hints
        )
        assert outline.num_tokens == len(stored.token_ids) and outline.step == record.step == 3
        for name in ("id", "task", "source", "policy_version", "stop", "grade", "preference"):
            assert getattr(listed, name) == getattr(stored, name)
        for mine, turn in zip(listed.turns, stored.turns, strict=True):
            assert mine.role == turn.role and mine.text == "" and mine.token_ids == ()
            assert [e.kind for e in mine.events] == [e.kind for e in turn.events]


def test_texts_and_single_trajectories(path: Path) -> None:
    texts, table = read_texts(path), StepTable(path, 5)
    for record in read_trajectories(path, 5):
        id = record.trajectory.id
        assert texts[id] == "\n".join(turn.text for turn in record.trajectory.turns)
        # repr: where nothing was measured there is NaN, which equals nothing.
        assert repr(table.find(id)) == repr(record)
    assert table.find("nope") is None
