"""Arguments reach the verbs as they were meant, and every way to end has its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import courtside
from courtside.cli.app import app
from courtside.errors import Interrupted, ModelError, NotFiniteError
from courtside.recipe import builtin
from courtside.types import Evaluation

RECIPE = """
[student]
model = "smollm2-135m"
[tasks]
kind = "arithmetic"
[teacher]
kind = "self"
[[losses]]
kind = "divergence"
"""

Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and one built-in recipe, `sums`."""
    built_in = tmp_path / "built-in" / "sums"
    built_in.mkdir(parents=True)
    (built_in / "recipe.toml").write_text(RECIPE)
    (built_in / "README.md").write_text("# Adds [two] numbers\n\nNeeds: 2 CPU cores, 3 minutes\n")
    monkeypatch.setattr(builtin, "recipes_folder", lambda: built_in.parent)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "mine.toml").write_text(RECIPE)
    return work


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stands in for the verbs; each answers with what `answers` has for it."""
    calls_made: Calls = []
    verbs = ModuleType("courtside.api")
    evaluation = Evaluation(
        step=20, policy="student", split="test", scores={"a": 1.0, "b": 0.0}, mean_score=0.5,
        ci_low=0.1,
        ci_high=0.9, metrics={"length": float("nan")},
    )  # fmt: skip
    answers: dict[str, Callable[..., Any]] = {
        "train": lambda recipe, folder, **_: SimpleNamespace(path=folder),
        "evaluate_student": lambda recipe, **_: [evaluation],
        "export": lambda run, to, **_: to,
        "serving_command": lambda run, to: f"vllm serve {to}",
        "rescore": lambda run, overrides, **_: [{"step": 0, "loss": 0.25, "kl": None}],
    }
    for name, answer in answers.items():

        def verb(*args: Any, name: str = name, answer: Any = answer, **kwargs: Any) -> Any:
            kwargs.pop("console", None)
            calls_made.append((name, args, kwargs))
            return answer(*args, **kwargs)

        setattr(verbs, name, verb)
    monkeypatch.setitem(sys.modules, "courtside.api", verbs)
    monkeypatch.setattr(courtside, "api", verbs, raising=False)
    return calls_made


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), prog_name="courtside")


# ── train ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("recipe", "folder"),
    [
        ("mine.toml", "runs/mine"),
        ("sums", "runs/sums"),
        ("../built-in/sums/recipe.toml", "runs/sums"),
    ],
)
def test_train_finds_the_recipe_and_names_its_run(calls: Calls, recipe: str, folder: str) -> None:
    done = run("train", recipe, "train.steps=7", "losses.0.weight=2")
    assert done.exit_code == 0, done.output
    [(verb, (trained, path), _)] = calls
    assert (verb, path) == ("train", Path(folder))
    assert trained.train.steps == 7
    assert trained.losses[0].weight == 2.0
    assert f"{folder}/report.html" in done.stdout


def test_train_takes_options_before_and_after_overrides(calls: Calls) -> None:
    run("train", "--run", "a", "mine.toml", "seed=1")
    run("train", "mine.toml", "seed=2", "--run", "b")
    assert [(args[0].seed, args[1]) for _, args, _ in calls] == [(1, Path("a")), (2, Path("b"))]


# ── evaluate ─────────────────────────────────────────────────────────────────────────────────────


def test_evaluate_a_recipe_means_the_student_before_training(calls: Calls) -> None:
    done = run("evaluate", "sums", "seed=4", "--split", "validation", "--tasks", "9", "--teacher")
    assert done.exit_code == 0, done.output
    [(verb, (recipe,), options)] = calls
    assert (verb, recipe.seed) == ("evaluate_student", 4)
    assert options == {
        "run": None, "step": None, "split": "validation", "num_tasks": 9, "teacher": True,
    }  # fmt: skip
    assert "50.0%" in done.stdout
    assert "10.0% to 90.0%" in done.stdout


def test_evaluate_a_run_means_its_checkpoint(calls: Calls, work_folder: Path) -> None:
    (work_folder / "runs" / "a" / "checkpoints").mkdir(parents=True)
    (work_folder / "runs" / "a" / "recipe.toml").write_text("seed = 8\n" + RECIPE)
    done = run("evaluate", "runs/a", "--step", "10")
    assert done.exit_code == 0, done.output
    [(_, (recipe,), options)] = calls
    assert recipe.seed == 8
    assert (options["run"], options["step"], options["teacher"]) == (Path("runs/a"), 10, False)


def test_evaluate_as_json_is_json_alone(calls: Calls) -> None:
    [evaluation] = json.loads(run("evaluate", "sums", "--json").stdout)
    assert (evaluation["mean_score"], evaluation["ci_low"], evaluation["ci_high"]) == (
        0.5,
        0.1,
        0.9,
    )
    assert evaluation["scores"] == {"a": 1.0, "b": 0.0}
    assert evaluation["metrics"] == {"length": None}


def test_a_recipe_has_no_checkpoints(calls: Calls) -> None:
    done = run("evaluate", "sums", "--step", "10")
    assert (done.exit_code, calls) == (2, [])
    assert "--step 10: sums is a recipe" in done.stderr


# ── rescore, export ──────────────────────────────────────────────────────────────────────────────


def test_rescore(calls: Calls) -> None:
    done = run("rescore", "runs/a", "losses.0.weight=2", "--steps", "0, 5,10")
    assert done.exit_code == 0, done.output
    assert calls == [
        ("rescore", (Path("runs/a"), ["losses.0.weight=2"]), {"steps": [0, 5, 10]})
    ]  # fmt: skip
    assert done.stdout.split() == ["step", "loss", "kl", "0", "0.25", "–"]
    assert json.loads(run("rescore", "runs/a", "--json").stdout) == [
        {"step": 0, "loss": 0.25, "kl": None}
    ]
    assert calls[-1][2] == {"steps": None}


def test_rescore_wants_step_numbers(calls: Calls) -> None:
    done = run("rescore", "runs/a", "--steps", "1-5")
    assert (done.exit_code, calls) == (2, [])
    assert "0,5,10" in done.stderr


def test_export(calls: Calls) -> None:
    done = run("export", "runs/a", "out", "--step", "3", "--adapter")
    options = {"step": 3, "adapter": True, "base": False, "dtype": "float32", "push": None}
    assert calls[0] == ("export", (Path("runs/a"), Path("out")), options)
    assert done.stdout == "Written: out\nServe: vllm serve out\n"
    done = run("export", "runs/a", "out", "--dtype", "bfloat16", "--push", "ada/student")
    assert calls[2][2] == {
        "step": None, "adapter": False, "base": False, "dtype": "bfloat16", "push": "ada/student",
    }  # fmt: skip
    assert "Pushed: ada/student" in done.stdout


# ── recipes, init, schema ────────────────────────────────────────────────────────────────────────


def test_recipes_are_listed_with_what_they_need() -> None:
    done = run("recipes")
    assert done.exit_code == 0
    assert "Adds [two] numbers" in done.stdout
    assert "2 CPU cores, 3 minutes" in done.stdout


def test_init_copies_once(work_folder: Path) -> None:
    done = run("init", "sums")
    assert done.exit_code == 0, done.output
    assert (work_folder / "sums" / "recipe.toml").read_text() == RECIPE
    assert "courtside train sums/recipe.toml" in done.stdout
    (work_folder / "sums" / "recipe.toml").write_text("edited")
    second = run("init", "sums")
    assert second.exit_code == 2
    assert "sums/recipe.toml: exists already" in second.stderr
    assert (work_folder / "sums" / "recipe.toml").read_text() == "edited"
    assert run("init", "sums", "other/place").exit_code == 0
    assert (work_folder / "other" / "place" / "recipe.toml").read_text() == RECIPE


def test_init_of_an_unknown_recipe_guesses() -> None:
    done = run("init", "sum")
    assert done.exit_code == 2
    assert "sum: no such built-in recipe. Did you mean sums?" in done.stderr


def test_schema_is_the_recipe_s() -> None:
    from courtside.recipe import Recipe

    assert json.loads(run("schema").stdout) == Recipe.model_json_schema()


def test_schema_of_a_pipeline() -> None:
    from courtside.recipe.pipeline_schema import make_pipeline_schema

    assert json.loads(run("schema", "--pipeline").stdout) == make_pipeline_schema()


def test_version() -> None:
    assert run("--version").stdout == f"courtside {courtside.__version__}\n"


# ── how it ends ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "mine.toml", "train.stepz=3"], "train.stepz: unknown key; did you mean 'steps'"),
        (["train", "mine.toml", "train.steps=0"], "train.steps: must be greater than 0; got 0"),
        (["train", "mine.toml", "fast"], "override 'fast': write it as section.key=value"),
        (["train", "none.toml"], "none.toml: no such file"),
        (["train", "smus"], "Did you mean sums?"),
        (["train", "../built-in/sums"], "Give the recipe in it: ../built-in/sums/recipe.toml"),
        (["train", "mine.toml", "--fast"], "--fast"),
        (["train"], "RECIPE"),
        (["trian", "mine.toml"], "trian"),
        (["evaluate", "sums", "--split", "all"], "all"),
        (["evaluate", "sums", "--tasks", "0"], "--tasks"),
        (["export", "runs/a"], "TO"),
    ],
)  # fmt: skip
def test_bad_usage_ends_with_2_and_names_the_mistake(
    calls: Calls, args: list[str], message: str
) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert done.stdout == ""
    assert calls == []


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ModelError("student.model = '[bold]x[/bold]': no such model"), 2, "error: "),
        (NotFiniteError("step 3: the loss is NaN"), 1, "error: "),
        (Interrupted("stopped after 3 of 9 steps"), 130, ""),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_of_a_verb_end_with_their_code_and_their_words(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["courtside.api"], "train", fail)
    done = run("train", "mine.toml")
    assert done.exit_code == code
    assert done.stderr == f"{says}{error}\n"


def test_long_messages_are_not_wrapped(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "word " * 100 + "end"

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ModelError(message)

    monkeypatch.setattr(sys.modules["courtside.api"], "train", fail)
    monkeypatch.setenv("COLUMNS", "40")
    assert run("train", "mine.toml").stderr == f"error: {message}\n"


def test_our_own_mistakes_are_not_dressed_up(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("broken invariant")

    monkeypatch.setattr(sys.modules["courtside.api"], "train", fail)
    done = run("train", "mine.toml")
    assert isinstance(done.exception, AssertionError)
