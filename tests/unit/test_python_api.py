"""From Python: paths and names, progress, DataFrames, stored evaluations, the report again."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import contents, small_recipe, small_tree
from typer.testing import CliRunner

import courtside
from courtside.cli.app import app
from courtside.errors import RecipeError, UserError
from courtside.report.console import (
    LogConsole,
    PlainConsole,
    RunConsole,
    choose_console,
)
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder


@pytest.fixture(scope="module")
def run_path(tiny_folder: Path, tiny_teacher_folder: Path, tmp_path_factory: Any) -> str:
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, evaluate={"num_tasks": 6})
    folder = tmp_path_factory.mktemp("api") / "run"
    return str(courtside.train(recipe, str(folder), quiet=True).path)


@pytest.fixture
def recipe_file(tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path) -> str:
    tree = small_tree(tiny_folder, tiny_teacher_folder, train={"steps": 1, "prompts_per_step": 1})
    path = tmp_path / "mine.toml"
    path.write_text(toml.dumps(tree))
    return str(path)


# ── paths and names ──────────────────────────────────────────────────────────────────────────────


def test_built_in_recipes_have_names() -> None:
    assert courtside.load_recipe("shared-rule").tasks.kind == "instructions"
    assert courtside.load_recipe("shared-rule", ["train.steps=3"]).train.steps == 3
    with pytest.raises(RecipeError, match=r"shared-role: .* Did you mean shared-rule\?"):
        courtside.load_recipe("shared-role")


def test_a_recipe_file_as_str_trains_into_a_folder_of_its_name(
    recipe_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = courtside.train(recipe_file, quiet=True)
    assert run.path == Path("runs/mine") and len(run.metrics()) == 1
    with pytest.raises(UserError, match=r"a Recipe has no name\. Give the run folder"):
        courtside.train(courtside.load_recipe(recipe_file))


def test_every_path_may_be_a_str(run_path: str, tmp_path: Path) -> None:
    assert RunFolder.read(run_path).path == Path(run_path)
    target = str(tmp_path / "model")
    assert courtside.export(run_path, target, adapter=False) == Path(target)
    assert len(courtside.rescore(run_path, steps=[0], quiet=True)) == 1
    assert courtside.write_report(run_path) == Path(run_path) / "report.html"
    recipe = os.path.join(run_path, "recipe.toml")
    assert len(courtside.evaluate_student(recipe, num_tasks=2, quiet=True)) == 1


# ── progress and logging ─────────────────────────────────────────────────────────────────────────


def test_training_shows_progress_by_default(
    recipe_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    courtside.train(recipe_file, tmp_path / "run")
    printed = capsys.readouterr()
    assert printed.out == ""  # the program's own
    assert "· 1 steps" in printed.err and "step 1/1  kl " in printed.err
    assert "student on 2 test tasks after 1 steps: " in printed.err


def test_a_quiet_run_logs(
    recipe_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="courtside"):
        courtside.train(recipe_file, tmp_path / "run", quiet=True)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    messages = [record.message for record in caplog.records if record.name == "courtside"]
    assert any(message.startswith("step 1/1  kl ") for message in messages)


def test_quiet_and_a_console_exclude_each_other(recipe_file: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give one of the two"):
        courtside.train(recipe_file, tmp_path / "run", quiet=True, console=RunConsole())
    assert not (tmp_path / "run").exists()


def test_the_console_of_a_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_console = RunConsole()
    assert choose_console(own_console, quiet=False) is own_console
    assert isinstance(choose_console(None, quiet=True), LogConsole)
    console = choose_console(None, quiet=False)
    assert isinstance(console, PlainConsole)
    console.print_line("on standard error")
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    choose_console(None, quiet=False).print_line("in a notebook")
    assert capsys.readouterr() == ("in a notebook\n", "on standard error\n")


# ── DataFrames ───────────────────────────────────────────────────────────────────────────────────


def test_metrics_and_evaluations_as_frames(run_path: str) -> None:
    run = RunFolder.read(run_path)
    metrics = run.metrics_frame()
    assert list(metrics.index) == [0, 1, 2, 3, 4]
    assert metrics["kl"].tolist() == [row["kl"] for row in run.metrics()]
    evaluations = run.evaluations_frame()
    student = evaluations[evaluations.policy == "student"]
    assert student.step.tolist() == [0, 5]
    assert {"mean_score", "ci_low", "ci_high", "length", "split"} <= set(evaluations.columns)


def test_trajectories_and_tokens_as_frames(run_path: str) -> None:
    run = RunFolder.read(run_path)
    stored = run.trajectories(0)
    frame = run.trajectories_frame(0)
    assert frame.id.tolist() == [item.trajectory.id for item in stored]
    assert frame.response.tolist() == [item.trajectory.response for item in stored]
    tokens = run.tokens_frame(0, decode=lambda ids: [f"<{i}>" for i in ids])
    assert len(tokens) == frame.tokens.sum()
    first = tokens[tokens.trajectory == stored[0].trajectory.id]
    assert first.token.tolist() == list(stored[0].trajectory.completion_ids)
    assert first.text.iloc[0] == f"<{first.token.iloc[0]}>"
    gaps = [
        t - s for t, s in zip(stored[0].teacher_logp, stored[0].student_logp, strict=True)
    ]  # fmt: skip
    assert first.gap.tolist() == pytest.approx(gaps)


def test_frames_of_a_run_without_steps(tmp_path: Path, tiny_folder: Path) -> None:
    recipe = small_recipe(tiny_folder, tiny_folder)
    with RunFolder.open(tmp_path / "run", recipe) as folder:
        assert folder.metrics_frame().empty and folder.evaluations_frame().empty


def test_without_pandas_the_message_names_the_install_command(run_path: str) -> None:
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "import courtside\n"
        f"run = courtside.RunFolder.read({run_path!r})\n"
        "run.metrics()\n"
        "try:\n    run.metrics_frame()\n"
        "except courtside.errors.UserError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs pandas, which is not installed: pip install -e '.[notebook]'" in done.stdout


def test_reading_a_run_imports_no_pandas(run_path: str) -> None:
    code = f"import sys, courtside; courtside.RunFolder.read({run_path!r}).metrics()"
    check = "; assert not {'pandas', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code + check], check=True)


# ── evaluations of a run are stored in it ────────────────────────────────────────────────────────


def test_what_is_measured_of_a_run_is_stored_in_it(run_path: str) -> None:
    run = RunFolder.read(run_path)
    before = contents(run.path)
    (measured,) = courtside.evaluate_student(run=run_path, num_tasks=3, quiet=True)
    recipe = courtside.load_recipe(run.path / "recipe.toml", ["evaluate.max_new_tokens=3"])
    courtside.evaluate_student(recipe, run=run_path, num_tasks=2, split="validation", quiet=True)
    assert run.further_evaluations()[-2] == measured
    assert [len(e.scores) for e in run.further_evaluations()[-2:]] == [3, 2]
    rows = [json.loads(line) for line in (run.path / "further_evaluations.jsonl").open()]
    assert rows[-1]["changes"] == ["evaluate.max_new_tokens: not set → 3"]
    # The run itself is as it was, and its report has them in a table of their own.
    after = contents(run.path)
    del after["further_evaluations.jsonl"]
    before.pop("further_evaluations.jsonl", None)
    assert after == before
    text = courtside.write_report(run_path).read_text()
    assert "<h2>Further evaluations</h2>" in text and "2 validation" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_that_is_not_writable_is_still_evaluated(run_path: str) -> None:
    os.chmod(run_path, 0o555)
    try:
        assert courtside.evaluate_student(run=run_path, num_tasks=2, quiet=True)
    finally:
        os.chmod(run_path, 0o755)


def test_neither_recipe_nor_run() -> None:
    with pytest.raises(UserError, match="give a recipe, or run="):
        courtside.evaluate_student(quiet=True)


def test_json_has_the_texts_and_no_token_ids(run_path: str) -> None:
    done = CliRunner().invoke(app, ["evaluate", run_path, "--tasks", "4", "--json"])
    assert done.exit_code == 0, done.output
    (tree,) = json.loads(done.stdout)
    assert tree["policy"] == "student" and len(tree["scores"]) == 4
    assert tree["samples"][0]["turns"][0]["role"] == "prompt"
    assert "token_ids" not in done.stdout and len(done.stdout.splitlines()) < 150


# ── the report again ─────────────────────────────────────────────────────────────────────────────


def test_the_report_is_written_again_as_it_was(run_path: str) -> None:
    path = Path(run_path) / "report.html"
    (Path(run_path) / "further_evaluations.jsonl").unlink(missing_ok=True)
    courtside.write_report(run_path)
    first = path.read_text()
    path.unlink()
    done = CliRunner().invoke(app, ["report", run_path])
    assert (done.exit_code, done.stdout) == (0, f"Written: {path}\n")
    assert path.read_text() == first and 'title="teacher −' in first.replace(
        "teacher -", "teacher −"
    )


def test_a_report_without_the_tokenizer_is_plain_and_says_so(
    run_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = RunFolder.read(run_path).recipe()
    other_recipe = recipe.model_copy(
        update={"student": recipe.student.model_copy(update={"model": str(tmp_path / "gone")})}
    )
    with RunFolder.open(tmp_path / "run", other_recipe):
        pass
    text = courtside.write_report(tmp_path / "run").read_text()
    assert "No evaluation has been recorded." in text
    assert "tokens are not colored: " in caplog.text and "gone" in caplog.text


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "not a run folder (it has no recipe.toml)" in done.stderr


def test_arguments_that_cannot_work_are_refused_before_a_model_is_loaded(tiny_folder: Path) -> None:
    recipe = small_recipe(tiny_folder, tiny_folder)
    with pytest.raises(
        UserError, match=r"split = 'dev'; use one of \['train', 'validation', 'test"
    ):
        courtside.evaluate_student(recipe, split="dev")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"num_tasks = -1; use 1 or more, an int"):
        courtside.evaluate_student(recipe, num_tasks=-1)
    with pytest.raises(RecipeError, match=r"'train.steps=3' is one text; give a list of them"):
        courtside.load_recipe("targeted-hints", "train.steps=3")


RUN = "the path of a run folder as str or Path"
CALLS: dict[str, tuple[Any, str]] = {
    "train None": (lambda: courtside.train(None), "train: recipe = None; give a Recipe, a TOML"),
    "train 5": (lambda: courtside.train(5), "train: recipe = 5; give a Recipe, a TOML file as str"),
    "train empty": (lambda: courtside.train(""), "train: recipe = ''; give a Recipe, a TOML"),
    "train into 3": (
        lambda: courtside.train("shared-rule", 3),
        "train: folder = 3; give the path of the run folder",
    ),
    "evaluate 3": (lambda: courtside.evaluate_student(3), "evaluate_student: recipe = 3; give a R"),
    "evaluate a run": (
        lambda: courtside.evaluate_student(run=3),
        f"evaluate_student: run = 3; give {RUN}",
    ),
    "evaluate tasks": (
        lambda: courtside.evaluate_student("shared-rule", num_tasks="4"),
        "evaluate_student: num_tasks = '4'; use 1 or more, an int",
    ),
    "evaluate a step": (
        lambda: courtside.evaluate_student("shared-rule", step="last"),
        "evaluate_student: step = 'last'; use 0 or more, an int",
    ),
    "export None": (lambda: courtside.export(None, "x"), f"export: run = None; give {RUN}"),
    "export to": (lambda: courtside.export("x", None), "export: to = None; give the path of the f"),
    "export dtype": (
        lambda: courtside.export("x", "y", dtype="int8"),
        "export: dtype = 'int8'; use one of ['float32', 'bfloat16', 'float16']",
    ),
    "export push": (lambda: courtside.export("x", "y", push=True), "export: push = True; give a r"),
    "overrides": (
        lambda: courtside.load_recipe("shared-rule", [3]),
        "overrides = [3]; give a list of texts, each section.key=value",
    ),
    "overrides of a pipeline": (
        lambda: courtside.load_pipeline("continual", None),
        "overrides = None; give a list of texts",
    ),
    "console": (
        lambda: courtside.train("shared-rule", "x", console="rich"),
        "console = 'rich'; give a courtside.report.console.RunConsole",
    ),
    "show": (lambda: courtside.show([]), "show: recipe = []; give a Recipe, a TOML file as str"),
    "rescore": (lambda: courtside.rescore(5), f"rescore: run = 5; give {RUN}"),
    "rescore steps": (
        lambda: courtside.rescore("x", steps=3),
        "rescore: steps = 3; give a list",
    ),
    "rescore step": (lambda: courtside.rescore("x", steps=["a"]), "rescore: steps = 'a'; use 0 or"),
    "report": (lambda: courtside.write_report(b"x"), f"write_report: run = b'x'; give {RUN}"),
    "read": (lambda: RunFolder.read(None), f"run = None; give {RUN}"),
    "load_recipe": (lambda: courtside.load_recipe(None), "load_recipe: path = None; give a TOML"),
    "parse_recipe": (lambda: courtside.parse_recipe([]), "recipe: is of type list; give a dict of"),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_an_argument_of_another_type_is_refused_by_its_name(call: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value)
