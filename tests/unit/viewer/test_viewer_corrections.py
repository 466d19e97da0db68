"""What the viewer shows of corrected drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from unit.report.corrected import HOSTILE, make_corrected_batch
from unit.viewer.viewed_runs import get, opened, start_run, store

from courtside.report.folder.folder import RunFolder


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    with start_run(tmp_path / "run") as folder:
        store(folder, 0, make_corrected_batch())
    return opened(RunFolder.read(tmp_path / "run"))


def find(client: TestClient, id: str) -> Any:
    return get(client, f"/api/batches/0/trajectories/{quote(id)}")


def relations(tree: Any) -> list[tuple[str, str]]:
    return [(related["relation"], related["id"]) for related in tree["related"]]


def test_rows_say_what_became_of_them(client: TestClient) -> None:
    rows = {row["id"]: row for row in get(client, "/api/batches/0")["trajectories"]}
    repair, chosen, side = rows["0-1-0+rewrite"], rows["0-3-1"], rows["0-2-0+better"]
    assert (repair["correction"], repair["draft"], repair["preference"]) == (
        "rewrite", "0-1-0", None,
    )  # fmt: skip
    assert (chosen["correction"], chosen["preference"]) == ("choose", "better")
    assert (
        chosen["rewards"] == {"grade": 1.0, "length": 0.0, HOSTILE: 0.5}
        and not chosen["is_pair_copy"]
    )
    assert rows["0-3-0"]["rewards"] == {"grade": 0.0, "length": -0.25, HOSTILE: None}
    assert side["is_pair_copy"] and side["correction"] == "takeover"
    assert rows["0-1-0"]["has_critique"] and not repair["has_critique"]
    assert rows["0-5-0"]["num_replaced"] == 2 and repair["num_replaced"] is None
    assert "critique" not in rows["0-1-0"]  # a list of thousands has no texts


def test_a_draft_and_its_corrections_lead_to_each_other(client: TestClient) -> None:
    draft, repair = find(client, "0-1-0"), find(client, "0-1-0+rewrite")
    assert relations(draft) == [("correction", "0-1-0+rewrite")]
    assert relations(repair) == [("draft", "0-1-0")]
    assert draft["critique"] == f"Count again. {HOSTILE}" and repair["critique"] is None
    assert relations(find(client, "0-3-0")) == [("correction", "0-3-1")]
    assert relations(find(client, "0-3-1")) == [("draft", "0-3-0")]
    assert relations(find(client, "0-2-0+better")) == [("draft", "0-2-0"), ("pair", "0-2-0+worse")]
    assert [id for _, id in relations(find(client, "0-2-0"))] == [
        "0-2-0+better", "0-2-0+takeover", "0-2-0+worse",
    ]  # fmt: skip
    assert relations(find(client, "0-6-0")) == []


def test_the_fork_is_at_the_first_turn_of_the_teacher(client: TestClient) -> None:
    def forks(id: str) -> list[int | None]:
        return [turn["fork"] for turn in find(client, id)["turns"]]

    assert forks("0-2-0+takeover") == [None, 3]
    assert forks("0-4-0+takeover") == [None, None, None, 0]
    assert forks("0-1-0+rewrite") == [None, 0]
    for id in ("0-2-0+worse", "0-2-0", "0-3-1"):  # all of it is the student's
        assert forks(id) == [None, None]


def test_a_draft_that_is_not_stored(tmp_path: Path) -> None:
    batch = [s for s in make_corrected_batch() if s.trajectory.id != "0-1-0"]
    with start_run(tmp_path / "run") as folder:
        store(folder, 0, batch)
    tree = find(opened(RunFolder.read(tmp_path / "run")), "0-1-0+rewrite")
    assert tree["draft"] == "0-1-0" and tree["related"] == []
