"""User code named in recipes: the page that shows it, what works, and what is refused."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from courtside.errors import RecipeError, RunError, TaskError
from courtside.plugins import check_import_path
from courtside.reader.custom import CustomReader
from courtside.reader.loading import make_reader
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe
from courtside.recipe.reader import CombinedReaderConfig, CustomReaderConfig
from courtside.recipe.tasks import CustomTasks, JsonlTasks
from courtside.tasks.custom import load_custom_tasks
from courtside.tasks.graders import grade, require_gradable
from courtside.tasks.loading import make_task_source
from courtside.tasks.parsing import read_jsonl_tasks
from courtside.tasks.user_graders import _reported, _timeouts, load_grader
from courtside.types import Grade, Message, Task, Trajectory, Turn

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")

USER_MODULE = """
from courtside.types import Grade, Hint, Message, Task

def half(response, task): return 0.5
def exact(response, task): return response == task.answer
def full(response, task): return Grade(score=1.0, passed=True, feedback=task.grader_args["praise"])
def count(response, task): return len(response)
def missing(response, task): return None
def text(response, task): return "good"
def nan(response, task): return float("nan")
def negative(response, task): return -0.5
def infinite(response, task): return float("inf")
def huge(response, task): return 10**400
def moves(response, task):
    import os
    os.chdir("/")
    return 1.0
def wrong_grade(response, task): return Grade(score=2.0, passed=True, feedback="")
def wrong_passed(response, task): return Grade(score=1.0, passed=1, feedback="")
def wrong_feedback(response, task): return Grade(score=1.0, passed=True, feedback=None)
def one_parameter(response): return True
def three_parameters(response, task, extra): return True
def raises(response, task): raise KeyError(f"no {response}")
def leaves(response, task): raise SystemExit(3)
def sleeps(response, task):
    import time
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass
def backtracks(response, task):
    import re
    return bool(re.match("(a+)+$", "a" * 40 + "b"))
def sometimes(response, task): return True if response == "quick" else sleeps(response, task)
def has_alarm(response, task):
    import signal
    signal.alarm(5)
    signal.alarm(0)
    return True
def trl_length(completions, **kwargs):
    return [len(completion[0]["content"]) / 10 for completion in completions]
def trl_answer(prompts, completions, answer, weight):
    assert prompts[0][0]["role"] == "user"
    return [w * (c[0]["content"] == a) for c, a, w in zip(completions, answer, weight)]
def trl_long(completions, **kwargs): return [3.0 for _ in completions]
def trl_none(completions, **kwargs): return [None]
not_callable = 3

def task(index=0, **changes):
    fields = dict(id=f"t-{index}", split="train",
                  messages=(Message(role="user", content=f"Say {index}."),))
    return Task(**{**fields, **changes})

def dicts(n=20): return [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(n)]
def tasks(n=20): return (task(i, split=("train", "test")[i % 2]) for i in range(n))
def empty(): return []
def number(): return 3
def one_dict(): return {"prompt": "Hi"}
def mixed(): return [task(), {"prompt": "Hi"}]
def same_ids(): return [task(1), task(1, answer="2")]
def no_id(): return [task(id="")]
def set_args(): return [task(0, grader="exact", answer="a", grader_args={"a": {1, 2}})]
def bad_split(): return [task(split="dev")]
def no_messages(): return [task(messages=())]
def text_messages(): return [task(messages="Hi")]
def int_content(): return [task(messages=(Message(role="user", content=5),))]
def half_a_pair(): return [task(messages=(Message(role="user", content="\\ud800"),))]
def odd_role(): return [task(messages=(Message(role="bot", content="Hi"),))]
def number_answer(): return [task(answer=5, grader="exact")]
def number_grader(): return [task(grader=5)]
def number_fact(): return [task(privileged={"a": 1})]
def text_tags(): return [task(tags="x")]
def no_completion(): return [task(completion=" ")]
def raises_late():
    yield task()
    raise KeyError("x")
