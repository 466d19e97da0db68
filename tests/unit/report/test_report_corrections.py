"""What the page of a run says about corrected drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.report.corrected import HOSTILE, make_corrected_batch
from unit.report.made_up import make_recipe
from unit.report.pages import Page, read
from unit.report.played import decode, make_hinted_batch, make_hinted_update

from courtside.report.folder.folder import RunFolder
from courtside.report.page.corrections import find_examples, find_fork, render_counts
from courtside.report.page.page import write_report
from courtside.report.page.token_gaps import Decode
from courtside.types import Scored

COUNTS = {"choose/pairs": 1, "choose/dropped/tie": 2, "rewrite/repairs": 1, "rewrite/new_count": 4}


def write_run(path: Path, batch: list[Scored], **more: Any) -> RunFolder:
    with RunFolder.open(path / "run", make_recipe(train={"steps": 1})) as folder:
        folder.record(0, batch, make_hinted_update(0, batch), seconds={"rollout": 1.0},
                      store_trajectories=True, **more)  # fmt: skip
    return RunFolder.read(path / "run")


def section(page: Page) -> str:
    return page.text.split(" Corrected drafts ", 1)[1].split(" Episodes ", 1)[0]


@pytest.fixture
def corrected(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path, make_corrected_batch(), draft_counts=COUNTS)


def test_counts_with_the_reasons_of_drops(corrected: RunFolder) -> None:
    text = section(read(write_report(corrected, decode=decode))[1])
    for line in (
        "choose: pairs 1",
        "choose: dropped: tie samples that do not differ by more than min_gap 2",
        "rewrite: repairs 1",
        "rewrite: new count 4",
        "take-over: selected drafts 2",
        "take-over: continued by the teacher 2",
        "take-over: trained 1",
        "take-over: dropped: not passed the continuation did not pass 1",
    ):
        assert line in text
    assert "pass rate" not in text  # a fraction has no sum


def test_counts_are_summed_over_steps_and_grouped_by_stage() -> None:
    rows = [
        {"drafts/choose/pairs": 2, "takeover/drafts": 1, "takeover/pass_rate": 0.5, "loss": 1.0},
        {"drafts/choose/dropped/tie": 3, "drafts/choose/pairs": 5, "takeover/drafts": 1},
    ]
    text = Page(render_counts(rows)).text
    assert text == (
        "stage: count in 2 steps choose: pairs 7 choose: dropped: tie samples that do not differ "
        "by more than min_gap 3 take-over: selected drafts 2"
    )
    assert render_counts([{"loss": 1.0}]) == ""


@pytest.mark.parametrize("pieces", [decode, None])
def test_examples_stand_side_by_side(corrected: RunFolder, pieces: Decode | None) -> None:
    html, page = read(write_report(corrected, decode=pieces))
    text = section(page)
    repairs, later_groups = text.split(" Repairs ")[1].split(" Take-overs ")
    takeovers, later_groups = later_groups.split(" Chosen against rejected ")
    chosen, criticized = later_groups.split(" Criticized drafts ")
    assert "rewrite of 0-1-0" in repairs and repairs.index("nine") < repairs.index("three")
    assert "critique Count again." in repairs
    assert takeovers.count("the teacher takes over") == 2
    assert "2 turns before turn 3, shared by both" in takeovers
    assert chosen.index("rejected · student") < chosen.index("chosen · student")
    assert "rewards: grade 0, length −0.25" in chosen and "grade 1, length 0" in chosen
    assert "No idea." in criticized and "Try at least." in criticized
    assert "2 replaced by the teacher" in page.text
    assert "<script" not in html and HOSTILE in page.text


def test_the_fork_is_marked_in_the_draft_and_in_the_continuation(corrected: RunFolder) -> None:
    takeovers = section(read(write_report(corrected, decode=decode))[1]).split(" Take-overs ")[1]
    assert "Two and two the fork are seven." in takeovers
    assert "Two and two the teacher takes over are four." in takeovers
    takeovers = section(read(write_report(corrected))[1]).split(" Take-overs ")[1]
    assert "the teacher takes over after 3 tokens of the student" in takeovers


def test_where_a_correction_leaves_its_draft() -> None:
    by_id = {s.trajectory.id: s.trajectory for s in make_corrected_batch()}
    assert find_fork(by_id["0-2-0+takeover"]) == (1, 3)
    assert find_fork(by_id["0-4-0+takeover"]) == (3, 0)
    assert find_fork(by_id["0-1-0+rewrite"]) == (1, 0)


def test_copies_for_pairs_are_no_examples(corrected: RunFolder) -> None:
    examples = find_examples(corrected.trajectories(0))
    assert [(e.draft.trajectory.id, e.correction.trajectory.id) for e in examples] == [
        ("0-1-0", "0-1-0+rewrite"),
        ("0-2-0", "0-2-0+takeover"),
        ("0-3-0", "0-3-1"),
        ("0-4-0", "0-4-0+takeover"),
    ]


def test_a_correction_without_its_draft_is_no_example(tmp_path: Path) -> None:
    batch = [s for s in make_corrected_batch() if s.trajectory.correction == "rewrite"]
    page = read(write_report(write_run(tmp_path, batch)))[1]
    assert "Corrected drafts" not in page.text


def test_a_run_without_corrections_has_no_section(tmp_path: Path) -> None:
    page = read(write_report(write_run(tmp_path, make_hinted_batch(0))))[1]
    assert "Corrected drafts" not in page.text and "rewards:" not in page.text


def test_long_sides_are_cut(tmp_path: Path) -> None:
    batch = make_corrected_batch()
    whole = next(s for s in batch if s.trajectory.id == "0-4-0+takeover")
    turns = whole.trajectory.turns
    long = replace(whole.trajectory, turns=(*turns, *turns[2:4] * 8))
    batch[batch.index(whole)] = replace(whole, trajectory=long)
    text = section(read(write_report(write_run(tmp_path, batch)))[1])
    assert "… 5 more turns" in text
