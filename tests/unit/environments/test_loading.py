"""Worlds of one's own: the protocol, loading them, and what is told when one is not right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from courtside.environments.base import Environment
from courtside.environments.guard import GuardedEnvironment
from courtside.environments.loading import load_environment, make_environment
from courtside.environments.toolbox.environment import Toolbox
from courtside.errors import RecipeError, TaskError
from courtside.recipe.load import parse_recipe
from courtside.recipe.rollout import LimitsConfig
from courtside.recipe.tasks import ArithmeticTasks, EnvironmentTasks, ToolboxTasks
from courtside.report.folder.toml import dumps
from courtside.tasks.loading import make_task_source

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = REPOSITORY / "examples" / "environments" / "guess.py"

WORLD = """
from courtside.types import Grade, Message, Observation, Task

class World:
    size = 40
    def __init__(self, level: int = 1, *, name: str = "w") -> None:
        self.level = level
    def task(self, index):
        return Task(id=f"w-{index}", split=("train", "validation", "test")[index % 3],
                    messages=(Message(role="user", content=f"{index}"),))
    def start(self, task):
        return None

class Moody(World):
    count = 0
    def task(self, index):
        self.count += 1
        return super().task(self.count)

class Graded(World):
    def task(self, index):
        from dataclasses import replace
        return replace(super().task(index), grader="math")

class Silent(World):
    def task(self, index):
        from dataclasses import replace
        return replace(super().task(index), messages=())

class Wrong(World):
    def task(self, index):
        return {"prompt": "hello"}

class Empty(World):
    size = 0

class Unsized:
    def task(self, index): ...
    def start(self, task): ...

class Endless:
    size = 3
    def task(self, index): ...

class Strict(World):
    def __init__(self):
        pass

class Lazy(World):
    @property
    def size(self): raise OSError("no index")

def function(): ...
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command runs, with modules of the user's beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name in ("own_world", "needy", "guess"):
        sys.modules.pop(name, None)
    (tmp_path / "own_world.py").write_text(WORLD)
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    (tmp_path / "guess.py").write_text(EXAMPLE.read_text())
    return tmp_path


# ── loading ──────────────────────────────────────────────────────────────────────────────────────


def load(path: str, **settings: Any) -> Environment:
    config = EnvironmentTasks(kind="environment", path=path, settings=settings)
    return load_environment(config, LimitsConfig()).environment


def test_a_module_in_the_current_folder_is_loaded(user_folder: Path) -> None:
    world = load("own_world:World", level=3, name="x")
    assert world.size == 40 and getattr(world, "level") == 3  # noqa: B009


@pytest.mark.parametrize(
    ("path", "settings", "fragments"),
    [
        ("nowhere:World", {}, ["no module 'nowhere'", "nowhere.py where the command runs"]),
        ("nowhere.deep:World", {}, ["no module 'nowhere'"]),
        ("own_world.deep:World", {}, ["no module 'own_world.deep'|is not a package"]),
        ("needy:World", {}, ["imports 'surely_not_installed'", "install it"]),
        ("own_world:Wrld", {}, ["has no class 'Wrld'"]),
        ("own_world:function", {}, ["has no class 'function'"]),
        ("own_world:World", {"lvl": 2}, ["unexpected keyword argument 'lvl'", "level: int"]),
        ("own_world:Strict", {"a": 1}, ["Strict takes no settings"]),
        ("own_world:Endless", {}, ["no method start"]),
        ("own_world:Unsized", {}, ["Unsized.size = None", "number of tasks"]),
        ("own_world:Empty", {}, ["Empty.size = 0"]),
        ("own_world:Lazy", {}, ["Lazy.size raised OSError: no index (own_world.py, line "]),
        ("builtins:type", {}, ["has no signature that Python can tell"]),
        ("own_world:Wrong", {}, ["gave dict", "courtside.types.Task"]),
        ("own_world:Graded", {}, ["grader = 'math'", "leave it out"]),
        ("own_world:Silent", {}, ["the last one must be a user's"]),
        ("own_world:Moody", {}, ["differs from call to call", "pure function"]),
    ],
)
def test_what_is_wrong_is_told(
    user_folder: Path, path: str, settings: dict[str, Any], fragments: list[str]
) -> None:
    with pytest.raises(TaskError) as caught:
        load(path, **settings)
    assert str(caught.value).startswith(f"tasks.path = {path!r}: ")
    for word in fragments:
        assert any(fragment in str(caught.value) for fragment in word.split("|")), str(caught.value)


def test_mistakes_inside_a_world_are_its_own(user_folder: Path) -> None:
    (user_folder / "broken_world.py").write_text(
        "class World:\n    def __init__(self): raise TypeError('inside')\n"
    )
    with pytest.raises(TaskError) as caught:
        load("broken_world:World")
    assert str(caught.value) == (
        "tasks.path = 'broken_world:World': World(**settings) raised TypeError: inside "
        "(broken_world.py, line 2)"
    )
    assert isinstance(caught.value.__cause__, TypeError)