def set_in_dict():
    return [{"prompt": "a", "grader": "exact", "answer": "a", "grader_args": {"b": {1}}}]
def nan_answer(): return [{"prompt": "a", "grader": "exact", "answer": float("nan")}]
def own_answer(): return [task(messages=(Message(role="assistant", content="Hi"),))]
def unknown_grader(): return [task(grader="vibes")]
def bad_key(): return [{"promt": "Hi"}]
def bad_prompt(): return [{"prompt": 3}]
def fails(): raise OSError("no database")

class Reader:
    def __init__(self, text="Be brief."):
        self.text = text
    def __call__(self, trajectories):
        return [Hint(trajectory=t.id, turn=1, text=self.text, source="mine") for t in trajectories]
class Late(Reader):
    def __call__(self, trajectories):
        return [Hint(trajectory=t.id, turn=9, text="Hm.", source="mine") for t in trajectories]
class NotCallable: ...
class Raises(Reader):
    def __call__(self, trajectories): raise KeyError("x")
class RaisesLate(Reader):
    def __call__(self, trajectories):
        yield Hint(trajectory="a", turn=1, text="Hi.", source="mine")
        raise KeyError("x")
class ReturnsNone(Reader):
    def __call__(self, trajectories): return None
class ReturnsText(Reader):
    def __call__(self, trajectories): return "hint"
class ReturnsTexts(Reader):
    def __call__(self, trajectories): return ["hint"]
class WrongTurn(Reader):
    def __call__(self, trajectories):
        return [Hint(trajectory="a", turn="1", text="x", source="mine")]
class WrongText(Reader):
    def __call__(self, trajectories):
        return [Hint(trajectory="a", turn=1, text=None, source="mine")]
def function(trajectories): return []
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where a command runs, with modules of the user's in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    for name in ("mine", "needs_more", "my_graders", "my_tasks", "my_readers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    load_grader.cache_clear()
    _reported.clear()
    _timeouts.clear()
    (tmp_path / "mine.py").write_text(USER_MODULE)
    (tmp_path / "needs_more.py").write_text("import surely_not_installed\n")
    for block in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", PAGE, re.M | re.S):
        (tmp_path / block[1]).write_text(block[0])
    return tmp_path


def make_task(**changes: Any) -> Task:
    messages = (Message(role="user", content="Say 4."),)
    return Task(**{"id": "t", "split": "train", "messages": messages, **changes})


def make_trajectory(id: str = "a", text: str = "Sorry, no.") -> Trajectory:
    turns = (
        Turn(role="prompt", text="Hi", token_ids=(1,), completion_mask=(False,)),
        Turn(role="assistant", text=text, token_ids=(2, 3), completion_mask=(True, True)),
    )
    return Trajectory(
        id=id, task=make_task(), turns=turns, source="student", policy_version=0, temperature=1.0,
        stop="eos",
    )  # fmt: skip


@pytest.mark.parametrize(
    "path", ["mine", "mine:", ":grade", "mine.py:grade", "a/b:grade", "mine:a.b", "mine:a b", ""]
)
def test_import_paths_are_checked(path: str) -> None:
    with pytest.raises(ValueError, match="as in 'mine:grade'"):
        check_import_path(path, "mine:grade")
    assert check_import_path("a.b:c", "mine:grade") == "a.b:c"


# ── the page ─────────────────────────────────────────────────────────────────────────────────────


def test_the_grader_of_the_page(user_folder: Path) -> None:
    task = make_task(answer="city sky", grader="my_graders:grade_json_keys")
    half = grade(task, '{"city": "Oslo"}')
    assert half is not None and (half.score, half.passed) == (0.5, False)
    whole = grade(task, '{"city": 1, "sky": 2}')
    assert whole is not None and whole.passed
    none = grade(task, "3")
    assert none is not None and none.score == 0.0 and none.error is None


