"""A hints file: what is read, what is refused with its line, what is written."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_trajectories import balanced, play

from courtside.errors import RunError, UserError
from courtside.reader.base import Reader, ReaderOutput
from courtside.reader.loading import make_reader
from courtside.recipe.reader import HumanReaderConfig
from courtside.report.folder.hints_file import append_hint, hints_file_id, parse_hints
from courtside.types import Hint, Trajectory

TWO = [play("a", id="x"), play("b", id="y")]


def reader(path: Path, **fields: int) -> Reader:
    return make_reader(HumanReaderConfig(kind="human", path=path, **fields), seed=0)


def read(path: Path, **fields: int) -> ReaderOutput:
    reading = reader(path, **fields)(TWO)
    assert balanced(reading.counts), reading.counts
    return reading


def hint(trajectory: str, turn: int, text: str, reason: str = "") -> Hint:
    return Hint(trajectory=trajectory, turn=turn, text=text, source="human", reason=reason)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    hints = [hint("x", 1, "Read the list.", "calls by habit"), hint("y", 1, "Größe “prüfen”")]
    for item in hints:
        append_hint(path, item)
    assert read(path) == ReaderOutput(
        hints=tuple(hints), counts={"human/proposed": 2, "accepted": 2}
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {
        "trajectory": "x", "turn": 1, "text": "Read the list.", "reason": "calls by habit",
    }  # fmt: skip
    assert rows[1].keys() == {"trajectory", "turn", "text"}


def test_unknown_trajectories_and_turns_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    for item in (hint("z", 1, "a"), hint("x", 0, "b"), hint("x", 9, "c"), hint("y", 1, "d")):
        append_hint(path, item)
    reading = read(path)
    assert [h.text for h in reading.hints] == ["d"]
    assert reading.counts == {
        "human/proposed": 4, "dropped/no_such_trajectory": 1, "dropped/not_assistant": 1,
        "dropped/no_such_turn": 1, "accepted": 1,
    }  # fmt: skip


def test_a_later_line_corrects_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    for text in ("first", "second"):
        append_hint(path, hint("x", 1, text))
    reading = read(path)
    assert [h.text for h in reading.hints] == ["second"]
    assert reading.counts["dropped/replaced"] == 1


def recorded(id: str, task: str) -> Trajectory:
    item = play("a", id=id)
    return replace(item, task=replace(item.task, id=task), source="dataset")


def test_a_recorded_conversation_goes_by_its_task_as_well(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    sampled = [replace(item, task=replace(item.task, id="talk-1")) for item in TWO]
    batch = [*sampled, recorded("0-2", "talk-1"), recorded("0-3", "talk-1"), recorded("0-4", "b")]
    assert [hints_file_id(item) for item in batch] == ["x", "y", "talk-1", "talk-1", "b"]
    for item in (hint("talk-1", 1, "first"), hint("0-4", 1, "own id"), hint("talk-2", 1, "none")):
        append_hint(path, item)
    reading = reader(path)(batch)
    # Each recording of the task gets it, under its own id; samples of the same task do not.
    assert reading.hints == (
        hint("0-2", 1, "first"), hint("0-3", 1, "first"), hint("0-4", 1, "own id"),
    )  # fmt: skip
    assert reading.counts == {
        "human/proposed": 4, "dropped/no_such_trajectory": 1, "accepted": 3,
    }  # fmt: skip
    # In the next step it has another id, and the same hint.
    later = reader(path)([recorded("1-0", "talk-1")])
    assert later.hints == (hint("1-0", 1, "first"),) and balanced(later.counts)


def test_the_later_of_two_names_for_one_turn_is_used(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    for item in (hint("0-2", 1, "by id"), hint("talk", 1, "by task")):
        append_hint(path, item)
    reading = reader(path)([recorded("0-2", "talk"), recorded("0-3", "talk")])
    assert reading.hints == (hint("0-2", 1, "by task"), hint("0-3", 1, "by task"))
    assert reading.counts["dropped/replaced"] == 1 and balanced(reading.counts)


def test_long_hints_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    append_hint(path, hint("x", 1, "x" * 21))
    assert read(path, max_chars=20).counts == {"human/proposed": 1, "dropped/long_hint": 1}


def test_texts_become_one_line(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    path.write_text('{"trajectory": "x", "turn": 1, "text": " Two\\nlines\\u0000 \\ud800"}\n')
    assert [h.text for h in read(path).hints] == ["Two lines"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("\udcff", "not valid JSON"),
        ("[]", "must be an object with trajectory, turn, text, reason"),
        ('{"trajectory": "x", "turn": 1, "text": "a", "hint": "b"}', "unknown key 'hint'"),
        ('{"turn": 1, "text": "a"}', "`trajectory` must be a string"),
        ('{"trajectory": "x", "turn": 1, "text": 5}', "`text` must be a string"),
        ('{"trajectory": "x", "turn": 1, "text": "a", "reason": 5}', "`reason` must be a string"),
        ('{"trajectory": "x", "turn": "1", "text": "a"}', "`turn` must be the index"),
        ('{"trajectory": "x", "turn": true, "text": "a"}', "`turn` must be the index"),
        ('{"trajectory": "x", "turn": -1, "text": "a"}', "`turn` must be the index"),
        ('{"trajectory": "x", "text": "a"}', "`turn` must be the index"),
        ('{"trajectory": "x", "turn": 1, "text": " \\u0000"}', "`text` has no visible character"),
    ],
)
def test_broken_lines_are_told_with_their_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "hints.jsonl"
    good = b'{"trajectory": "x", "turn": 1, "text": "a"}\n\n'
    path.write_bytes(good + line.encode("utf-8", "surrogateescape") + b"\n" + good)
    with pytest.raises(UserError) as caught:
        reader(path)
    assert str(caught.value).startswith(f"{path}:3: ") and message in str(caught.value)


def test_a_missing_file_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reader.path = .*No such file.*Write the file"):
        reader(tmp_path / "nope.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert read(tmp_path / "empty.jsonl") == ReaderOutput(hints=(), counts={})


def test_the_file_is_followed_while_a_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    path.touch()
    follow = reader(path)
    assert follow(TWO).hints == ()
    append_hint(path, hint("x", 1, "now"))
    assert [h.text for h in follow(TWO).hints] == ["now"]
    with path.open("a") as file:
        file.write('{"trajectory": "y", "tur')  # somebody is writing
    reading = follow(TWO)
    assert [h.text for h in reading.hints] == ["now"]
    assert reading.counts["human/unfinished_line"] == 1
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(RunError, match=r"hints.jsonl:2: not valid JSON.*start the same command"):
        follow(TWO)


def test_a_last_line_without_a_break_counts_and_is_not_glued_to(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    path.write_text('{"trajectory": "x", "turn": 1, "text": "open end"}')
    assert [h.text for h in read(path).hints] == ["open end"]
    append_hint(path, hint("y", 1, "next"))
    assert [h.text for h in read(path).hints] == ["open end", "next"]


def test_hints_written_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: append_hint(path, hint("x", n, "y" * 500)), range(200)))
    hints, skipped = parse_hints(path.read_bytes(), name="f")
    assert sorted(h.turn for h in hints) == list(range(200)) and not skipped


@pytest.mark.parametrize("bad", [hint("x", 1, " "), hint("x", -1, "a")])
def test_what_could_not_be_read_is_not_written(tmp_path: Path, bad: Hint) -> None:
    with pytest.raises(UserError, match="hint for"):
        append_hint(tmp_path / "hints.jsonl", bad)
    assert not (tmp_path / "hints.jsonl").exists()


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none/h.jsonl: the hint could not be written"):
        append_hint(tmp_path / "none" / "h.jsonl", hint("x", 1, "a"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk() -> None:
    with pytest.raises(UserError, match="No space left"):
        append_hint(Path("/dev/full"), hint("x", 1, "a"))
