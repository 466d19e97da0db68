"""Further bad inputs: none is a traceback, hangs or is silently accepted."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe, small_tree, write_jsonl
from typer.testing import CliRunner, Result

from courtside.api import train
from courtside.assemble.inputs import load_inputs
from courtside.cli.app import app
from courtside.environments.guard import EnvironmentFault, NameMonitor
from courtside.environments.loading import make_environment
from courtside.errors import RecipeError, TaskError
from courtside.recipe.load import load_recipe, parse_recipe
from courtside.recipe.rollout import LimitsConfig
from courtside.recipe.tasks import EnvironmentTasks
from courtside.report.folder import toml

# ── environments ─────────────────────────────────────────────────────────────────────────────────

WORLD = """
import dataclasses, json, time
from courtside.types import Event, Grade, Message, Observation, Task

def say(text="Again.", **fields):
    return Observation(messages=(Message(role="user", content=text),), **fields)

class World:
    size = 20
    def task(self, index):
        prompt = (Message(role="user", content=f"Say {index}."),)
        return Task(id=f"t{index}", split="train", messages=prompt)
    def start(self, task): return Episode()

class Episode:
    def step(self, reply): return say(done=True)
    def grade(self): return Grade(score=0.5, passed=False)

def change(**fields):
    class Changed(World):
        def task(self, index): return dataclasses.replace(super().task(index), **fields)
    return Changed

def ask(**fields):
    return (Message(**({"role": "user", "content": "Hi."} | fields)),)