def test_the_tasks_of_the_page(user_folder: Path) -> None:
    config = CustomTasks(kind="custom", path="my_tasks:make_tasks", settings={"limit": 100})
    source = make_task_source(config, seed=0)
    batch = source.batch(0, 200)
    assert {task.answer for task in batch} == {"yes", "no"} and source.held_out("test", 5)
    for task in batch:
        number = int(re.findall(r"\d+", task.messages[0].content)[0])
        right = "Yes." if number in (2, 3, 5, 7) or all(number % p for p in (2, 3, 5, 7)) else "No."
        graded = grade(task, right)
        assert graded is not None and graded.passed, number


def test_the_reader_of_the_page(user_folder: Path) -> None:
    config = CustomReaderConfig(
        kind="custom", path="my_readers:ApologyReader", settings={"word": "Sorry"}
    )
    reader = make_reader(config, seed=0)
    output = reader([make_trajectory("a"), make_trajectory("b", "Yes.")])
    assert [(hint.trajectory, hint.turn) for hint in output.hints] == [("a", 1)]
    assert output.counts == {"custom/proposed": 1, "accepted": 1}


def test_a_run_with_a_grader_tasks_and_reader_of_the_user(
    user_folder: Path, tiny_folder: Path
) -> None:
    from support.small_runs import small_recipe

    import courtside

    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "custom", "path": "mine:dicts", "grader": "mine:raises"},
        reader={"kind": "custom", "path": "mine:Reader", "settings": {"text": "Be kind."}},
        teacher={"kind": "self"},
        losses=[{"kind": "divergence", "on": "hinted_turns"}],
        train={"steps": 1, "prompts_per_step": 2},
        evaluate={"num_tasks": 1},
    )
    with pytest.warns(UserWarning, match="grader 'mine:raises' raised"):
        run = courtside.train(recipe, user_folder / "run")
    [row] = run.metrics()
    assert row["reward/grader_errors"] == 4 and row["reader/custom/proposed"] == 4
    [stored, *_] = run.trajectories(0)
    assert stored.trajectory.grade is not None
    assert (stored.trajectory.grade.error or "").startswith("KeyError: ")


# ── graders ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("half", Grade(score=0.5, passed=False, feedback="")),
        ("exact", Grade(score=1.0, passed=True, feedback="")),
        ("full", Grade(score=1.0, passed=True, feedback="Well done.")),
    ],
)
def test_what_a_grader_may_return(user_folder: Path, name: str, expected: Grade) -> None:
    args = {"praise": "Well done."}
    task = make_task(answer="4", grader=f"mine:{name}", grader_args=args)
    require_gradable(task)
    assert grade(task, "4") == expected


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine:", "must be 'module:function'"),
        ("mine.py:half", "names a file"),
        ("nowhere:half", "no module 'nowhere'"),
        ("needs_more:half", "imports 'surely_not_installed'"),
        ("mine:haf", "has no function 'haf'"),
        ("mine:not_callable", "has no function 'not_callable'"),
        ("mine:one_parameter", "called as grade(response, task)"),
        ("mine:three_parameters", "called as grade(response, task)"),
    ],
)
def test_graders_that_cannot_be_called(user_folder: Path, path: str, message: str) -> None:
    with pytest.raises(TaskError, match="grader") as caught:
        require_gradable(make_task(grader=path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("count", "outside of [0, 1]"),
        ("negative", "outside of [0, 1]"),
        ("wrong_grade", "outside of [0, 1]"),
        ("missing", "returned NoneType"),
        ("text", "returned str"),
        ("nan", "finite number"),
        ("infinite", "finite number"),
        ("huge", "finite number"),
        ("wrong_passed", "`passed` is no bool"),
        ("wrong_feedback", "`feedback` is no text"),
    ],
)
def test_results_that_are_no_grade(user_folder: Path, name: str, message: str) -> None:
    with pytest.raises(RunError) as caught:
        grade(make_task(grader=f"mine:{name}"), "long")
    assert message in str(caught.value)
    assert f"'mine:{name}'" in str(caught.value) and "task t" in str(caught.value)


