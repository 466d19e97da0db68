"""What the tasks lack for a draft stage is told before a model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe, write_jsonl

from courtside.assemble.inputs import load_inputs
from courtside.errors import ModelError, RecipeError
from courtside.recipe import Recipe

ENDPOINT = {"base_url": "http://localhost:8000/v1", "model": "big"}
REWRITE: dict[str, Any] = {"kind": "rewrite", "endpoint": ENDPOINT}
IMITATE = {"kind": "cross_entropy", "on": "teacher"}
PLAIN = {"prompt": "2+2?", "answer": "4", "privileged": {"rule": "add"}}


def make_recipe(folder: Path, tmp_path: Path, row: dict[str, Any], stage: dict[str, Any]) -> Recipe:
    losses = [{"kind": "preference"}] if stage["kind"] == "choose" else [IMITATE]
    path = write_jsonl(tmp_path / "tasks.jsonl", [row | {"split": "train"}])
    return small_recipe(
        folder, tasks={"kind": "jsonl", "path": str(path)}, drafts=[stage], losses=losses
    )


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        PLAIN | {"response_prefix": "It is"},
        REWRITE,
        r"kind = 'rewrite'.*\(a response prefix\).*last user message",
    ),
    ({"prompt": "Hi?"}, {"kind": "choose"}, r"drafts\[0\]\.by = 'reward': task .* has no grader"),
    (PLAIN, REWRITE | {"reference": "solution"}, r"reference = 'solution'.*it has: rule, answer"),
    ({"prompt": "Hi?"}, REWRITE | {"reference": "answer"}, r"reference = 'answer'.*it has: none"),
]


@pytest.mark.parametrize(("row", "stage", "message"), REFUSED)
def test_what_tasks_lack(
    row: dict[str, Any], stage: dict[str, Any], message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_inputs(make_recipe(tiny_folder, tmp_path, row, stage))


def test_what_tasks_have(tiny_folder: Path, tmp_path: Path) -> None:
    for stage in (REWRITE, REWRITE | {"reference": "rule"}, REWRITE | {"reference": "answer"}):
        load_inputs(make_recipe(tiny_folder, tmp_path, PLAIN, stage))
    graded = PLAIN | {"grader": "number"}
    load_inputs(make_recipe(tiny_folder, tmp_path, graded, {"kind": "choose"}))


def test_a_template_that_cannot_take_repairs(tiny_folder: Path, tmp_path: Path) -> None:
    """It renders the prompt of an answered task without its generation prompt."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    template = (folder / "chat_template.jinja").read_text()
    changed = template.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    assert changed != template
    (folder / "chat_template.jinja").write_text(changed)
    with pytest.raises(ModelError, match="renders the prompt differently"):
        load_inputs(make_recipe(folder, tmp_path, PLAIN, REWRITE))
