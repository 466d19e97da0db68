"""A hints file: what removing leaves, whom lines are about, what a reader takes of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from unit.report.made_up import make_recipe, make_trajectory

from courtside.errors import UserError
from courtside.report.folder.hints_file import (
    HintLimits,
    append_hint,
    hints_file_id,
    parse_hints,
    remove_hint,
)
from courtside.types import Hint

LINE = b'{"trajectory": "x", "turn": 1, "text": "one"}\n'
OTHER = b'{ "turn":3,"trajectory":"x", "text": "Gr\xc3\xb6\xc3\x9fe" }\r\n'
EMPTY = b"\n  \n"


def hint(trajectory: str, turn: int, text: str) -> Hint:
    return Hint(trajectory=trajectory, turn=turn, text=text, source="human")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hints.jsonl"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LINE + OTHER, OTHER),
        (OTHER + LINE + EMPTY + LINE + OTHER, OTHER + EMPTY + OTHER),
        (OTHER + LINE.rstrip(), OTHER),
        (LINE + OTHER.rstrip(), OTHER.rstrip()),
        (LINE + b'{"trajectory": "x", "tu', b'{"trajectory": "x", "tu'),
        (LINE, b""),
    ],
)
def test_only_the_lines_about_the_turn_go(path: Path, before: bytes, after: bytes) -> None:
    path.write_bytes(before)
    remove_hint(path, "x", 1)
    assert path.read_bytes() == after
    assert list(path.parent.iterdir()) == [path]


def test_a_file_without_such_a_line_is_not_touched(path: Path) -> None:
    remove_hint(path, "x", 1)
    assert not path.exists()
    path.write_bytes(OTHER)
    before = path.stat()
    remove_hint(path, "x", 1)
    remove_hint(path, "y", 3)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_broken_file_is_left_alone(path: Path) -> None:
    path.write_bytes(LINE + b"broken\n" + LINE)
    with pytest.raises(UserError, match=r"hints.jsonl:2: not valid JSON"):
        remove_hint(path, "x", 1)
    assert path.read_bytes() == LINE + b"broken\n" + LINE


def test_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.jsonl"
    path.symlink_to(real)
    hint = Hint(trajectory="x", turn=1, text="a", source="human")
    with pytest.raises(UserError, match=r"hints\.jsonl: is a symbolic link, and hints are written"):
        append_hint(path, hint)
    assert not real.exists()
    real.write_bytes(LINE + OTHER)
    for write in (lambda: append_hint(path, hint), lambda: remove_hint(path, "x", 1)):
        with pytest.raises(UserError, match="is a symbolic link"):
            write()
    assert path.is_symlink() and real.read_bytes() == LINE + OTHER


def test_a_disk_that_fails_keeps_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(LINE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match=r"could not be removed \(No space left.*unchanged"):
        remove_hint(path, "x", 1)
    assert path.read_bytes() == LINE and list(path.parent.iterdir()) == [path]


def test_lines_written_while_others_are_removed_are_all_there(path: Path) -> None:
    for turn in range(40):
        append_hint(path, hint("old", turn, "a"))

    def work(turn: int) -> None:
        append_hint(path, hint("new", turn, "b"))
        remove_hint(path, "old", turn)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(40)))
    hints, skipped = parse_hints(path.read_bytes(), name="f")
    assert sorted((h.trajectory, h.turn) for h in hints) == [("new", n) for n in range(40)]
    assert not skipped


def test_a_recorded_conversation_goes_by_its_task() -> None:
    trajectory = make_trajectory("000003-001-0", 1)
    assert hints_file_id(trajectory) == "000003-001-0"
    assert hints_file_id(replace(trajectory, source="teacher")) == "000003-001-0"
    assert hints_file_id(replace(trajectory, source="dataset", policy_version=None)) == "task-1"


def test_limits_are_those_of_the_persons_reader(tmp_path: Path) -> None:
    losses = [{"kind": "divergence", "on": "hinted_turns"}]
    tools = {"tasks": {"kind": "toolbox"}, "losses": losses,
             "teacher": {"kind": "self", "weights": "live"}}  # fmt: skip
    person = {"kind": "human", "path": str(tmp_path / "h"), "max_chars": 5, "max_hints": 3}
    several = {"kind": "combined", "readers": [{"kind": "rules", "max_chars": 9}, person]}
    usual = HintLimits(max_chars=1000, max_hints=8)
    assert HintLimits.of(make_recipe()) == usual
    rules = {"kind": "rules", "max_chars": 9}
    assert HintLimits.of(make_recipe(**tools, reader=rules)) == usual
    for reader in (person, several):
        recipe = make_recipe(**tools, reader=reader)
        assert HintLimits.of(recipe) == HintLimits(max_chars=5, max_hints=3)


def test_a_key_that_is_there_twice_is_refused() -> None:
    line = b'{"trajectory": "a", "turn": 1, "text": "x", "turn": 3}\n'
    with pytest.raises(UserError, match=r"hints:1: the key 'turn' is there twice.*remove one"):
        parse_hints(line, name="hints")
