"""Worker processes: what ends or hangs in them costs one episode, and nothing else changes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from courtside.environments.guard import EnvironmentFault, call_all
from courtside.environments.loading import make_environment
from courtside.environments.workers import WorkerEnvironment
from courtside.errors import TaskError
from courtside.recipe.rollout import LimitsConfig
from courtside.recipe.tasks import EnvironmentTasks
from courtside.types import Message, Task

WORLD = """
import ctypes, os, random, signal, subprocess, sys, time
from courtside.types import Event, Grade, Message, Observation, Task

class World:
    size = 9
    def __init__(self, name="w"):
        self.name = name
        self.num_started = 0
    def task(self, index):
        if index == 7:
            os._exit(7)
        if index == 8:
            raise KeyError(index)
        return Task(id=f"{self.name}-{index}", split="train",
                    messages=(Message(role="user", content=str(index)),),
                    grader_args={"index": index})
    def start(self, task):
        return Episode(task.grader_args["index"])

class Demonstrated(World):
    def demonstrate(self, task):
        return [*task.messages, Message(role="assistant", content="Done.")]

class Episode:
    def __init__(self, index):
        self.rng, self.replies = random.Random(index), []
    def step(self, reply):
        self.replies.append(reply)
        match reply:
            case "exit": os._exit(3)
            case "segfault": ctypes.string_at(0)
            case "kill": os.kill(os.getpid(), signal.SIGKILL)
            case "sys.exit": sys.exit(4)
            case "raise": raise KeyError("city")
            case "hang": time.sleep(60)
            case "spin":
                while True: pass
            case "child":
                child = subprocess.Popen(["sleep", "60"])
                open("child", "w").write(str(child.pid))
                time.sleep(60)
            case "meet":  # returns when two processes are in it
                open(f"met-{os.getpid()}", "w").close()
                while sum(name.startswith("met-") for name in os.listdir()) < 2: time.sleep(0.01)
            case "pid": return self.say(str(os.getpid()))
        return self.say(f"{len(self.replies)} {self.rng.random()}")
    def say(self, text):
        return Observation(messages=(Message(role="tool", content=text),),
                           events=(Event(kind="said", details={"n": [len(self.replies), None]}),))
    def grade(self):
        return Grade(score=len(self.replies) / 100, passed=False)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "worlds.py").write_text(WORLD)
    yield tmp_path
    sys.modules.pop("worlds", None)


def make(workers: int, *, name: str = "World", seconds: float = 20.0, **settings: Any) -> Any:
    config = EnvironmentTasks(
        kind="environment", path=f"worlds:{name}", settings=settings, workers=workers
    )
    return make_environment(config, LimitsConfig(step_seconds=seconds))


@pytest.fixture
def world(folder: Path) -> Iterator[WorkerEnvironment]:
    environment = make(1, seconds=2.0)
    yield environment
    environment.close()


def has_ended(pid: int) -> bool:
    """Within five seconds. An orphan may stay a zombie for as long as nobody reaps it."""
    for _ in range(100):
        command = ["ps", "-o", "stat=", "-p", str(pid)]
        state = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def texts(episode: Any, *replies: str) -> list[str]:
    return [episode.step(reply).messages[0].content for reply in replies]


def test_workers_give_what_the_process_itself_gives(folder: Path) -> None:
    inside, outside = make(0, name="Demonstrated"), make(2, name="Demonstrated")
    assert outside.size == inside.size == 9 and "worlds" in sys.modules
    tasks = [inside.task(index) for index in range(5)]
    assert [outside.task(index) for index in range(5)] == tasks
    for task in tasks:
        first, second = inside.start(task), outside.start(task)
        for reply in ("a", "", "ü\n" * 3000):
            assert first.step(reply) == second.step(reply)
        assert first.grade() == second.grade()
    assert outside.demonstrate(tasks[0]) == inside.demonstrate(tasks[0])
    outside.close()


