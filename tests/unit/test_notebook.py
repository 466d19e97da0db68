"""The notebook in examples/: its code runs with a tiny model, and it ships its outputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "look_at_a_run.ipynb"


@pytest.fixture
def notebook() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return tree


def code_cells(notebook: dict[str, Any], *, tag: str | None = None) -> list[dict[str, Any]]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [c for c in cells if tag is None or tag in c["metadata"].get("tags", ())]


def test_its_code_runs_in_order(
    notebook: dict[str, Any],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    small = ["train.steps=2", "train.prompts_per_step=2", "rollout.max_new_tokens=4"]
    parameters = {"MODEL": str(tiny_folder), "SMALL": [*small, "evaluate.num_tasks=2"]}
    namespace: dict[str, Any] = {"__name__": "__main__"}
    (first,) = code_cells(notebook, tag="parameters")
    exec("".join(first["source"]), namespace)
    assert parameters.keys() <= namespace.keys()
    namespace |= parameters
    for cell in code_cells(notebook):
        if cell is not first:
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), namespace)
    assert "torch" in sys.modules and len(namespace["metrics"]) == 2
    assert namespace["worst"].gap == namespace["tokens"].gap.min()
    assert f"[[{namespace['worst'].text}]]" in capsys.readouterr().out


def test_it_ships_the_outputs_of_one_run(notebook: dict[str, Any]) -> None:
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert all(cell["outputs"] for cell in cells[1:])
    text = json.dumps(outputs)
    assert "image/png" in text and "site-packages" not in text  # no warnings of a machine
    assert len(NOTEBOOK.read_bytes()) < 200_000