def test_a_grader_that_raises_is_reported_once(user_folder: Path) -> None:
    task = make_task(grader="mine:raises")
    with pytest.warns(UserWarning, match="task t") as caught:
        grades = [grade(task, text) for text in ("a", "b")]
    assert len(caught) == 1 and "Traceback" in str(caught[0].message)
    assert [g and g.error for g in grades] == ["KeyError: 'no a'", "KeyError: 'no b'"]
    assert all(g is not None and g.score == 0 and not g.feedback for g in grades)


def test_a_grader_cannot_move_the_run(user_folder: Path) -> None:
    """Its folder may be relative."""
    with pytest.warns(UserWarning, match="changed the working directory"):
        result = grade(make_task(grader="mine:moves"), "a")
    assert result is not None and "changed the working directory" in str(result.error)
    assert Path.cwd() == user_folder
    (user_folder / "mover.py").write_text("import os\nos.chdir('/')\ndef grade(r, t): return 1.0\n")
    with pytest.raises(TaskError, match="importing 'mover' changed the working directory to '/'"):
        load_grader("mover:grade")
    assert Path.cwd() == user_folder


@pytest.mark.parametrize("name", ["sleeps", "backtracks"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_grader_has_a_time_limit(user_folder: Path, name: str, in_thread: bool) -> None:
    if in_thread and name == "backtracks":
        pytest.skip("a regular expression holds the interpreter; only a signal interrupts it")
    task = make_task(grader=f"mine:{name}")
    results: list[Any] = []

    def run() -> None:
        results.append(grade(task, "x", seconds=0.1))

    with pytest.warns(UserWarning, match=r"did not return within 0\.1 seconds"):
        if in_thread:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(10)
        else:
            run()
    [result] = results
    assert result.score == 0 and "tasks.grader_seconds" in result.error


@pytest.mark.filterwarnings("ignore:grader")
def test_a_grader_that_always_hangs_stops_the_run(user_folder: Path) -> None:
    task = make_task(grader="mine:sometimes")
    for _ in range(2):
        good = grade(task, "quick", seconds=5)
        assert good is not None and good.passed
        for _ in range(4):
            assert grade(task, "slow", seconds=0.03) is not None
    with pytest.raises(RunError, match=r"on 5 responses in a row, the last on task t"):
        grade(task, "slow", seconds=0.03)


@pytest.mark.filterwarnings("ignore:grader")
def test_a_grader_may_use_alarms_and_may_not_end_the_process(user_folder: Path) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    good = grade(make_task(grader="mine:has_alarm"), "x")
    assert good is not None and good.passed
    exit_grade = grade(make_task(grader="mine:leaves"), "x")
    assert exit_grade is not None and exit_grade.error == "SystemExit: 3"
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_reward_functions_of_trl_are_graders(user_folder: Path) -> None:
    length = grade(make_task(grader="mine:trl_length"), "12345")
    assert length is not None and (length.score, length.passed) == (0.5, False)
    task = make_task(grader="mine:trl_answer", answer="4", grader_args={"weight": 1.0})
    require_gradable(task)
    right, wrong = grade(task, "4"), grade(task, "5")
    assert right is not None and right.passed and wrong is not None and wrong.score == 0
    with pytest.raises(RunError, match=r"returned score 3\.0 on task t, which is outside of"):
        grade(make_task(grader="mine:trl_long"), "x")
    with pytest.raises(RunError, match="returned NoneType"):
        grade(make_task(grader="mine:trl_none"), "x")


def test_the_recipe_sets_the_time_of_graders(user_folder: Path, tiny_folder: Path) -> None:
    from support.small_runs import small_recipe

    import courtside

    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "custom", "path": "mine:dicts", "grader": "mine:sleeps",
               "grader_seconds": 0.05},
        teacher={"kind": "self", "weights": "frozen"},
        train={"steps": 1, "prompts_per_step": 1},
        evaluate={"num_tasks": 1},
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"within 0\.05 seconds"):
        run = courtside.train(recipe, user_folder / "run")
    assert run.metrics()[0]["reward/grader_errors"] == 2


