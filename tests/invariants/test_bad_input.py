"""Bad input ends with exit code 2 and a clear message, costs nothing and blocks nothing.

Through the command line: in a new folder, where the corrected recipe must then run; and in the
folder of a run that is there, which must stay as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import contents, small_recipe, small_tree, write_jsonl
from support.tiny_model import tiny_model, tiny_tokenizer
from typer.testing import CliRunner, Result

from courtside.api import train
from courtside.cli.app import app
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder

Tree = dict[str, Any]


def run_cli(tree: Tree, folder: Path, work: Path) -> Result:
    file = work / "recipe.toml"
    file.write_text(toml.dumps(tree))
    return CliRunner().invoke(app, ["train", str(file), "--run", str(folder)])


@pytest.fixture
def good(tiny_folder, tiny_teacher_folder) -> Tree:
    return small_tree(
        tiny_folder,
        tiny_teacher_folder,
        train={"steps": 1, "prompts_per_step": 2},
        evaluate={"num_tasks": 1},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 3},
    )


@pytest.fixture
def broken(good, tmp_path, tiny_folder) -> Callable[[str], Tree]:
    """The good recipe with one thing wrong."""

    def jsonl(lines: list[str]) -> Tree:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(lines))
        return good | {"tasks": {"kind": "jsonl", "path": str(path)}}

    def prompts(*texts: str, **more: Any) -> Tree:
        lines = [json.dumps({"prompt": text, "split": "train"} | more) for text in texts]
        return jsonl(lines)

    def other_words() -> Tree:
        folder = tmp_path / "other"
        tiny_model(vocab_size=260).save_pretrained(folder)
        tiny_tokenizer(extra=("one", "two")).save_pretrained(folder)
        return good | {"teacher": {"kind": "model", "model": str(folder)}}

    cases: dict[str, Callable[[], Tree]] = {
        "unknown key": lambda: good | {"train": {"stepz": 3}},
        "impossible loss": lambda: (
            good | {"losses": [{"kind": "policy_gradient", "advantage": "kl"}]}
        ),
        "unknown student": lambda: good | {"student": {"model": "/nowhere/model"}},
        "unknown teacher": lambda: good | {"teacher": {"kind": "model", "model": "/nowhere/model"}},
        "no model in folder": lambda: good | {"student": {"model": str(tmp_path)}},
        "no adapter": lambda: (
            good | {"teacher": good["teacher"] | {"adapter": str(tmp_path / "adapter")}}
        ),
        "layers": lambda: good | {"student": good["student"] | {"keep_layers": [0, 7]}},
        "target_modules": lambda: good | {"student": good["student"] | {"lora": {"target_modules":
        ["qkv"]}}}, "broken line": lambda: jsonl(['{"prompt": "a"}', '{"prompt": "b"}',
        '{"prompt": "c"']),
        "no file": lambda: good | {"tasks": {"kind": "jsonl", "path": str(tmp_path / "none")}},
        "no prompts": lambda: jsonl([]),
        "long prompt": lambda: prompts("short", "long " * 200),
        "limit": lambda: prompts("a", "b") | {
            "tasks": {"kind": "jsonl", "path": str(tmp_path / "prompts.jsonl"), "limit": 3}
        },
        "vocabulary": other_words,
        "top-k": lambda: (
            good | {"losses": [{"kind": "divergence", "support": {"kind": "top_k", "k": 259}}]}
        ),
        "privileged field": lambda: (
            good | {"teacher": good["teacher"] | {"context": {"kind": "field", "field": "rulez"}}}
        ),
        "no route": lambda: good | {"teacher": {"kind": "routes", "routes": {
            "arithmetic": good["teacher"]}}},
        "no grader": lambda: prompts("a", "b") | {
            "losses": [{"kind": "policy_gradient", "advantage": "reward"}],
            "teacher": None,
        },
        # Found in the first step, after test tasks were measured.
        "no completion": lambda: jsonl([
            json.dumps({"prompt": "a", "split": "train"}),
            json.dumps({"prompt": "b", "split": "test", "answer": "c", "grader": "contains"}),
        ]) | {
            "losses": [{"kind": "cross_entropy"}],
            "rollout": {"student_fraction": 0.0},
            "teacher": None,
        },
    }  # fmt: skip

    def make(name: str) -> Tree:
        tree = cases[name]()
        return {key: value for key, value in tree.items() if value is not None}

    return make


MESSAGES = {
    "unknown key": r"train\.stepz",
    "impossible loss": r"expected gradient is zero",
    "unknown student": r"'/nowhere/model': no such folder",
    "unknown teacher": r"'/nowhere/model': no such folder",
    "no model in folder": r"has no config\.json",
    "no adapter": r"adapter .*no adapter_config\.json",
    "layers": r"student\.keep_layers = \[0, 7\]: give increasing numbers from 0 to 1",
    "target_modules": r"student\.lora\.target_modules",
    "broken line": r"prompts\.jsonl, line 3: not valid JSON",
    "no file": r"tasks\.path = .*no such file",
    "no prompts": r"prompts\.jsonl: the file is empty",
    "long prompt": r"prompts\.jsonl.*'long long.*tokens.*tasks\.overlong_prompts = 'drop'",
    "limit": r"tasks\.limit = 3, but .* has 2 train tasks",
    "vocabulary": r"teacher\.model = .*has another vocabulary.*same family",
    "top-k": r"losses\[0\]\.support\.k = 259: .* gives at most the 258 likeliest tokens",
    "privileged field": r"teacher\.context\.field = 'rulez'.*no such privileged field.*rule",
    "no route": r"none of its tags .* has a route",
    "no grader": r"has no grader, so it gives no reward",
    "no completion": r"needs a `completion` on every task",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_bad_input_is_explained_and_blocks_nothing(name, broken, good, tmp_path):
    folder = tmp_path / "run"
    result = run_cli(broken(name), folder, tmp_path)
    assert result.exit_code == 2, result.output
    message = " ".join(result.stderr.split())
    assert message.startswith("error:")
    assert re.search(MESSAGES[name], message), message
    assert "Traceback" not in result.output
    repeated = run_cli(good, folder, tmp_path)
    assert repeated.exit_code == 0, repeated.output
    done = RunFolder.read(folder)
    assert len(done.metrics()) == 1
    # What the failed start had measured is not taken for the new recipe's.
    evaluations = done.evaluations()
    assert [(e.step, e.policy) for e in evaluations] == [
        (0, "student"), (0, "teacher"), (1, "student"),
    ]  # fmt: skip
    assert evaluations[0].scores.keys() == evaluations[-1].scores.keys()
    assert done.recipe().teacher is not None


@pytest.fixture(scope="module")
def finished(tiny_folder, tiny_teacher_folder, tmp_path_factory) -> Path:
    recipe = small_recipe(
        tiny_folder, tiny_teacher_folder, train={"steps": 2, "prompts_per_step": 2}
    )
    return train(recipe, tmp_path_factory.mktemp("finished") / "run").path


@pytest.mark.parametrize("name", MESSAGES)
def test_a_run_that_is_there_stays_as_it_was(name, broken, finished, tmp_path):
    before = contents(finished)
    result = run_cli(broken(name), finished, tmp_path)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert contents(finished) == before


def test_a_trained_run_is_not_forgotten_for_another_recipe(good, tmp_path):
    folder = tmp_path / "run"
    assert run_cli(good, folder, tmp_path).exit_code == 0
    before = contents(folder)
    result = run_cli(good | {"seed": 3}, folder, tmp_path)
    assert result.exit_code == 2
    assert "holds a run of another recipe" in result.stderr and "seed: 0 → 3" in result.stderr
    assert contents(folder) == before


def test_tasks_that_break_after_a_run_began_cost_it_nothing(good, tmp_path):
    """The same recipe; it is the file behind it that changed."""
    rows = [{"prompt": f"say {n}", "split": "train"} for n in range(4)]
    file = write_jsonl(tmp_path / "prompts.jsonl", rows)
    tree = good | {"tasks": {"kind": "jsonl", "path": str(file)}}
    folder = tmp_path / "run"
    assert run_cli(tree, folder, tmp_path).exit_code == 0
    before = contents(folder)
    file.write_text(file.read_text() + "{nonsense\n")
    result = run_cli(tree, folder, tmp_path)
    assert result.exit_code == 2 and "line 5: not valid JSON" in result.stderr
    after = contents(folder)
    assert {n for n in before if after[n] != before[n]} <= {"environment.json"}