def test_which_tasks_are_environments(user_folder: Path) -> None:
    custom = EnvironmentTasks(kind="environment", path="own_world:World")
    box = ToolboxTasks(kind="toolbox")
    sums = ArithmeticTasks(kind="arithmetic")
    assert custom.is_environment and box.is_environment and not sums.is_environment
    world = make_environment(custom)
    assert world is not None and world.size == 40
    toolbox = make_environment(box)
    assert isinstance(toolbox, GuardedEnvironment) and isinstance(toolbox.environment, Toolbox)
    assert make_environment(sums) is None


def test_a_source_of_its_tasks(user_folder: Path) -> None:
    custom = EnvironmentTasks(kind="environment", path="own_world:World", system_prompt="Be kind.")
    source = make_task_source(custom, seed=0)
    assert {task.split for task in source.batch(0, 20)} == {"train"}
    held = source.held_out("test", 99)
    assert len(held) == 13 and {task.messages[0].content for task in held} == {"Be kind."}
    world = load("own_world:World")
    assert make_task_source(custom, seed=0, environment=world).held_out("test", 99) == held


# ── recipes ──────────────────────────────────────────────────────────────────────────────────────


def recipe(**tasks: Any) -> Any:
    tree = {
        "student": {"model": "smollm2-135m"},
        "tasks": tasks,
        "teacher": {"kind": "model", "model": "models/teacher"},
        "losses": [{"kind": "divergence"}],
    }
    return parse_recipe(tree, name="mine.toml")


@pytest.mark.parametrize(
    ("tasks", "fragments"),
    [
        ({"turns": 0}, "tasks.turns: must be greater than or equal to 1"),
        ({"turns": 201}, "tasks.turns: must be less than or equal to 200"),
        ({"turns": [9, 4]}, "turns = [9, 4]: the least comes first"),
        ({"num_tools": 9}, "num_tools = 9, but capabilities names 8"),
        ({"names": "held_out", "common_name_fraction": 0.5}, "no common name is among"),
        ({"capabilities": ["wether"]}, "tasks.capabilities[0]: must be 'weather'"),
        ({"capabilities": ["delete_note", "price"], "num_tools": 2}, "would run out of notes"),
        ({"system_prompt": "Be kind."}, "the list of tools is the system prompt"),
        ({"kind": "environment", "path": "worlds/maze.py:Maze"}, "names a file"),
        ({"kind": "environment", "path": "maze"}, "must be 'module:Class'"),
        ({"kind": "environment", "path": "a:B", "settings": {"x": {"y": 1}}}, "tasks.settings.x"),
    ],
)
def test_sections_that_cannot_work(tasks: dict[str, Any], fragments: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(**{"kind": "toolbox", **tasks})
    assert fragments in str(caught.value)


def test_recipes_come_back_from_a_file() -> None:
    import tomllib

    for tasks in (
        {"kind": "toolbox", "turns": [2, 9], "capabilities": ["price", "weather"], "num_tools": 2},
        {"kind": "environment", "path": "a.b:C",
         "settings": {"n": 3, "x": 0.5, "on": True, "word": "w", "list": [1, "a", False]}},
    ):  # fmt: skip
        first = recipe(**tasks)
        reloaded = parse_recipe(tomllib.loads(dumps(first.model_dump(mode="json"))), name="again")
        assert reloaded == first


# ── the example ──────────────────────────────────────────────────────────────────────────────────


def test_the_documentation_shows_the_examples() -> None:
    page = (REPOSITORY / "docs" / "environments.md").read_text(encoding="utf-8")
    examples = sorted(EXAMPLE.parent.glob("*.py"))
    assert len(examples) == 4
    for example in examples:
        assert f"```python\n{example.read_text(encoding='utf-8')}```" in page, example.name
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 45


def test_the_example_plays(user_folder: Path) -> None:
    config = EnvironmentTasks(kind="environment", path="guess:Guess", settings={"high": 50})
    world = make_environment(config)
    assert world is not None
    tasks = make_task_source(config, seed=0, environment=world).batch(0, 8)
    for task in tasks:
        episode = world.start(task)
        assert episode.grade().score == 0.0
        assert [event.kind for event in episode.step("A number?").events] == ["no_number"]
        low, high = 1, 50
        for _ in range(6):
            middle = (low + high) // 2
            observation = episode.step(f"Is it {middle}?")
            if observation.done:
                break
            low, high = (
                (middle + 1, high) if "larger" in observation.messages[0].content
                else (low, middle - 1)
            )  # fmt: skip
        assert observation.done and episode.grade().passed
        assert task.privileged["secret"] == str(middle)