def test_the_grader_of_the_section_is_the_default(user_folder: Path) -> None:
    file = user_folder / "tasks.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{"prompt": "b", "grader": null}\n'
        '{"prompt": "c", "answer": "4", "grader": "math"}\n'
    )
    graders = [task.grader for task in read_jsonl_tasks(file, "mine:half")]
    assert graders == ["mine:half", None, "math"]
    config = JsonlTasks(kind="jsonl", path=file, grader="mine:haf")
    with pytest.raises(TaskError, match=r"line 1: .*has no function 'haf'"):
        make_task_source(config, seed=0)


# ── task sources ─────────────────────────────────────────────────────────────────────────────────


def custom_tasks(name: str, **changes: Any) -> tuple[Task, ...]:
    return load_custom_tasks(CustomTasks(kind="custom", path=f"mine:{name}", **changes))


def test_records_and_dicts(user_folder: Path) -> None:
    tasks = custom_tasks("tasks", settings={"n": 6})
    assert [task.id for task in tasks] == [f"t-{i}" for i in range(6)]
    dicts = custom_tasks("dicts", grader="exact")
    assert len(dicts) == 20 and {task.grader for task in dicts} == {"exact"}
    assert len({task.split for task in dicts}) > 1
    config = CustomTasks(kind="custom", path="mine:tasks", system_prompt="Be kind.", limit=2)
    batch = make_task_source(config, seed=0).batch(0, 4)
    assert len({task.id for task in batch}) == 2
    assert {task.messages[0].content for task in batch} == {"Be kind."}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nothing", {}, "has no function 'nothing'"),
        ("dicts", {"settings": {"m": 2}}, "unexpected keyword argument 'm'"),
        ("empty", {}, "returned no tasks"),
        ("number", {}, "returned int"),
        ("one_dict", {}, "returned dict"),
        ("mixed", {}, "item 1 is dict"),
        ("same_ids", {}, "item 1: id = 't-1' is that of another task"),
        ("no_id", {}, "item 0: id = ''"),
        ("bad_split", {}, "split = 'dev'"),
        ("set_args", {}, "item 0: grader_args['a'] is no JSON value"),
        ("no_messages", {}, "the last one must be a user's"),
        ("text_messages", {}, "messages is a str; use a tuple of courtside.types.Message"),
        ("int_content", {}, "messages[0].content is an int; use a text"),
        ("half_a_pair", {}, "messages[0].content has half of a surrogate pair"),
        ("odd_role", {}, "messages[0].role = 'bot'; use one of"),
        ("number_answer", {}, "item 0: answer is an int; use a text"),
        ("number_grader", {}, "item 0: grader is an int; use a text"),
        ("number_fact", {}, "privileged['a'] is an int; names and values are texts"),
        ("text_tags", {}, "tags = 'x'; use a tuple of texts"),
        ("no_completion", {}, "completion is empty; write the answer to imitate, or leave it out"),
        ("raises_late", {}, "raises_late' raised KeyError: 'x' (mine.py, line "),
        ("set_in_dict", {}, "item 0: `grader_args` must hold JSON values"),
        ("nan_answer", {}, "item 0: answer = nan; write a finite number, or a text"),
        ("own_answer", {}, "the last one must be a user's"),
        ("unknown_grader", {}, "item 0: task t-0: grader = 'vibes' is not known"),
        ("bad_key", {}, "item 0: unknown key 'promt'"),
        ("bad_prompt", {}, "item 0: `prompt` must be a text"),
        ("tasks", {"grader": "exact"}, "tasks.grader is the default of tasks written as dicts"),
    ],
)
def test_task_sources_that_cannot_work(
    user_folder: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        custom_tasks(name, **changes)
    assert message in str(caught.value)


def test_what_a_task_source_raises_is_told_with_its_place(user_folder: Path) -> None:
    with pytest.raises(TaskError) as caught:
        custom_tasks("fails")
    line = USER_MODULE.splitlines().index('def fails(): raise OSError("no database")') + 1
    assert str(caught.value) == (
        "tasks.path = 'mine:fails': fails(**settings) raised OSError: no database "
        f"(mine.py, line {line})"
    )


# ── readers ──────────────────────────────────────────────────────────────────────────────────────


def custom_reader(name: str, **changes: Any) -> CustomReader:
    return CustomReader(CustomReaderConfig(kind="custom", path=f"mine:{name}", **changes))


def test_its_hints_are_those_of_any_reader(user_folder: Path) -> None:
    batch = [make_trajectory("a"), make_trajectory("b")]
    long = custom_reader("Reader", max_chars=4)(batch)
    assert not long.hints and long.counts == {"custom/proposed": 2, "dropped/long_hint": 2}
    members = tuple(
        CustomReaderConfig(kind="custom", path=f"mine:{name}") for name in ("Late", "Reader")
    )
    output = make_reader(CombinedReaderConfig(kind="combined", readers=members), seed=0)(batch)
    assert [hint.turn for hint in output.hints] == [1, 1]
    assert output.counts["dropped/no_such_turn"] == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: custom_reader("Nobody"), "has no class 'Nobody'"),
        (lambda: custom_reader("function"), "has no class 'function'"),
        (lambda: custom_reader("NotCallable"), "no method __call__(trajectories)"),
        (lambda: custom_reader("Reader", settings={"word": "x"}), "Reader takes text='Be brief.'"),
        (lambda: custom_reader("Raises")([]), "raised KeyError: 'x' (mine.py, line "),
        (lambda: custom_reader("RaisesLate")([]), "raised KeyError: 'x' (mine.py, line "),
        (lambda: custom_reader("ReturnsNone")([]), "returned NoneType"),
        (lambda: custom_reader("ReturnsText")([]), "returned str"),
        (lambda: custom_reader("ReturnsTexts")([]), "a list with str in it"),
        (lambda: custom_reader("WrongTurn")([]), "Hint.turn = '1' must be int"),
        (lambda: custom_reader("WrongText")([]), "Hint.text = None must be str"),
    ],
)
def test_readers_that_cannot_work(
    user_folder: Path, call: Callable[[], object], message: str
) -> None:
    with pytest.raises((RecipeError, RunError)) as caught:
        call()
    assert message in str(caught.value)