def test_the_module_is_not_imported_here(folder: Path) -> None:
    environment = make(1)
    assert environment.task(0).id == "w-0" and "worlds" not in sys.modules
    assert environment.demonstrate is None
    environment.close()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("exit", "step ended its process: it exited with code 3"),
        ("segfault", "step ended its process: it was killed by SIGSEGV"),
        ("kill", "it was killed by SIGKILL"),
        ("sys.exit", "step(reply) called sys.exit(4) (worlds.py, line "),
        ("raise", "step(reply) raised KeyError: 'city' (worlds.py, line "),
    ],
)
def test_an_end_costs_one_episode(world: WorkerEnvironment, reply: str, message: str) -> None:
    bystander, culprit, late = (world.start(world.task(index)) for index in (1, 2, 3))
    alone = world.start(world.task(1))
    expected = texts(alone, "a", "b", "c")
    assert texts(bystander, "a") == expected[:1]
    with pytest.raises(EnvironmentFault) as caught:
        culprit.step(reply)
    assert message in str(caught.value)
    assert str(caught.value).startswith("tasks.path = 'worlds:World': ")
    assert (reply == "raise") == ('case "raise": raise KeyError("city")' in caught.value.trace)
    assert texts(bystander, "b", "c") == expected[1:]
    assert bystander.grade() == alone.grade() and late.grade().score == 0


@pytest.mark.parametrize("reply", ["hang", "spin"])
def test_a_worker_that_hangs_is_killed(folder: Path, reply: str) -> None:
    world = make(1, seconds=0.5)
    bystander, culprit = world.start(world.task(1)), world.start(world.task(2))
    (pid,) = texts(bystander, "pid")
    begin = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"step did not return within 0\.5 seconds"):
        culprit.step(reply)
    assert time.monotonic() - begin < 5
    assert has_ended(int(pid))
    with pytest.raises(EnvironmentFault, match="answered differently when it was replayed"):
        bystander.step("a")  # its first answer was the number of the process
    world.close()


def test_a_kill_takes_the_children_along(folder: Path) -> None:
    world = make(1, seconds=1.0)
    with pytest.raises(EnvironmentFault):
        world.start(world.task(0)).step("child")
    assert has_ended(int((folder / "child").read_text()))
    world.close()


def test_two_workers_run_at_the_same_time(folder: Path) -> None:
    world = make(2, seconds=10.0)
    episodes = [world.start(world.task(index)) for index in (0, 1)]
    results = call_all([partial(episode.begin_step, "meet") for episode in episodes])
    assert not any(isinstance(result, EnvironmentFault) for result in results)
    world.close()


def test_tasks_that_end_their_process_are_told(world: WorkerEnvironment) -> None:
    with pytest.raises(TaskError, match=r"task\(7\): its process exited with code 7"):
        world.task(7)
    with pytest.raises(TaskError, match=r"task\(8\) raised KeyError: 8"):
        world.task(8)
    assert world.task(1).id == "w-1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os; os._exit(5)", "its worker process exited with code 5 while the module was"),
        ("import sys; sys.exit(5)", "importing 'worlds' called sys.exit(5)"),
        ("class World: ...", "World has no method task(index); add it"),
        ("class World:\n  def __init__(self): raise OSError('no data')", "raised OSError: no data"),
        ("(", "'(' was never closed; correct the syntax there"),
    ],
)
def test_what_cannot_be_loaded_is_told(folder: Path, text: str, message: str) -> None:
    (folder / "worlds.py").write_text(text + "\n")
    with pytest.raises(TaskError) as caught:
        make(2)
    assert message in str(caught.value)


SCRIPT = """
import os, signal, sys, time
sys.path[:] = {path!r}
from courtside.environments.loading import make_environment
from courtside.recipe.tasks import EnvironmentTasks

world = make_environment(EnvironmentTasks(kind="environment", path="worlds:World", workers=2))
episode = world.start(world.task(0))
print(episode.step("pid").messages[0].content, flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL); time.sleep(9)", -signal.SIGKILL),
        (
            "import threading\n"
            "threading.Thread(target=episode.step, args=['hang'], daemon=True).start()\n"
            "time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)",
            -signal.SIGKILL,
        ),
        ("from courtside.cli import _exit_now; _exit_now(3)", 3),
    ],
)
def test_workers_end_with_their_parent(folder: Path, end: str, code: int) -> None:
    """A script without `if __name__ == "__main__"` is run once: no worker imports it."""
    (folder / "script.py").write_text(SCRIPT.format(path=sys.path, end=end))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    (pid,) = done.stdout.split()
    assert has_ended(int(pid))


def test_closed_workers_are_gone_with_their_environment(folder: Path) -> None:
    world = make(1)
    (pid,) = texts(world.start(world.task(0)), "pid")
    del world
    assert has_ended(int(pid))


def test_messages_and_tasks_travel_whole(world: WorkerEnvironment) -> None:
    messages = (Message(role="system", content="\0 \u2028 🦜"), Message(role="user", content="Hi"))
    task = Task(id="x", split="test", messages=messages, grader_args={"index": 2})
    assert world.start(task).step("").events[0].details == {"n": [1, None]}
