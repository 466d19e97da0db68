"""Classes of TRL's convention: rows become tasks, methods tools, failures events."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_model import TEMPLATE, tiny_tokenizer
from unit.chat.templates import HERMES_TEMPLATE, TOOLS_TEMPLATE

from courtside.chat.messages import format_messages
from courtside.chat.template import ChatTemplate
from courtside.environments.guard import EnvironmentFault
from courtside.environments.loading import make_environment
from courtside.environments.tool_calls import format_call
from courtside.environments.tool_listing import ToolListing, choose_tool_listing
from courtside.errors import RecipeError, TaskError
from courtside.recipe.load import parse_tasks_section
from courtside.recipe.tasks import EnvironmentTasks
from courtside.tasks.loading import make_task_source

CLASSES = '''
import random
from typing import Any, Literal, Optional

class Counter:
    def __init__(self, start: int = 0): self.first = start
    def reset(self, **row):
        self.counter = self.first
        self.target = row.get("target", 5)
    def increment(self, step: int, kind: Literal["up", "down"] = "up") -> int:
        """Increment the counter.

        Args:
            step: Value to add.
        """
        if step > 99: raise ValueError("too far")
        self.counter += step if kind == "up" else -step
        return self.counter
    def show(self) -> dict[str, Any]:
        """Show the counter."""
        return {"counter": self.counter}
    def note(self, text: Optional[str] = None, tags: list[str] = (), x: float = 0.0):
        """Say nothing."""
    def _private(self): raise AssertionError
    @property
    def reward(self): return self.counter / 10

class GetReward(Counter):
    def get_reward(self): return 0.75
class Async(Counter):
    async def later(self, x: int) -> int:
        """Later."""
        return x + 1
class Method(Counter):
    def reward(self): return float(self.counter == self.target)
class Ends(Counter):
    done = False
    def stop(self) -> str:
        """Stop."""
        self.done = True
        return "Stopped."
class Greets(Counter):
    def reset(self, **row):
        super().reset(**row)
        return f" You are {row['name']}."
class Random(Counter):
    def reset(self, **row): return str(random.random())
class Numbers(Counter):
    def reset(self, **row): return 3
class Unrewarded(Counter):
    reward = None
class Worded(Counter):
    reward = "good"
class NoDoc(Counter):
    def bare(self, x: int): return x
class NoHint(Counter):
    def bare(self, x):
        """Do it."""
class NoTools:
    def reset(self, **row): ...
class FailsToReset(Counter):
    def reset(self, **row): raise OSError("no server")
class Strict(Counter):
    def reset(self, target): ...
class Unimported(Counter):
    def odd(self, x: "Missing"):
        """Odd."""
class Gym:
    def reset(self, seed=None): ...
    def step(self, action): ...

def trl_reward(environments, prompts, completions, target, **kwargs):
    assert prompts[0] and completions[0][0]["role"] == "assistant"
    return [float(e.counter == t) for e, t in zip(environments, target)]
def wide_reward(environments, **kwargs): return [float(e.counter) for e in environments]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "classes.py").write_text(CLASSES)
    rows = [{"prompt": f"Count to {n}.", "target": n, "name": f"N{n}"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path
    sys.modules.pop("classes", None)


def make(name: str, **changes: Any) -> Any:
    changes.setdefault("rows", Path("rows.jsonl"))
    config = EnvironmentTasks(kind="environment", path=f"classes:{name}", **changes)
    return make_environment(config)


def call(name: str, /, **arguments: Any) -> str:
    return format_call(name, arguments, "json")


def test_rows_become_tasks(folder: Path) -> None:
    environment = make("Greets")
    task = environment.task(3)
    assert environment.size == 20 and task == environment.task(3)
    assert [m.role for m in task.messages] == ["system", "user"]
    assert task.messages[1].content == "Count to 3. You are N3."
    assert task.privileged == {"name": "N3", "tools": "increment, show, note"}
    schema = json.loads(task.messages[0].content.splitlines()[3])
    assert schema == {
        "name": "increment",
        "description": "Increment the counter.",
        "parameters": {
            "type": "object",
            "properties": {
                "step": {"type": "integer", "description": "Value to add."},
                "kind": {"type": "string", "enum": ["up", "down"]},
            },
            "required": ["step"],
        },
    }
    config = EnvironmentTasks(kind="environment", path="classes:Greets", rows=Path("rows.jsonl"))
    source = make_task_source(config, seed=0, environment=environment)
    assert {t.split for t in source.batch(0, 5)} == {"train"} and source.held_out("test", 1)


def test_splits_and_conversations_come_from_the_rows(folder: Path) -> None:
    prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
              {"role": "user", "content": "Count."}]  # fmt: skip
    Path("rows.jsonl").write_text(json.dumps({"prompt": prompt, "split": "validation"}) + "\n\n")
    task = make("Counter").task(0)
    assert task.split == "validation" and [m.content for m in task.messages[1:]] == [
        "Hi", "Hello", "Count."
    ]  # fmt: skip


def test_an_episode(folder: Path) -> None:
    environment = make("Counter", settings={"start": 2})
    episode = environment.start(environment.task(5))
    first = episode.step("I will. " + call("increment", step=3))
    assert first.messages[0].role == "tool" and first.messages[0].content == "5"
    assert not first.events and not first.done
    assert episode.step(call("show")).messages[0].content == '{"counter": 5}'
    assert episode.step(call("note", text=None, tags=["a"], x=2)).messages[0].content == "null"
    last = episode.step("Done: 5.")
    assert last.done and not last.messages and not last.events
    assert episode.grade().score == 0.5 and not episode.grade().passed
    assert environment.start(environment.task(5)).grade().score == 0.2


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        ("No call.", "no_call", "the reply has no <tool_call>"),
        ("<tool_call>{", "unparsable_call", "Could not parse a tool call"),
        (call("incremnt", step=1), "tool_not_found", "Tool not found: incremnt"),
        (call("reset"), "tool_not_found", "Tool not found: reset"),
        (call("reward"), "tool_not_found", "Tool not found: reward"),
        (call("_private"), "tool_not_found", "Tool not found: _private"),
        (call("__init__"), "tool_not_found", "Tool not found: __init__"),
        (call("increment"), "invalid_arguments", "missing argument 'step'"),
        (call("increment", step=1, self=2), "invalid_arguments", "unexpected argument 'self'"),
        (call("increment", step="1"), "invalid_arguments", 'step must be of type integer, not "1"'),
        (call("increment", step=True), "invalid_arguments", "step must be of type integer, not tr"),
        (call("increment", step=1, kind="x"), "invalid_arguments", "kind must be one of ['up', "),
        (call("note", tags="a"), "invalid_arguments", "tags must be of type array"),
        (call("increment", step=100), "tool_error", "ValueError: too far"),
        (call("show") * 2, "extra_calls", "only the first call of a reply is run"),
    ],
)
def test_mistakes_of_the_student_are_events(
    folder: Path, reply: str, kind: str, message: str
) -> None:
    environment = make("Counter")
    observation = environment.start(environment.task(0)).step(reply)
    [event] = observation.events
    assert event.kind == kind and message in event.detail("message")
    assert event.details["tools"] == "increment, show, note"
    assert observation.done == (kind == "no_call")
    if kind in ("tool_not_found", "invalid_arguments", "tool_error"):
        assert observation.messages[0].content.startswith("Error: ")


def test_rewards(folder: Path) -> None:
    def score(name: str, step: int, **changes: Any) -> float:
        environment = make(name, **changes)
        episode = environment.start(environment.task(5))
        episode.step(call("increment", step=step))
        result: float = episode.grade().score
        return result

    assert score("Counter", 3) == 0.3 and score("Method", 5) == 1.0
    assert (
        score("GetReward", 3) == 0.75
        and "get_reward" not in make("GetReward").task(0).messages[0].content
    )
    assert score("Unrewarded", 5, reward="classes:trl_reward") == 1.0
    assert score("Unrewarded", 4, reward="classes:trl_reward") == 0.0
    wide = {"reward": "classes:wide_reward", "reward_range": (-10.0, 10.0)}
    assert score("Counter", 5, **wide) == 0.75
    for name, changes, message in (
        ("Counter", {"reward": "classes:wide_reward"}, "reward 5, which is outside of tasks.rewar"),
        ("Unrewarded", {}, "found neither get_reward() nor `reward` on the object"),
        ("Worded", {}, "took the reward 'good'; return a number"),
    ):
        with pytest.raises(EnvironmentFault) as caught:
            score(name, 5, **changes)
        assert "grade(): " in str(caught.value) and message in str(caught.value)


def test_done_ends_the_episode_and_calls_can_be_plain(folder: Path) -> None:
    environment = make("Ends", tool_call_format="plain")
    assert 'NAME(ARGUMENT="VALUE")' in environment.task(0).messages[0].content
    episode = environment.start(environment.task(0))
    assert not episode.step("increment(step=2)").done
    assert episode.step("stop()").done


def test_async_tools_and_templates_without_tools(folder: Path) -> None:
    environment = make("Async", tool_role=False)
    task = environment.task(0)
    assert [m.role for m in task.messages] == ["user"]
    assert task.messages[0].content.endswith("\n\nCount to 0.")
    observation = environment.start(task).step(call("later", x=3))
    assert [(m.role, m.content) for m in observation.messages] == [("user", "4")]


def test_a_class_in_workers(folder: Path) -> None:
    inside, outside = make("Method"), make("Method", workers=1)
    assert outside.task(4) == inside.task(4)
    episode = outside.start(outside.task(4))
    episode.step(call("increment", step=4))
    assert episode.grade().passed
    assert outside.example_replies(outside.task(4)) == inside.example_replies(inside.task(4))
    outside.close()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Counter", {"rows": None}, "so its tasks are rows of a file; name it in tasks.rows"),
        (
            "Counter",
            {"rows": Path("none.jsonl")},
            "tasks.rows = 'none.jsonl': no such file; correct the path",
        ),
        (
            "Counter",
            {"settings": {"stat": 1}},
            "Counter: got an unexpected keyword argument 'stat'",
        ),
        ("Counter", {"reward": "classes:nothing"}, "tasks.reward = 'classes:nothing': module"),
        ("NoTools", {}, "NoTools has no tools"),
        ("Strict", {}, "Strict: got an unexpected keyword argument 'prompt'"),
        ("Unimported", {}, "Unimported: name 'Missing' is not defined"),
        ("NoDoc", {}, "the tool bare has no docstring; write what it does"),
        ("NoHint", {}, "the parameter 'x' of the tool bare has no type hint; add it"),
        ("Gym", {}, "Gym is a Gymnasium environment, whose actions are no text. Wrap it"),
        ("Random", {}, "task(0) differs from call to call"),
        ("Numbers", {}, "what reset returned is an int; use a text"),
        ("FailsToReset", {}, "task(0) raised OSError: no server (classes.py, line "),
    ],
)
def test_classes_that_cannot_work(
    folder: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        make(name, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "rows.jsonl, line 1: not valid JSON"),
        ("[]", "rows.jsonl, line 1: must be a JSON object"),
        ('{"prompt": "x", "prompt": "y"}', "line 1: the key 'prompt' is there twice"),
        ('{"prompt": "x", "target": NaN}', "line 1: 'target' holds NaN"),
        (r'{"prompt": "x", "name": "\ud800"}', "line 1: 'name' holds NaN, an infinity or half of"),
        ('{"prompt": "x", "target": ' + "[" * 99_999, "line 1: not valid JSON"),
        ("{}", "line 1: `prompt` must be a text, or a list of messages"),
        ('{"prompt": " "}', "`prompt` must be a text"),
        ('{"prompt": []}', "line 1: prompt must be a list of at least one message"),
        ('{"prompt": [{"role": "user"}]}', "line 1: prompt[0].content is null or missing"),
        ('{"prompt": [{"role": "usr", "content": "x"}]}', "prompt[0].role = 'usr'; use one of"),
        ('{"prompt": [{"role": "system", "content": "x"}]}', "the last message of `prompt` must"),
        ('{"prompt": [{"role": "assistant", "content": "x"}]}', "must be a user's; leave it out"),
        ('{"prompt": "x", "split": "dev"}', "split = 'dev'; use one of"),
        ("", "rows.jsonl: holds no rows"),
    ],
)
def test_rows_that_cannot_work(folder: Path, line: str, message: str) -> None:
    Path("rows.jsonl").write_text(line + "\n")
    with pytest.raises(TaskError) as caught:
        make("Counter")
    assert message in str(caught.value)


def test_a_pipe_of_rows_is_refused(folder: Path) -> None:
    Path("rows.jsonl").unlink()
    os.mkfifo("rows.jsonl")
    with pytest.raises(TaskError, match="it is a pipe, not a regular file"):
        make("Counter")


# ── where the tools are listed ───────────────────────────────────────────────────────────────────


def make_template(template: str) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer(template=template), name="tiny", eos_ids={1})


def choose(template: str, **changes: Any) -> ToolListing:
    config = EnvironmentTasks(
        kind="environment", path="classes:Counter", **({"rows": Path("rows.jsonl")} | changes)
    )
    return choose_tool_listing(config, make_template(template))


def test_the_template_lists_the_tools_where_its_calls_are_parsed() -> None:
    assert choose(HERMES_TEMPLATE) == ToolListing(uses_template=True)
    for template, reason in (
        (TEMPLATE, "tiny: its chat template renders no `tools`, so a system message lists the too"),
        (TOOLS_TEMPLATE, "its chat template writes calls otherwise than <tool_call>JSON</tool"),
    ):
        listing = choose(template)
        assert not listing.uses_template and reason in str(listing.note)
    for changes in ({"tool_call_format": "json"}, {"tool_role": False}, {"rows": None}):
        assert choose(HERMES_TEMPLATE, **changes) == ToolListing(uses_template=False)


@pytest.mark.parametrize("workers", [0, 1])
def test_tools_in_the_template(folder: Path, workers: int) -> None:
    """The prompt is what the template makes of the row's messages and the schemas."""
    config = EnvironmentTasks(
        kind="environment", path="classes:Greets", rows=Path("rows.jsonl"), workers=workers
    )
    environment: Any = make_environment(config, tools_in_template=True)
    task = environment.task(3)
    [message] = task.messages
    assert message.content == "Count to 3. You are N3."
    schemas = json.loads(message.tools)
    assert [s["function"]["name"] for s in schemas] == ["increment", "show", "note"]
    assert format_messages(task.messages).startswith('tools: [{"type": "function"')
    template = make_template(HERMES_TEMPLATE)
    expected = template.tokenizer.apply_chat_template(
        [{"role": "user", "content": message.content}],
        tools=schemas, add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert template.tokenizer.decode(template.prompt_ids(task.messages)) == expected
    assert '"increment"' in expected
    assert task.id == make("Greets").task(3).id
    reply = call("increment", step=3)
    assert environment.start(task).step(reply).messages[0].content == "3"
    if workers:
        environment.close()


def test_a_system_message_of_the_rows_stays(folder: Path) -> None:
    prompt = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Count."}]
    Path("rows.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    system, user = make("Counter").task(0).messages
    assert system.content.startswith("Call one tool") and system.content.endswith("\n\nBe brief.")
    config = EnvironmentTasks(kind="environment", path="classes:Counter", rows=Path("rows.jsonl"))
    environment = make_environment(config, tools_in_template=True)
    assert environment is not None
    system, user = environment.task(0).messages
    assert (system.role, system.content, user.content) == ("system", "Be brief.", "Count.")
    assert system.tools and not user.tools


def test_fields_of_such_classes_belong_to_them_alone(folder: Path) -> None:
    (folder / "classes.py").write_text(
        "class World:\n    size = 1\n    def start(self, task): ...\n"
    )
    with pytest.raises(TaskError, match=r"tasks.rows is for classes whose methods are tools"):
        make("World")
    with pytest.raises(RecipeError, match=r"reward_range = \[1.0, 0.0\]: the least comes first"):
        parse_tasks_section({"kind": "environment", "path": "a:B", "reward_range": [1.0, 0.0]}, [])
