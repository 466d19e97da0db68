"""`courtside check-env`: bugs of environments are told before a model is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from courtside.cli.app import app

REPOSITORY = Path(__file__).resolve().parents[3]
WORLDS = """
import itertools, os, random, sys, time
from courtside.types import Event, Grade, Message, Observation, Task

def say(text, **more):
    return Observation(messages=(Message(role="tool", content=text),), **more)

class Good:
    size = 30
    def __init__(self, level=1): self.level = level
    def task(self, index):
        return Task(id=f"t-{index}", split=("train", "validation", "test")[index % 3],
                    messages=(Message(role="user", content=f"Say {index}."),),
                    privileged={"answer": str(index)}, grader_args={"index": index})
    def start(self, task): return Episode(task)
class Episode:
    def __init__(self, task): self.task, self.num = task, 0
    def step(self, reply):
        self.num += 1
        if reply.strip() == str(self.task.grader_args["index"]):
            return say("Right!", done=True)
        return say("No.", events=(Event(kind="wrong", details={"reply": reply, "num": self.num}),))
    def grade(self): return Grade(score=0.0, passed=False)

def broken(name, **methods):
    episode = type("Broken", (Episode,), {k: f for k, f in methods.items() if k != "task"})
    return type(name, (Good,), {"start": lambda self, task: episode(task),
                                **{k: f for k, f in methods.items() if k == "task"}})

counter = itertools.count()
def fail_on_empty(self, reply): return say(reply[0])
Empty = broken("Empty", step=fail_on_empty)
Random = broken("Random", step=lambda self, reply: say(str(random.random())))
Counting = broken("Counting", step=lambda self, reply: say(str(next(counter))))
class Shared(Good):
    def start(self, task):
        self.turns = []
        episode = Episode(task)
        def step(reply):
            self.turns.append(reply)
            return say(str(len(self.turns)))
        episode.step = step
        return episode
Exits = broken("Exits", step=lambda self, reply: os._exit(3))
def hang(self, reply): time.sleep(60)
Hangs = broken("Hangs", step=hang)
Graded = broken("Graded", grade=lambda self: 0.5)
Dev = broken("Dev", task=lambda self, index: Task(id="a", split="dev", messages=(
    Message(role="user", content="Hi"),)))
def same_id(self, index):
    return Task(id="a", split="train", messages=(Message(role="user", content=str(index)),))
Twins = broken("Twins", task=same_id)
Silent = broken("Silent", step=lambda self, reply: say("word " * 3000))
class Unmade(Good):
    def __init__(self): raise OSError("no data")
class Demonstrated(Good):
    def demonstrate(self, task): return "say it"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "worlds.py").write_text(WORLDS)
    yield tmp_path
    sys.modules.pop("worlds", None)


def check(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check-env", *args])
    return result.exit_code, result.output


def test_a_good_environment(folder: Path) -> None:
    code, output = check("worlds:Good", "settings.level=2")
    assert code == 0 and output.endswith("no problems\n")
    assert "tasks: 30; looked at: 10 test, 10 train, 10 validation" in output
    for word in ("step ", "grade ", "start ", " ms (longest ", "from the tasks: {answer}"):
        assert word in output
    assert "  wrong: " in output and 'rule: { detect = "event", event = "wrong" }' in output
    assert "    {num}: 1" in output and "notes" not in output


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("Empty", ["step(reply) raised IndexError: string index out of range (worlds.py, line ",
                   "first at: task t-0, empty replies, turn 1"]),
        ("Random", ["an episode differs when it is played again with the same replies"]),
        ("Counting", ["an episode differs when it is played again"]),
        ("Shared", ["two episodes that are played in turns change each other; keep their state"]),
        ("Exits", ["step ended its process: it exited with code 3"]),
        ("Graded", ["grade(): returned a float; return courtside.types.Grade("]),
        ("Dev", ["task(0): split = 'dev'; use one of"]),
        ("Twins", ["two different tasks have one id; make it a hash", "task(1), id 'a'"]),
        ("Unmade", ["Unmade(**settings) raised OSError: no data (worlds.py, line "]),
        ("Demonstrated", ["demonstrate(task): the messages is a str; use a tuple"]),
        ("Nope", ["module 'worlds' has no class 'Nope'"]),
    ],
)  # fmt: skip
def test_problems_are_told(folder: Path, name: str, messages: list[str]) -> None:
    code, output = check(f"worlds:{name}", "--tasks", "1", "--seconds", "1")
    assert code == 1 and "problems (" in output, output
    for message in messages:
        assert message in output


def test_a_hang_is_told_in_its_time(folder: Path) -> None:
    (folder / "hang.toml").write_text(
        '[student]\nmodel = "x"\n[tasks]\nkind = "environment"\npath = "worlds:Hangs"\n'
        '[rollout]\nlimits = { step_seconds = 0.2 }\n[reader]\nkind = "rules"\n'
        '[teacher]\nkind = "self"\n[[losses]]\nkind = "divergence"\non = "hinted_turns"\n'
    )
    code, output = check("hang.toml", "--tasks", "1", "--seconds", "0.5")
    assert code == 1 and "step did not return within 0.2 seconds" in output
    code, second = check(
        "worlds:Hangs", "--tasks", "1", "--seconds", "0.5", "--step-seconds", "0.3"
    )
    assert code == 1 and "step did not return within 0.3 seconds" in second
    assert "scripts were not played: 0.5 seconds were over" in output


def test_what_is_worth_a_note(folder: Path) -> None:
    code, output = check("worlds:Silent", "--in-process", "--tasks", "1")
    assert code == 0
    assert "no reply caused an event, so reader.kind = 'rules' finds hints only" in output
    assert "15,000 characters, and rollout.limits.observation_chars = 8,000 cuts it" in output


def test_the_toolbox_and_the_example_are_clean(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output = check("targeted-hints", "--tasks", "1")
    assert code == 0 and "tool_not_found" in output, output
    monkeypatch.chdir(REPOSITORY / "examples" / "environments")
    code, output = check("guess:Guess", "settings.high=60")
    assert code == 0 and "no_number" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["worlds:Good", "setings.x=1"], "tasks.setings"),
        (["worlds:Good", "settings.level"], "write it as section.key=value"),
        (["worlds.py:Good"], "names a file"),
        (["worlds.py"], "worlds.py: is a file. Give module and class, as in worlds:Class"),
        (["shared-rule"], "tasks.kind = 'instructions' is no environment"),
        (["nothing"], "nothing"),
    ],
)
def test_what_cannot_be_checked(folder: Path, args: list[str], message: str) -> None:
    code, output = check(*args)
    assert code == 2 and message in output