# ── recipes ──────────────────────────────────────────────────────────────────────────────────────


def make_recipe(**sections: Any) -> Recipe:
    tree = {
        "student": {"model": "smollm2-135m"},
        "tasks": {"kind": "custom", "path": "mine:dicts"},
        "teacher": {"kind": "self", "weights": "frozen"},
        "losses": [{"kind": "divergence"}],
    }
    return parse_recipe(tree | sections, name="mine.toml")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tasks": {"kind": "custom"}}, "tasks.path"),
        ({"tasks": {"kind": "custom", "path": "mine"}}, "must be 'module:function'"),
        ({"tasks": {"kind": "custom", "path": "mine.py:dicts"}}, "names a file"),
        ({"tasks": {"kind": "custom", "path": "mine:dicts", "grader": "a/b:c"}}, "names a file"),
        ({"tasks": {"kind": "jsonl", "path": "x.jsonl", "grader": "a:"}}, "'module:function'"),
        ({"tasks": {"kind": "custom", "path": "a:b", "settings": {"x": {}}}}, "tasks.settings.x"),
        ({"reader": {"kind": "custom"}}, "reader.path"),
        ({"reader": {"kind": "custom", "path": "Reader"}}, "must be 'module:Class'"),
        ({"reader": {"kind": "custom", "path": "a:B", "setting": {}}}, "reader.setting"),
        ({"reader": {"kind": "custom", "path": "a:B"}}, "no loss has on = 'hinted_turns'"),
    ],
)
def test_sections_that_cannot_work(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_recipe(**sections)
    assert message in str(caught.value)
