"""docs/readers.md shows the hints and recipes of the code."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from courtside.recipe.hints import HintsConfig
from courtside.recipe.reader import ReaderConfig
from courtside.recipe.rules import HINTS, Detect
from courtside.report.folder.hints_file import parse_hints
from courtside.tasks.chat_logs import read_chat_logs

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "readers.md").read_text(encoding="utf-8")
READER: TypeAdapter[Any] = TypeAdapter(ReaderConfig)


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
    return [text for name, text in fenced if name == language]


def test_the_table_has_every_detector_and_its_words() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", PAGE, re.M))
    documented = {name: rows[name] for name in get_args(Detect)}
    assert documented == {name: HINTS.get(name, "you write it") for name in documented}


def test_recipes_are_valid() -> None:
    trees = [tomllib.loads(block) for block in blocks("toml")]
    assert len(trees) == 4
    for tree in trees:
        assert tree.keys() <= {"reader", "hints"}
        reader = {"kind": "rules", **tree["reader"]}
        READER.validate_json(json.dumps(reader), strict=True)
        HintsConfig.model_validate(tree.get("hints", {}))


def test_the_lines_are_hints(tmp_path: Path) -> None:
    sampled, talk, recorded = blocks("json")
    [hint] = parse_hints(sampled.encode(), name="readers.md")[0]
    assert hint.turn == 5
    (tmp_path / "talks.jsonl").write_text(talk)
    [task] = read_chat_logs(tmp_path / "talks.jsonl")
    [hint] = parse_hints(recorded.encode(), name="readers.md")[0]
    assert hint.trajectory == task.id