"""
STEPS = {
    "async": ("async def step(self, r): return say()", "an async method is not awaited; use asyn"),
    "generator": ("def step(self, r): yield say()", "returned a generator; return courtside"),
    "no argument": ("def step(self): return say()", "raised TypeError: Other.step() takes 1 pos"),
    "extra no JSON": (
        "def step(self, r): return Observation(messages=ask(extra='abc'))",
        "Observation.messages[0].extra = 'abc'; use json.dumps of an object, or ''",
    ),
    "extra a dict": (
        "def step(self, r): return Observation(messages=ask(extra={}))",
        "Observation.messages[0].extra is a dict; use a text",
    ),
    "a generator of messages": (
        "def step(self, r): return Observation(messages=(m for m in ask()))",
        "Observation.messages is a generator; use a tuple",
    ),
    "system": (
        "def step(self, r): return Observation(messages=ask(role='system'))",
        "role = 'system'; use one of ['tool', 'user']",
    ),
    "a long kind": (
        "def step(self, r): return say(events=(Event(kind='x' * 81),))",
        "becomes part of a metric's name; use at most 80 printable characters",
    ),
    "a kind of two lines": (
        r"def step(self, r): return say(events=(Event(kind='a\nb'),))",
        "becomes part of a metric's name",
    ),
    "many events": (
        "def step(self, r): return say(events=(Event(kind='x'),) * 1001)",
        "Observation.events are 1,001; report at most 1,000 for one reply",
    ),
    "an infinite detail": (
        "def step(self, r): return say(events=(Event(kind='x', details={'a': float('inf')}),))",
        "details['a'] is no JSON value",
    ),
    "recursion": ("def step(self, r): return self.step(r)", "raised RecursionError"),
    "StopIteration": ("def step(self, r): raise StopIteration", "raised StopIteration"),
    "MemoryError": ("def step(self, r): raise MemoryError", "raised MemoryError"),
    "KeyboardInterrupt": (
        "def step(self, r): raise KeyboardInterrupt",
        "raised KeyboardInterrupt; raise another exception",
    ),
}
TASKS = {
    "tools a list": ("messages=ask(tools=[])", "messages[0].tools is a list; use a text"),
    "tools no list": ("messages=ask(tools='{}')", "use json.dumps of a list of tool schemas"),
    "tools no schema": ("messages=ask(tools='[{}]')", "tools[0] must be a schema"),
    "extra a list": ("messages=ask(extra='[1]')", "use json.dumps of an object"),
    "extra with a role": (
        "messages=ask(extra='{\"role\": 1}')",
        "has the key 'role', which is a fi",
    ),
    "no text": ("messages=ask(content=' ')", "the last one has no text; write what is to be ans"),
    "a conversation": ("conversation=(1,)", "conversation is of recorded tasks; leave it out"),
    "a long id": ("id='x' * 201", "has more than 200 characters"),
    "an id of two lines": (r"id='a\nb'", "or one that cannot be printed"),
    "split a list": ("split=['train']", "split = ['train']; use one of"),
    "answer a number": ("answer=5", "answer is an int; use a text"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("bad_world", None)


def make(body: str, *, workers: int = 0, seconds: float = 5.0) -> Any:
    Path("bad_world.py").write_text(WORLD + body)
    config = EnvironmentTasks(kind="environment", path="bad_world:Bad", workers=workers)
    return make_environment(config, LimitsConfig(step_seconds=seconds))


@pytest.mark.parametrize(("step", "message"), STEPS.values(), ids=STEPS)
def test_a_step_that_is_wrong_is_a_fault(folder: Path, step: str, message: str) -> None:
    environment = make(
        f"class Other(Episode):\n    {step}\nclass Bad(World):\n"
        "    def start(self, task): return Other()\n"
    )
    with pytest.raises(EnvironmentFault) as caught:
        environment.start(environment.task(0)).step("Hi.")
    assert message in str(caught.value)


@pytest.mark.parametrize(("fields", "message"), TASKS.values(), ids=TASKS)
def test_a_task_that_is_wrong_is_refused(folder: Path, fields: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        make(f"class Bad(change({fields})): pass\n")
    assert "tasks.path = 'bad_world:Bad': task(0): " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_task_that_hangs_is_refused(folder: Path, workers: int) -> None:
    body = "class Bad(World):\n    def task(self, index): time.sleep(1000)\n"
    with pytest.raises(TaskError, match=r"task\(0\) did not return within 0.3 seconds"):
        make(body, workers=workers, seconds=0.3)


LOADING = {
    "import": ("time.sleep(1000)\nclass Bad(World): pass\n", r"\(bad_world.py, line \d+\)"),
    "__init__": ("class Bad(World):\n    def __init__(self): time.sleep(1000)\n", "Give what it"),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("body", "message"), LOADING.values(), ids=LOADING)
def test_an_environment_that_hangs_while_it_is_loaded(
    folder: Path, body: str, message: str, workers: int
) -> None:
    Path("bad_world.py").write_text(WORLD + body)
    config = EnvironmentTasks(kind="environment", path="bad_world:Bad", workers=workers)
    with pytest.raises(
        TaskError, match=r"took longer than 0.5 seconds \(rollout.limits.load_s"
    ) as e:
        make_environment(config, LimitsConfig(load_seconds=0.5))
    assert re.search(message, str(e.value))


def test_a_demonstration_that_hangs_is_refused(folder: Path) -> None:
    environment = make(
        "class Bad(World):\n    def demonstrate(self, task): time.sleep(1000)\n", seconds=0.3
    )
    with pytest.raises(TaskError, match=r"demonstrate\(task\) did not return within 0.3 seconds"):
        environment.demonstrate(environment.task(0))


DEMONSTRATIONS = {
    "none": ("pass", "this environment has no method demonstrate(task). Add one that returns"),
    "without a reply": (
        "def demonstrate(self, task): return task.messages",
        "returned no message of the assistant, so there is nothing to imitate; add its replies",
    ),
    "None": ("def demonstrate(self, task): return None", "the messages is None; use a tuple of"),
}


@pytest.mark.parametrize(("method", "message"), DEMONSTRATIONS.values(), ids=DEMONSTRATIONS)
def test_demonstrations_are_checked_before_weights_are_loaded(
    folder: Path, tiny_folder: Path, method: str, message: str
) -> None:
    Path("bad_world.py").write_text(f"{WORLD}class Bad(World):\n    {method}\n")
    recipe = small_recipe(
        tiny_folder,
        tiny_folder,
        tasks={"kind": "environment", "path": "bad_world:Bad"},
        rollout={"student_fraction": 0.5, "off_policy_source": "dataset", "max_new_tokens": 4},
        losses=[{"kind": "cross_entropy", "on": "dataset"}],
        teacher=None,
    )
    with pytest.raises((RecipeError, TaskError), match=re.escape(message)):
        load_inputs(recipe)


NAMES = {
    "kinds": ("events=(Event(kind=f'word {r}'),)", "Observation.events[0].kind = 'word 64'"),
    "decisions": ("decision=f'word_{r}'", "Observation.decision = 'word_64'"),
}


@pytest.mark.parametrize(("fields", "message"), NAMES.values(), ids=NAMES)
def test_endlessly_many_names_of_metrics_are_a_fault(
    folder: Path, fields: str, message: str
) -> None:
    environment = make(
        f"class Other(Episode):\n    def step(self, r): return say({fields})\n"
        "class Bad(World):\n    def start(self, task): return Other()\n"
    )
    names, episode = NameMonitor(), environment.start(environment.task(0))
    for _ in range(2):
        faults = [names.find_fault(episode.step(str(number))) for number in range(65)]
        assert faults[:64] == [None] * 64
        assert message in str(faults[64]) and "there were 64 other" in str(faults[64])


def test_an_error_names_the_line_of_the_user(folder: Path) -> None:
    body = "class Bad(World):\n    def task(self, index): return json.loads('{')\n"
    with pytest.raises(TaskError, match=r"raised JSONDecodeError.*\(bad_world.py, line \d+\)"):
        make(body)


# ── recipes and data ─────────────────────────────────────────────────────────────────────────────

RECIPES = {
    "workers": (
        {"tasks": {"kind": "environment", "path": "a:B", "workers": 10**6}},
        "equal to 256",
    ),
    "step_seconds": ({"rollout": {"limits": {"step_seconds": 1e30}}}, "equal to 1000000"),
    "temperature": ({"rollout": {"temperature": 1e30}}, "temperature: must be less than or equal"),
    "suite": (
        {"evaluate": {"num_tasks": 1, "suites": {"x": {"kind": "nonsense"}}}},
        "evaluate.suites.x: kind = 'nonsense' is not known; leave it out",
    ),
}


@pytest.mark.parametrize(("changes", "message"), RECIPES.values(), ids=RECIPES)
def test_a_recipe_that_cannot_work(
    tiny_folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse_recipe(small_tree(tiny_folder, tiny_folder, **changes))


def test_overrides_may_be_written_as_messages_write_fields(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(toml.dumps(small_tree(tiny_folder, tiny_folder)))
    assert load_recipe(file, ["losses[0].weight=2.0"]).losses[0].weight == 2.0
    with pytest.raises(RecipeError, match=r"there is no losses.5"):
        load_recipe(file, ["losses[5].weight=2.0"])


def test_a_prompt_of_megabytes_is_not_tokenized(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Hi.", "split": "train"}, {"prompt": "x" * 20_000_000, "split": "train"}]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "rows.jsonl", rows))}
    with pytest.raises(TaskError, match=r"has 20,000,000 characters, more than the 506 tokens"):
        load_inputs(small_recipe(tiny_folder, tiny_folder, tasks=tasks))
    inputs = load_inputs(
        small_recipe(tiny_folder, tiny_folder, tasks=tasks | {"overlong_prompts": "drop"})
    )
    assert inputs.tasks.num_dropped == 1


def test_a_pair_of_equal_texts_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Hi.", "chosen": "A.", "rejected": "A.", "split": "train"}]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "rows.jsonl", rows))}
    with pytest.raises(TaskError, match="`chosen` and `rejected` are the same text"):
        load_inputs(small_recipe(tiny_folder, tiny_folder, tasks=tasks))


EMPTY = {
    "completion": {"prompt": "Hi.", "completion": ""},
    "completion of spaces": {"prompt": "Hi.", "completion": " \n"},
    "chosen": {"prompt": "Hi.", "chosen": "", "rejected": "No."},
    "chosen message": {
        "prompt": "Hi.",
        "chosen": [{"role": "assistant", "content": " "}],
        "rejected": "No.",
    },
    "the last message": {
        "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": ""}]
    },
}


@pytest.mark.parametrize("row", EMPTY.values(), ids=EMPTY)
def test_an_empty_answer_is_nothing_to_imitate(
    tiny_folder: Path, tmp_path: Path, row: dict[str, Any]
) -> None:
    rows = [{"prompt": "Hi.", "completion": "Hello."}, row | {"split": "train"}]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "rows.jsonl", rows))}
    with pytest.raises(TaskError, match=r"line 2: .* is empty, .* write the answer, or leave the"):
        load_inputs(small_recipe(tiny_folder, tiny_folder, tasks=tasks))


def test_an_empty_answer_may_be_the_worse_one(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Hi.", "chosen": "Hello.", "rejected": "", "split": "train"}]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "rows.jsonl", rows))}
    assert load_inputs(small_recipe(tiny_folder, tiny_folder, tasks=tasks)).tasks.batch(0, 1)


# ── run folders ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def recipe_file(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    tree = small_tree(tiny_folder, tiny_folder, train={"steps": 1, "prompts_per_step": 1})
    file.write_text(toml.dumps(tree))
    return file


def run_cli(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_a_path_that_is_too_long(recipe_file: Path) -> None:
    result = run_cli("train", recipe_file, "--run", "x" * 5000)
    assert result.exit_code == 2 and "File name too long. Give another path" in result.stderr


def test_metrics_that_something_else_changed(recipe_file: Path, tmp_path: Path) -> None:
    """The report says so; a run goes on only with the file as it was."""
    train(recipe_file, tmp_path / "run", quiet=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    content = metrics.read_bytes()
    metrics.write_bytes(content + json.dumps({"step": 1, "kl": "high"}).encode() + b"\n")
    assert run_cli("report", tmp_path / "run").exit_code == 0
    assert "`kl` is no number" in (tmp_path / "run" / "report.html").read_text()
    metrics.unlink()
    os.mkfifo(metrics)
    assert run_cli("report", tmp_path / "run").exit_code == 0
    assert "it is a pipe, not a regular file" in (tmp_path / "run" / "report.html").read_text()
